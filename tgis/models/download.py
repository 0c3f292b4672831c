"""Downloads a model's files into the local hub cache with huggingface_hub.

A revision points to the new commit once all selected files of that commit are there; until then the old one is served.
"""

import glob
import sys
from functools import partial
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants

from tgis.errors import StartError
from tgis.models import hub
from tgis.models.hub import Listing
from tgis.models.staging import check_free_space
from tgis.utils.logs import format_bytes


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
        raise hub.start_error(error, api, listing.repo, listing.commit) from error


def _update_ref(ref: Path, commit: str) -> None:
    """Make the revision point to the commit."""
    if ref.is_file() and ref.read_text() == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{ref.name}.new")
    fresh.write_text(commit)
    fresh.replace(ref)
