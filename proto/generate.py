"""Generates the stubs in tgis/pb from generation.proto; --check verifies that they are up to date.

The compiler is the oldest supported grpcio-tools, in a virtual environment under build/: its stubs have no runtime
version check and work with protobuf 4.25 to 7.
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
DIFF_WIDTH = 160  # the serialized descriptor is a line of thousands of characters
STUBS = ("generation_pb2.py", "generation_pb2.pyi", "generation_pb2_grpc.py")


def install() -> None:
    """Create the compiler's environment unless that has been done."""
    finished = ENVIRONMENT / "finished"
    if finished.exists():
        return
    venv.create(ENVIRONMENT, clear=True, with_pip=True)
    # grpcio-tools 1.62 imports pkg_resources, which newer setuptools no longer has
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", COMPILER, "setuptools<80"], check=True)
    finished.touch()


def compile_into(root: Path) -> None:
    """Write the stubs to `root`/tgis/pb; mapping proto/ to tgis/pb makes them import each other from there."""
    outputs = [f"--{kind}={root}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [PYTHON, "-m", "grpc_tools.protoc", "-Itgis/pb=proto", *outputs, "tgis/pb/generation.proto"]
    subprocess.run(command, cwd=ROOT, check=True)


def difference(fresh: Path) -> str:
    """Unified diff from the committed stubs to those under `fresh`."""
    lines: list[str] = []
    for name in STUBS:
        committed, wanted = ROOT / "tgis/pb" / name, fresh / "tgis/pb" / name
        old = committed.read_text().splitlines(keepends=True) if committed.exists() else []
        new = wanted.read_text().splitlines(keepends=True)
        lines += difflib.unified_diff(old, new, f"tgis/pb/{name}", f"tgis/pb/{name} (generated)")
    return "".join(line.rstrip("\n")[:DIFF_WIDTH] + "\n" for line in lines)


def check() -> int:
    """Return 0 if the committed stubs are up to date, else print the difference and return 1."""
    with tempfile.TemporaryDirectory() as directory:
        compile_into(Path(directory))
        found = difference(Path(directory))
    if not found:
        return 0
    sys.stdout.write(found)
    sys.stderr.write("tgis/pb does not match proto/generation.proto: run make proto\n")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if tgis/pb is stale")
    arguments = parser.parse_args()
    install()
    if arguments.check:
        return check()
    compile_into(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
