"""`tgis COMMAND`: runs a module of `tgis.cli` and turns its errors into one line and an exit code.

Only the module of the command is imported, so that no command pays for the dependencies of another.
"""

import errno
import importlib
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import tgis
from tgis.errors import OptionError, StartError
from tgis.utils import stop_signals

COMMANDS = {
    "serve": "serve a model over gRPC",
    "chat": "chat with the model in the terminal",
    "generate": "stream the continuation of a prompt",
    "tokenize": "tokenize a text",
    "model-info": "show the model's kind and limits",
    "health": "check a server's health (exit code 0: ready)",
    "bench": "load test a running server",
    "prompts": "check a store of soft prompts and LoRA adapters",
    "download-weights": "download a model from the hub into the local cache",
    "convert-to-safetensors": "convert .bin weights to safetensors",
    "convert-to-fast-tokenizer": "convert a slow tokenizer to tokenizer.json",
    "convert-to-onnx": "export a model to ONNX for hf_optimum_ort",
    "quantize": "quantize the weights of a model with auto-round",
}
FUNCTIONS = {  # of commands that are not `main` of the module of their name
    "vllm_tgis_adapter": "serve.main_as_adapter",
    "tokenize": "calls.tokenize",
    "model-info": "calls.model_info",
    "health": "calls.health",
    "grpc_healthcheck": "calls.grpc_healthcheck",
    "convert-to-safetensors": "convert.safetensors",
    "convert-to-fast-tokenizer": "convert.fast_tokenizer",
    "convert-to-onnx": "convert.onnx",
}
SERVERS = ("serve", "vllm_tgis_adapter")
MODEL_FILE_COMMANDS = (
    "download-weights",
    "convert-to-safetensors",
    "convert-to-fast-tokenizer",
    "convert-to-onnx",
    "quantize",
)
NOT_IN_CLIENT = (*SERVERS, *MODEL_FILE_COMMANDS, "prompts")  # need more than tgis-client installs
EXIT_INTERRUPTED = 130  # the exit code of shells for SIGINT


def main() -> int:
    """Entry point of `tgis`."""
    return run(sys.argv[1:])


def launcher() -> int:
    """Entry point of `text-generation-launcher`, TGIS's name for `tgis serve`."""
    return run_command("serve", sys.argv[1:], "text-generation-launcher")


def model_files() -> int:
    """Entry point of `text-generation-server` and `model-util`, the names in TGIS and vllm-tgis-adapter."""
    return run(sys.argv[1:], os.path.basename(sys.argv[0]), MODEL_FILE_COMMANDS)


def grpc_healthcheck() -> int:
    """Entry point of `grpc_healthcheck`, the probe of vllm-tgis-adapter."""
    return run_command("grpc_healthcheck", sys.argv[1:], "grpc_healthcheck")


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
def run(argv: list[str], prog: str = "tgis", commands: Collection[str] = COMMANDS) -> int:
    """Run the command that `argv` starts with; it must be one of `commands`."""
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
            from tgis.utils.options import closest  # noqa: PLC0415 - commands that exist need not pay for it

            meant = closest(command, commands)
            suggestion = f", did you mean {meant}?" if meant else ""
            print(f"tgis: there is no command {command!r:.80}{suggestion} (see {prog} --help)", file=sys.stderr)
            return OptionError.exit_code
    raise AssertionError


@_reader_may_leave()
def run_command(command: str, argv: list[str], prog: str) -> int:
    """Run a command and return its exit code; expected errors are one line on stderr."""
    if command in SERVERS:
        stop_signals.handle_by_exit()
    from tgis.environment import prepare_command  # noqa: PLC0415 - `tgis --help` and --version need no options

    try:
        if command in NOT_IN_CLIENT and not find_spec("tgis.engines"):
            raise StartError(f"{prog} needs the server: pip install . in a checkout")
        prepare_command()
        module, _, function = FUNCTIONS.get(command, f"{command.replace('-', '_')}.main").partition(".")
        code: int = getattr(importlib.import_module(f"tgis.cli.{module}"), function)(argv, prog)
        return code
    except StartError as error:
        print(f"tgis: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _usage(prog: str, commands: Collection[str]) -> str:
    lines = [f"  {name:<27}{COMMANDS[name]}" for name in commands]
    head = [f"usage: {prog} COMMAND [options]", "", "Text generation over gRPC. Commands:", ""]
    return "\n".join([*head, *lines, "", f"See {prog} COMMAND --help for options; {prog} --version for the version."])


if __name__ == "__main__":
    sys.exit(main())
