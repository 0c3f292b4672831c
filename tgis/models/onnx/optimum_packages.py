"""Installs Optimum and the older transformers that it needs into a directory of their own in the cache.

Only the export's child process has that directory on its path; the server never does.
"""

import hashlib
import sys
from pathlib import Path

from tgis.errors import StartError
from tgis.models.staging import run_child, staging_directory
from tgis.utils.file_lock import locked

REQUIREMENTS = Path(__file__).with_name("optimum.txt")
INSTALL_SECONDS = 1800


def ensure_packages(cache_dir: Path) -> Path:
    """The directory, created once; pip reads its own variables, such as PIP_FIND_LINKS. StartError if that fails."""
    key = hashlib.sha256(f"{sys.version_info[:2]} {REQUIREMENTS.read_text()}".encode()).hexdigest()[:12]
    target = cache_dir / f"optimum-{key}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / ".optimum.lock"):
            if not target.is_dir():
                print(f"installing Optimum into {target}, apart from the packages of tgis ...", file=sys.stderr)
                _install(target)
    except OSError as error:
        raise StartError(f"cannot make {target}: {error.strerror}") from error
    return target


def _install(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--requirement", str(REQUIREMENTS)]
    with staging_directory(target.parent, ".optimum-") as staging:
        if reason := run_child([*command, "--target", str(staging)], INSTALL_SECONDS):
            raise StartError(f"cannot install Optimum (PIP_FIND_LINKS and --python need no network): {reason}")
        staging.rename(target)
