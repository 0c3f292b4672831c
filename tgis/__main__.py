"""`tgis COMMAND`: runs a module of `tgis.cli` and turns its errors into one line and an exit code.

Only the module of the command is imported, so that no command pays for the dependencies of another.
"""

import errno
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TypeAlias

import tgis
from tgis.errors import OptionError, StartError
from tgis.utils import stop_signals

Commands: TypeAlias = Mapping[str, tuple[str, str]]

# By name: the function in `tgis.cli` and the help.
COMMANDS = {
    "serve": ("serve.main", "serve a model over HTTP and gRPC"),
    "chat": ("chat.main", "chat with the model in the terminal"),
    "generate": ("generate.main", "stream the continuation of a prompt"),
    "verify": ("verify.main", "answer recorded requests again, and compare"),
    "tokenize": ("calls.tokenize", "show the tokens of a text"),
    "model-info": ("calls.model_info", "show the kind and the limits of the served model"),
    "health": ("calls.health", "check a server: exit code 0 if it is ready"),
    "bench": ("bench.main", "measure the latency and throughput of a server"),
    "prompts": ("prompts.main", "check a directory of LoRA adapters and soft prompts"),
}
MODEL_FILE_COMMANDS = {
    "download-weights": ("download_weights.main", "download a model from the Hub into the local cache"),
    "convert-to-safetensors": ("convert.safetensors", "convert .bin weights to safetensors"),
    "convert-to-fast-tokenizer": ("convert.fast_tokenizer", "convert a slow tokenizer to tokenizer.json"),
    "convert-to-onnx": ("convert.onnx", "export a model to ONNX graphs"),
    "quantize": ("quantize.main", "quantize a model to 4 or 8 bits with auto-round"),
}
COMMANDS |= MODEL_FILE_COMMANDS
GROUPS = {
    "Serve": ("download-weights", "serve", "prompts"),
    "Try": ("chat", "generate", "tokenize", "model-info"),
    "Measure and check": ("bench", "verify", "health"),
    "Convert": ("convert-to-safetensors", "convert-to-fast-tokenizer", "convert-to-onnx", "quantize"),
}
# The modules that need no more than the package tgis-client installs.
CLIENT_MODULES = ("bench", "calls", "chat", "generate", "verify")
EXIT_INTERRUPTED = 130  # the exit code of shells for SIGINT


def main() -> int:
    """Entry point of `tgis`."""
    return run(sys.argv[1:])


def launcher() -> int:
    """Entry point of `text-generation-launcher`, TGIS's name for `tgis serve`."""
    return run_command("serve.main", sys.argv[1:], "text-generation-launcher")


def model_files() -> int:
    """Entry point of `text-generation-server` and `model-util`, the names in TGIS and vllm-tgis-adapter."""
    return run(sys.argv[1:], os.path.basename(sys.argv[0]), MODEL_FILE_COMMANDS)


def grpc_healthcheck() -> int:
    """Entry point of `grpc_healthcheck`, the probe of vllm-tgis-adapter."""
    return run_command("calls.grpc_healthcheck", sys.argv[1:], "grpc_healthcheck")


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Ends the command with exit code 1 and without a traceback when stdout takes no more: its reader, e.g. `head`, has
    exited, or its disk is full.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout:  # None where the shell closed it
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"tgis: cannot write: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # avoids a second error on exit
        sys.exit(1)


@_reader_may_leave()
def run(argv: list[str], prog: str = "tgis", commands: Commands = COMMANDS) -> int:
    """Run the command that `argv` starts with; it must be one of `commands`."""
    match argv:
        case [command, *rest] if command in commands:
            return run_command(commands[command][0], rest, f"{prog} {command}")
        case ["-h" | "--help", *_]:
            print(_usage(prog, commands))
            return 0
        case ["-V" | "--version", *_]:
            print(f"tgis {tgis.__version__}")
            return 0
        case [command, *_]:
            from tgis.utils.options import closest  # noqa: PLC0415 - slow

            meant = closest(command, commands)
            suggestion = f", did you mean {meant}?" if meant else ""
            print(f"tgis: there is no command {command!r:.80}{suggestion} (see {prog} --help)", file=sys.stderr)
        case _:
            print(_usage(prog, commands), file=sys.stderr)
    return OptionError.exit_code


@_reader_may_leave()
def run_command(function: str, argv: list[str], prog: str) -> int:
    """Run a function of `tgis.cli` and return its exit code; expected errors are one line on stderr."""
    module_name, _, function_name = function.partition(".")
    if module_name == "serve":
        stop_signals.handle_by_exit()
    from tgis.environment import prepare_command  # noqa: PLC0415 - slow

    try:
        if module_name not in CLIENT_MODULES and not find_spec("tgis.engines"):
            raise StartError(f"{prog} needs the server: pip install . in a checkout")
        prepare_command()
        code: int = getattr(importlib.import_module(f"tgis.cli.{module_name}"), function_name)(argv, prog)
        return code
    except StartError as error:
        print(f"tgis: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _usage(prog: str, commands: Commands) -> str:
    lines = [f"usage: {prog} COMMAND [options]", ""]
    for group, names in GROUPS.items():
        if shown := [f"  {name:<27}{commands[name][1]}" for name in names if name in commands]:
            lines += [f"{group}:", *shown, ""]
    return "\n".join([*lines, f"See {prog} COMMAND --help for options; {prog} --version for the version."])


if __name__ == "__main__":
    sys.exit(main())
