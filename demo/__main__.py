"""`python -m demo NAME [--out CACHE]` prints the directory of a demo model, built once."""

import argparse
import sys
from pathlib import Path

from demo.fetch import MODELS, ensure
from tgis.errors import StartError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="Build a demo model.")
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, default=Path(".cache"), help="cache folder (default: .cache)")
    options = parser.parse_args()
    try:
        directory = ensure(options.name, options.out)
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(directory.absolute())
    return 0


if __name__ == "__main__":
    sys.exit(main())
