"""`tgis COMMAND`: finds the command's module in `tgis.cli`; its errors become one line and an exit code.

A module is imported only when its command runs, so that none pays for what another one needs.
"""

import importlib
import os
import sys

import tgis
from tgis.errors import OptionError, StartError

COMMANDS = {
    "serve": "serve a model over gRPC",
    "generate": "continue a text, on the terminal, while it is generated",
    "tokenize": "split a text into tokens",
    "model-info": "tell what a server serves",
    "health": "ask a server whether it is ready; the exit code tells",
    "bench": "measure a running server",
    "simulate": "run a trace through the batcher, without a model",
}
INTERRUPTED = 130  # as shells report SIGINT


def main() -> int:
    """Entry point of `tgis`."""
    return run(sys.argv[1:])


def launcher() -> int:
    """Entry point of `text-generation-launcher`, TGIS's name of `tgis serve`."""
    return guarded("serve", sys.argv[1:], "text-generation-launcher")


def run(argv: list[str]) -> int:
    """Run the command that `argv` begins with."""
    match argv:
        case []:
            print(_usage(), file=sys.stderr)
            return OptionError.exit_code
        case ["-h" | "--help", *_]:
            print(_usage())
            return 0
        case ["--version", *_]:
            print(f"tgis {tgis.__version__}")
            return 0
        case [command, *rest]:
            return guarded(command, rest, f"tgis {command}")
    raise AssertionError


def guarded(command: str, argv: list[str], prog: str) -> int:
    """Run a command; returns its exit code, whatever happens to it."""
    try:
        if command not in COMMANDS:
            raise OptionError(f"there is no command {command!r:.80} (see tgis --help)")
        module = importlib.import_module(f"tgis.cli.{command.replace('-', '_')}")
        code: int = module.main(argv, prog)
        sys.stdout.flush()
        return code
    except StartError as error:
        print(f"tgis: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit complains once more
        return 1


def _usage() -> str:
    lines = [f"  {name:<12}{about}" for name, about in COMMANDS.items()]
    head = ["usage: tgis COMMAND [options]", "", "Text generation over gRPC. The commands:", ""]
    return "\n".join([*head, *lines, "", "tgis COMMAND --help tells more; tgis --version tells the version."])


if __name__ == "__main__":
    sys.exit(main())
