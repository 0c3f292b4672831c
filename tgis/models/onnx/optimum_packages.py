"""Optimum and the older transformers that it needs, in a folder of their own under the cache directory.

The folder stands before tgis's packages for one child process; nothing that serves ever sees it.
"""

import contextlib
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from tgis.errors import StartError
from tgis.utils import child_process
from tgis.utils.file_lock import locked

REQUIREMENTS = Path(__file__).with_name("optimum.txt")
INSTALL_SECONDS = 1800


def ensure_packages(cache_dir: Path, wheels: Path | None) -> Path:
    """The folder, made once after saying so, out of the wheels in a folder if one is named; StartError if it fails."""
    key = hashlib.sha256(f"{sys.version_info[:2]} {REQUIREMENTS.read_text()}".encode()).hexdigest()[:12]
    target = cache_dir / f"optimum-{key}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / ".optimum.lock"):
            if not target.is_dir():
                print(f"installing Optimum into {target}, apart from the packages of tgis ...", file=sys.stderr)
                _install(target, wheels)
    except OSError as error:
        raise StartError(f"cannot make {target}: {error.strerror}") from error
    return target


def _install(target: Path, wheels: Path | None) -> None:
    staging = Path(tempfile.mkdtemp(prefix=".optimum-", dir=target.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--requirement", str(REQUIREMENTS), "--target", str(staging)]
    if wheels is not None:
        command += ["--no-index", "--find-links", str(wheels)]
    try:
        if reason := child_process.run(command, INSTALL_SECONDS):
            raise StartError(f"cannot install Optimum (--wheels and --python need no network): {reason}")
        staging.chmod(0o755)
        staging.rename(target)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(staging)
