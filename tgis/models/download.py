"""Downloads a model's files into the local hub cache with huggingface_hub.

A revision points to the new commit once all selected files of that commit are there; until then the old one is served.
"""

import glob
import sys
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants

from tgis.errors import StartError
from tgis.models import hub
from tgis.models.hub import HubFile, Listing
from tgis.models.staging import check_free_space, format_bytes


def download(api: HfApi, listing: Listing, files: tuple[HubFile, ...], revision: str | None, cache: Path) -> Path:
    """Download `files` of a listing into `cache`; returns the directory of the snapshot.

    StartError if a file cannot be downloaded or stored; the next run downloads only the files that are not complete.
    """
    folder, snapshot = _folder(listing, cache), snapshot_of(listing, cache)
    revision = revision or constants.DEFAULT_REVISION
    if ".." in PurePosixPath(revision).parts or revision.startswith("/"):
        raise StartError(f"{revision!r:.100} is no name of a revision")
    try:
        missing = [file for file in files if _size_of(snapshot / file.name) != file.size]
        _prepare(folder, listing, missing)
        if missing:
            _fetch(api, listing, missing, cache)
        for file in missing:
            if _size_of(snapshot / file.name) != file.size:
                raise StartError(f"{listing.repo}: {file.name} has not the {file.size} bytes that the hub lists")
        if revision != listing.commit:
            _update_ref(folder / "refs" / revision, listing.commit)
    except OSError as error:
        where = error.filename or cache
        raise StartError(f"cannot write {where}: {error.strerror or error}; complete files are kept") from error
    return snapshot


def snapshot_of(listing: Listing, cache: Path) -> Path:
    """The directory of a listing's files, which may not exist yet."""
    return _folder(listing, cache) / "snapshots" / listing.commit


def _folder(listing: Listing, cache: Path) -> Path:
    return cache / "--".join(["models", *listing.repo.split("/")])


def _prepare(folder: Path, listing: Listing, missing: list[HubFile]) -> None:
    """Print what is to download, check that there is room for it, and remove truncated files."""
    blobs = {folder / "blobs" / file.digest: file.size for file in missing}
    sizes = [size for blob, size in blobs.items() if _size_of(blob) != size]
    plan = f"{len(sizes)} file{'s' * (len(sizes) > 1)} to download, {format_bytes(sum(sizes))}"
    where = f"{listing.repo} at commit {listing.commit[:12]}"
    print(f"{where}: {plan if sizes else 'all files are here'}", file=sys.stderr, flush=True)
    if sizes:
        folder.mkdir(parents=True, exist_ok=True)
        check_free_space(folder, sum(sizes), listing.repo)
    links = {folder / "snapshots" / listing.commit / file.name: file.size for file in missing}
    for path, size in (links | blobs).items():
        if _size_of(path) not in (-1, size):
            path.unlink()


def _fetch(api: HfApi, listing: Listing, files: list[HubFile], cache: Path) -> None:
    names = [glob.escape(file.name) for file in files]
    try:
        api.snapshot_download(listing.repo, revision=listing.commit, cache_dir=cache, allow_patterns=names)
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


def _size_of(path: Path) -> int:
    """The size of a file in bytes, -1 if it is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
