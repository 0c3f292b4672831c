"""Downloads the files of a model into the local hub cache.

huggingface_hub does the work, and handles tokens, HF_ENDPOINT, proxies and HF_HUB_OFFLINE. Errors are StartErrors of
one line, without tokens and signed URLs.
"""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tgis.errors import StartError

# Files in directories are mostly of other frameworks; the others are about training
_IGNORED_FILES = ["*/*", "*arguments*", "*args*", "*training*"]


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
        raise StartError(f"cannot download {repo!r:.200} from {api.endpoint}: {_describe(error)}") from error
    return Path(path)


def _describe(error: BaseException) -> str:
    """Describe an error of the client in one line."""
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        return _describe(error.__cause__)
    text = " ".join(str(error).split())
    if isinstance(error, HfHubHTTPError):  # its text may have a signed URL
        status = error.response.status_code
        text = f"status {status}: {error.server_message or error.response.reason_phrase}"
        text += " (private and gated models need a token in HF_TOKEN or --token)" * (status in (401, 403))
    return f"{text or type(error).__name__:.200}"
