"""`tgis COMMAND`: finds the command's module in `tgis.cli`; its errors become one line and an exit code.

A module is imported only when its command runs, so that none pays for what another one needs.
"""

import importlib
import os
import sys
from collections.abc import Collection

import tgis
from tgis.errors import OptionError, StartError

COMMANDS = {
    "serve": "serve a model over gRPC",
    "generate": "continue a text, shown as it is generated",
    "tokenize": "split a text into tokens",
    "model-info": "tell what a server serves",
    "health": "ask a server whether it is ready (by the exit code)",
    "bench": "measure a running server",
    "prompts": "say what is in a store of adapters",
    "simulate": "run a trace through the batcher, without a model",
    "download-weights": "bring a model from the hub into the local cache",
    "convert-to-safetensors": "make safetensors of a model's .bin weights",
    "convert-to-fast-tokenizer": "make a tokenizer.json of an older tokenizer",
    "convert-to-onnx": "make ONNX graphs for the engine hf_optimum_ort",
}
MODEL_FILE_COMMANDS = ("download-weights", "convert-to-safetensors", "convert-to-fast-tokenizer", "convert-to-onnx")
EXIT_INTERRUPTED = 130  # as shells report SIGINT


def main() -> int:
    """Entry point of `tgis`."""
    return run(sys.argv[1:])


def launcher() -> int:
    """Entry point of `text-generation-launcher`, TGIS's name of `tgis serve`."""
    return run_command("serve", sys.argv[1:], "text-generation-launcher")


def model_files() -> int:
    """Entry point of `text-generation-server` and `model-util`: TGIS's and the adapter's names, for model files."""
    return run(sys.argv[1:], os.path.basename(sys.argv[0]), MODEL_FILE_COMMANDS)


def run(argv: list[str], prog: str = "tgis", commands: Collection[str] = COMMANDS) -> int:
    """Run the command that `argv` begins with, one of `commands`."""
    match argv:
        case []:
            print(_usage(prog, commands), file=sys.stderr)
            return OptionError.exit_code
        case ["-h" | "--help", *_]:
            print(_usage(prog, commands))
            return 0
        case ["--version", *_]:
            print(f"tgis {tgis.__version__}")
            return 0
        case [command, *rest] if command in commands:
            return run_command(command, rest, f"{prog} {command}")
        case [command, *_]:
            print(f"tgis: there is no command {command!r:.80} (see {prog} --help)", file=sys.stderr)
            return OptionError.exit_code
    raise AssertionError


def run_command(command: str, argv: list[str], prog: str) -> int:
    """Run a command; returns its exit code, whatever happens to it."""
    try:
        module = importlib.import_module(f"tgis.cli.{command.replace('-', '_')}")
        code: int = module.main(argv, prog)
        sys.stdout.flush()
        return code
    except StartError as error:
        print(f"tgis: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the exit complains once more
        return 1


def _usage(prog: str, commands: Collection[str]) -> str:
    lines = [f"  {name:<27}{COMMANDS[name]}" for name in commands]
    head = [f"usage: {prog} COMMAND [options]", "", "Text generation over gRPC. The commands:", ""]
    return "\n".join([*head, *lines, "", f"{prog} COMMAND --help tells more; {prog} --version tells the version."])


if __name__ == "__main__":
    sys.exit(main())
