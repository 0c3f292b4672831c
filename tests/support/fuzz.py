"""Fuzzes the readers of `fuzz_targets.py` with atheris: `python tests/support/fuzz.py [--seconds N] [TARGET ...]`.

What it learns stays in .cache/fuzz, beside the inputs that fail; put these into tests/fuzz_corpus.
"""

import argparse
import subprocess
import sys

import atheris
from repository import REPOSITORY, TEST_CACHE

CORPUS = REPOSITORY / "tests" / "fuzz_corpus"
NAMES = sorted(path.name for path in CORPUS.iterdir())  # of the targets
MAX_BYTES, MAX_MEMORY_MB, MAX_SECONDS = 1 << 14, 2048, 10  # of an input


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all if none is given")
    arguments = parser.parse_args()
    if len(arguments.targets) == 1:
        fuzz(arguments.targets[0], arguments.seconds)
    codes = {name: _in_child(name, arguments.seconds) for name in arguments.targets or NAMES}
    sys.exit(", ".join(name for name, code in codes.items() if code) or None)


def fuzz(name: str, seconds: int) -> None:
    """Never returns: libFuzzer ends the process."""
    learned = TEST_CACHE / "fuzz" / name
    learned.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["tgis", "fuzz_targets"]):
        from fuzz_targets import TARGETS
    limits = f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MAX_MEMORY_MB}", f"-timeout={MAX_SECONDS}"
    places = f"-artifact_prefix={learned.parent}/{name}-", str(learned), str(CORPUS / name)
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", *limits, *places], TARGETS[name])
    atheris.Fuzz()


def _in_child(name: str, seconds: int) -> int:
    command = [sys.executable, __file__, "--seconds", str(seconds), name]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()
