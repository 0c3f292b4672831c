"""Downloads the files of a model into the local hub cache.

huggingface_hub does the work, and handles tokens, HF_ENDPOINT, proxies and HF_HUB_OFFLINE. Errors are StartErrors of
one line, without tokens and signed URLs.
"""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tgis.errors import StartError

# Files in directories are mostly of other frameworks; the others are about training
_IGNORED_FILES = ["*/*", "*arguments*", "*args*", "*training*"]
_ERRORS: dict[type[Exception], str] = {  # subclasses first
    OfflineModeIsEnabled: "HF_HUB_OFFLINE is set: nothing is downloaded",
    GatedRepoError: "{repo} is gated: ask for access at {endpoint}/{repo}, then set HF_TOKEN or --token",
    RevisionNotFoundError: "{repo} has no revision {revision!r:.100}",
    RepositoryNotFoundError: "{endpoint} has no model {repo}; a private one needs a token in HF_TOKEN or --token",
}


def download(api: HfApi, repo: str, revision: str | None, extensions: tuple[str, ...], cache: Path) -> Path:
    """Download the files with these extensions; returns the directory of the snapshot.

    If the hub is unreachable, it is that of an earlier download.
    """
    try:
        path = api.snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache,
            allow_patterns=[f"*{extension}" for extension in extensions],
            ignore_patterns=_IGNORED_FILES,
        )
    except Exception as error:
        raise StartError(_describe(error, api.endpoint, repo, revision)) from error
    return Path(path)


def _describe(error: BaseException, endpoint: str, repo: str, revision: str | None) -> str:
    """Describe an error of the client in one line."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _describe(error.__cause__, endpoint, repo, revision)
    for kind, text in _ERRORS.items():
        if isinstance(error, kind):
            return text.format(endpoint=endpoint, repo=repo, revision=revision)
    text = " ".join(str(error).split())
    if isinstance(error, HfHubHTTPError):
        text = f"status {error.response.status_code}: {error.server_message or error.response.reason_phrase}"
    return f"cannot download {repo!r:.200} from {endpoint}: {text or type(error).__name__:.200}"
