"""Downloads files from the hub into the local hub cache, in the layout of huggingface_hub.

Interrupted downloads resume, a file gets its final name once its hash is verified, and a revision points to a commit
once all selected files of that commit are there. huggingface_hub's own downloads do none of this.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from tgis.errors import StartError
from tgis.models import hub
from tgis.models.hub import HubFile, Listing
from tgis.models.progress_bar import ProgressBar, format_bytes
from tgis.utils.file_lock import locked

THREADS = 8
MAX_ATTEMPTS = 6  # in a row without progress
MAX_BACKOFF_SECONDS = 16.0
RETRY_STATUSES = (408, 429, 500, 502, 503, 504)
RANGE_NOT_SATISFIABLE = 416
PARTIAL_SUFFIX = ".tgis.incomplete"


def download(api: HfApi, listing: Listing, files: tuple[HubFile, ...], revision: str | None, cache: Path) -> Path:
    """Download `files` of a listing into `cache`; returns the directory of the snapshot.

    StartError if a file cannot be downloaded or stored; the next run resumes.
    """
    run = _Download(api, listing, _folder(listing, cache))
    with _filesystem_errors(cache), locked(cache / ".locks" / run.folder.name / "tgis.lock"):
        run.fetch([file for file in files if not run.is_cached(file)])
        run.snapshot.mkdir(parents=True, exist_ok=True)
        for file in files:
            run.link(file)
        _update_ref(run.folder, revision or constants.DEFAULT_REVISION, listing.commit)
        for left in (run.folder / "blobs").glob(f"*{PARTIAL_SUFFIX}"):  # of outdated commits
            left.unlink()
    return run.snapshot


def snapshot_of(listing: Listing, cache: Path) -> Path:
    """The directory of a listing's files, which may not exist yet."""
    return _folder(listing, cache) / "snapshots" / listing.commit


@dataclass(slots=True)
class _Download:
    """One run for one snapshot; if a thread fails, all stop."""

    api: HfApi
    listing: Listing
    folder: Path  # of the repository in the cache
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def snapshot(self) -> Path:
        return self.folder / "snapshots" / self.listing.commit

    def blob(self, file: HubFile) -> Path:
        return self.folder / "blobs" / file.digest

    def partial(self, file: HubFile) -> Path:
        return self.folder / "blobs" / f"{file.digest}{PARTIAL_SUFFIX}"

    def is_cached(self, file: HubFile) -> bool:
        """Whether the file is in the cache; its hash was verified before it got its name, so the size is enough."""
        return file.size in (_size_of(self.blob(file)), _size_of(self.snapshot / file.name))

    def fetch(self, files: list[HubFile]) -> None:
        """Download the blobs of `files`."""
        files = list({file.digest: file for file in files}.values())
        total = sum(file.size for file in files)
        done = sum(min(max(_size_of(self.partial(file)), 0), file.size) for file in files)
        self._print_plan(len(files), total, done)
        if not files:
            return
        (self.folder / "blobs").mkdir(parents=True, exist_ok=True)
        _check_space(self.folder, total - done)
        progress = ProgressBar(self.listing.repo, total, done)
        with contextlib.closing(progress), ThreadPoolExecutor(THREADS) as pool:
            tasks = [pool.submit(self._fetch_blob, file, progress) for file in files]
            try:
                for task in as_completed(tasks):
                    task.result()
            except BaseException:  # including KeyboardInterrupt
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def link(self, file: HubFile) -> None:
        """Add the file to the snapshot: as a symlink to its blob, or the blob itself where symlinks are unsupported."""
        pointer = self.snapshot / file.name
        if _size_of(pointer) == file.size:
            return
        link = self.snapshot / f".{file.digest}.link"
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(Path("..", "..", "blobs", file.digest))
        except OSError:
            link = self.blob(file)
        link.replace(pointer)

    def _print_plan(self, count: int, total: int, done: int) -> None:
        before = f", of which {format_bytes(done)} came before" if done else ""
        what = (
            f"{count} file{'s' * (count > 1)} to download, {format_bytes(total)}{before}"
            if count
            else "all files are here"
        )
        print(f"{self.listing.repo} at commit {self.listing.commit[:12]}: {what}", file=sys.stderr, flush=True)

    def _fetch_blob(self, file: HubFile, progress: ProgressBar) -> None:
        """Retry until the blob is complete, attempts stop making progress, or another thread fails."""
        partial, failures = self.partial(file), 0
        if _size_of(partial) > file.size:
            partial.unlink()
        partial.touch()
        while (done := _size_of(partial)) < file.size:
            error = self._attempt(file, done, progress)
            failures = 0 if _size_of(partial) > done else failures + 1
            if failures == MAX_ATTEMPTS:
                raise error or StartError(f"{file.name}: nothing comes after byte {done} of {file.size}")
            if self.stop.wait(min(2.0 ** (failures - 1), MAX_BACKOFF_SECONDS) if failures else 0):
                return
        _verify_hash(partial, file)
        partial.replace(self.blob(file))

    def _attempt(self, file: HubFile, done: int, progress: ProgressBar) -> StartError | None:
        """Append the response of one request; returns the error if a retry may help."""
        try:
            self._append(file, done, progress)
        except hub.HTTP_FAILURE as error:
            reason = hub.start_error(error, self.api, self.listing.repo, self.listing.commit)
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
            if status == RANGE_NOT_SATISFIABLE:
                self.partial(file).unlink()  # the part is longer than the hub's file
            if status is not None and status not in RETRY_STATUSES:
                raise reason from error
            return reason
        return None

    def _append(self, file: HubFile, done: int, progress: ProgressBar) -> None:
        url = hf_hub_url(self.listing.repo, file.name, revision=self.listing.commit, endpoint=self.api.endpoint)
        headers = build_hf_headers(
            token=self.api.token, library_name=self.api.library_name, library_version=self.api.library_version
        ) | {"Accept-Encoding": "identity", "Range": f"bytes={done}-"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            hf_raise_for_status(response)
            with self.partial(file).open("r+b") as out:
                if response.status_code != 206:  # the server ignores ranges
                    progress.advance(-done)
                    done = 0
                out.seek(done)
                for chunk in response.iter_bytes():
                    progress.advance(out.write(chunk[: file.size - out.tell()]))
                    if out.tell() == file.size or self.stop.is_set():
                        return


def _folder(listing: Listing, cache: Path) -> Path:
    return cache / "--".join(["models", *listing.repo.split("/")])


@contextlib.contextmanager
def _filesystem_errors(cache: Path) -> Iterator[None]:
    """Reports errors of the file system, above all a full disk."""
    try:
        yield
    except OSError as error:
        where = error.filename or cache
        raise StartError(
            f"cannot write {where}: {error.strerror or error}; what has come is kept for the next run"
        ) from error


def _check_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if need > free:
        raise StartError(f"{folder} needs {format_bytes(need)} more, and its file system has {format_bytes(free)} free")


def _verify_hash(partial: Path, file: HubFile) -> None:
    """StartError unless the content has the hash stated by the hub; the part is then deleted."""
    with partial.open("rb") as content:
        if len(file.digest) == hashlib.sha256().digest_size * 2:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        else:  # git's hash of a blob
            start = b"blob %d\0" % file.size
            found = hashlib.file_digest(content, lambda: hashlib.sha1(start, usedforsecurity=False)).hexdigest()
        os.fsync(content.fileno())
    if found != file.digest:
        partial.unlink()
        raise StartError(f"{file.name} came with hash {found}, not {file.digest}: it was thrown away, download again")


def _update_ref(folder: Path, revision: str, commit: str) -> None:
    """Make the revision point to the commit."""
    if ".." in PurePosixPath(revision).parts or revision.startswith("/"):
        raise StartError(f"{revision!r:.100} is no name of a revision")
    ref = folder / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
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
