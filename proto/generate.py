"""Makes the stubs in tgis/pb from generation.proto, or with --check says whether they are up to date.

The compiler is pinned to the oldest grpcio-tools of the supported range, in an environment of its own under
build/: what it generates carries no runtime version check, so it works with protobuf 4.25 to 7.
"""

import argparse
import difflib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "grpcio-tools==1.62.3"
ENVIRONMENT = ROOT / "build" / COMPILER.replace("==", "-")
PYTHON = str(ENVIRONMENT / "bin" / "python")
DIFF_WIDTH = 160  # the serialized descriptor is one line of many thousand characters
STUBS = ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py")


def install() -> None:
    """Create the compiler's environment unless an earlier run has finished it."""
    finished = ENVIRONMENT / "finished"
    if finished.exists():
        return
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    # grpcio-tools 1.62 imports pkg_resources, which newer setuptools no longer has
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", COMPILER, "setuptools<80"], check=True)
    finished.touch()


def compile_into(root: Path) -> None:
    """Write the stubs to `root`/tgis/pb.

    The mapped path puts the proto into the package, so that the stubs import each other from tgis.pb.
    """
    outputs = [f"--{kind}={root}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [PYTHON, "-m", "grpc_tools.protoc", "-Itgis/pb=proto", *outputs, "tgis/pb/generation.proto"]
    subprocess.run(command, cwd=ROOT, check=True)


def difference(fresh: Path) -> str:
    """Unified diff from the committed stubs to those under `fresh`; empty when they are equal."""
    lines: list[str] = []
    for name in STUBS:
        committed, wanted = ROOT / "tgis/pb" / name, fresh / "tgis/pb" / name
        old = committed.read_text().splitlines(keepends=True) if committed.exists() else []
        new = wanted.read_text().splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, f"tgis/pb/{name}", f"tgis/pb/{name} (generated)")
    return "".join(line.rstrip("\n")[:DIFF_WIDTH] + "\n" for line in lines)


def check() -> int:
    """Compare the committed stubs with fresh ones: 0 when equal, else 1 and the difference."""
    with tempfile.TemporaryDirectory() as directory:
        compile_into(Path(directory))
        found = difference(Path(directory))
    if not found:
        return 0
    sys.stdout.write(found)
    sys.stderr.write("tgis/pb does not match proto/generation.proto: run python proto/generate.py\n")
    return 1


def main() -> int:
    """Generate, or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if tgis/pb is stale")
    arguments = parser.parse_args()
    install()
    if arguments.check:
        return check()
    compile_into(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
