"""Lists a model's files on the hub, selects some, and downloads them into the local hub cache with huggingface_hub.

A revision points to the new commit once all selected files of that commit are there; until then the old one is served.
The client is huggingface_hub: it handles tokens, HF_ENDPOINT, proxies and HF_HUB_OFFLINE. The hub's responses are not
trusted; any problem is a StartError of one line without tokens and signed URLs.
"""

import glob
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this release of the client uses: an error status, or no response
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo

from tgis.errors import StartError
from tgis.models.staging import check_free_space
from tgis.utils.logs import format_bytes

TRAINING_FILES = re.compile("arguments|args|training")  # in the names of files about training
COMMIT = re.compile("[0-9a-f]{40}")
MAX_FILES = 10_000


class HubUnreachable(StartError):
    """The hub cannot or must not be contacted; the model may be in the cache."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The names of the files at the root of a repository at one commit."""

    repo: str
    commit: str
    files: tuple[str, ...]


def fetch_listing(api: HfApi, repo: str, revision: str | None) -> Listing:
    """Ask the hub once; StartError if the model is missing or access is denied, HubUnreachable without the hub."""
    try:
        info = api.model_info(repo, revision=revision, timeout=float(constants.HF_HUB_DOWNLOAD_TIMEOUT))
        return _listing(repo, info)
    except HFValidationError as error:
        raise StartError(f"{repo!r:.200} is no name of a model on the hub: {_one_line(error)}") from error
    except (HTTPError, OfflineModeIsEnabled) as error:
        raise start_error(error, api, repo, revision) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StartError(f"{api.endpoint} does not answer as a hub does: {_one_line(error)}") from error


def select_files(listing: Listing, extensions: tuple[str, ...]) -> tuple[str, ...]:
    """The files with one of the extensions, except for those about training."""
    return tuple(name for name in listing.files if name.endswith(extensions) and not TRAINING_FILES.search(name))


def start_error(error: Exception, api: HfApi, repo: str, revision: str | None) -> StartError:
    """The error to report for a failed request."""
    match error:
        case LocalEntryNotFoundError(__cause__=Exception() as cause):
            return start_error(cause, api, repo, revision)
        case OfflineModeIsEnabled():
            return HubUnreachable("HF_HUB_OFFLINE is set: nothing is downloaded")
        case GatedRepoError():
            return StartError(
                f"access to {repo} is granted by its owners: ask for it on its page at {api.endpoint}, then give"
                " a token of that account in HF_TOKEN or --token"
            )
        case RevisionNotFoundError():
            return StartError(f"{repo} has no revision {revision!r:.100}")
        case RepositoryNotFoundError():
            return StartError(
                f"{api.endpoint} has no model {repo}, or a private one, which needs a token in HF_TOKEN or --token"
            )
        case HfHubHTTPError(response=response) if response.status_code >= 500:
            return HubUnreachable(f"{api.endpoint} answers {response.status_code}")
        case HfHubHTTPError(response=response):
            message = _one_line(response.headers.get("X-Error-Message") or response.reason_phrase)
            return StartError(f"{repo}: {api.endpoint} answers {response.status_code}: {message}")
        case HTTPError():
            return HubUnreachable(f"cannot reach {api.endpoint}: {_one_line(error) or type(error).__name__}")
    return StartError(f"cannot download {repo}: {_one_line(error) or type(error).__name__}")


def _listing(repo: str, info: ModelInfo) -> Listing:
    if not COMMIT.fullmatch(info.sha or ""):
        raise ValueError(f"the commit is {info.sha!r:.60}")
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise ValueError(f"it lists {len(siblings)} files, more than {MAX_FILES}")
    assert info.sha is not None
    return Listing(repo, info.sha, tuple(sibling.rfilename for sibling in siblings if _is_root_file(sibling.rfilename)))


def _is_root_file(name: object) -> bool:
    """Files in directories are mostly of other frameworks; this also rejects names that lead elsewhere."""
    return isinstance(name, str) and name.isprintable() and "/" not in name and name.strip(".") != ""


def _one_line(text: object) -> str:
    return "".join(char for char in " ".join(str(text).split()) if char.isprintable())[:200]


def download(api: HfApi, listing: Listing, names: tuple[str, ...], revision: str | None, cache: Path) -> Path:
    """Download files of a listing into `cache`; returns the directory of the snapshot.

    StartError if a file cannot be downloaded or stored; the next run downloads only the files that are not complete.
    """
    snapshot = snapshot_of(listing, cache)
    revision = revision or constants.DEFAULT_REVISION
    if ".." in PurePosixPath(revision).parts or revision.startswith("/"):
        raise StartError(f"{revision!r:.100} is no name of a revision")
    try:
        if any(not (snapshot / name).exists() for name in names):
            _fetch(api, listing, names, cache)
        else:
            print(f"{_title(listing)}: all files are here", file=sys.stderr, flush=True)
        if revision != listing.commit:
            _update_ref(_folder(listing, cache) / "refs" / revision, listing.commit)
    except OSError as error:
        where = error.filename or cache
        raise StartError(f"cannot write {where}: {error.strerror or error}; complete files are kept") from error
    return snapshot


def snapshot_of(listing: Listing, cache: Path) -> Path:
    """The directory of a listing's files, which may not exist yet."""
    return _folder(listing, cache) / "snapshots" / listing.commit


def _folder(listing: Listing, cache: Path) -> Path:
    return cache / "--".join(["models", *listing.repo.split("/")])


def _title(listing: Listing) -> str:
    return f"{listing.repo} at commit {listing.commit[:12]}"


def _fetch(api: HfApi, listing: Listing, names: tuple[str, ...], cache: Path) -> None:
    """Print what is to download, check that there is room for it, and download it."""
    escaped = [glob.escape(name) for name in names]
    fetch = partial(
        api.snapshot_download, listing.repo, revision=listing.commit, cache_dir=cache, allow_patterns=escaped
    )
    try:
        sizes = [file.file_size for file in fetch(dry_run=True) if file.will_download]
        plan = f"{len(sizes)} file{'s' * (len(sizes) > 1)} to download, {format_bytes(sum(sizes))}"
        print(f"{_title(listing)}: {plan}", file=sys.stderr, flush=True)
        folder = _folder(listing, cache)
        folder.mkdir(parents=True, exist_ok=True)
        check_free_space(folder, sum(sizes), listing.repo)
        fetch()
    except StartError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the file system
            raise
        raise start_error(error, api, listing.repo, listing.commit) from error


def _update_ref(ref: Path, commit: str) -> None:
    """Make the revision point to the commit."""
    if ref.is_file() and ref.read_text() == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{ref.name}.new")
    fresh.write_text(commit)
    fresh.replace(ref)
