"""Shared by the commands that call a server: its address, TLS, and errors as one line."""

import argparse
import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import grpc

from tgis.errors import OptionError, StartError
from tgis.utils.options import PATH, TEXT

CALL_TIMEOUT_SECONDS = 10.0  # for calls that do not generate
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `open_channel` reads."""
    group = parser.add_argument_group("Server")
    group.add_argument(
        "--target",
        default="localhost:8033",
        metavar="HOST:PORT",
        help="gRPC address (default: localhost:8033)",
    )
    group.add_argument("--tls", action="store_true", help="use TLS; implied by each option below")
    group.add_argument("--tls-ca", type=PATH, metavar="PATH", help="PEM CA certificates to trust")
    group.add_argument("--tls-cert", type=PATH, metavar="PATH", help="PEM client certificate")
    group.add_argument("--tls-key", type=PATH, metavar="PATH", help="PEM key of the client certificate")
    group.add_argument("--tls-server-name", type=TEXT, metavar="NAME", help="expected name in the server's certificate")


@contextlib.contextmanager
def open_channel(options: argparse.Namespace) -> Iterator[grpc.Channel]:
    """A channel to the server; RPC errors in the block become StartErrors."""
    with _channel(options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise StartError(f"{options.target}: {_status(error)}") from error


def read_text(argument: str | None) -> str:
    """The argument, else all of stdin."""
    if argument is None and sys.stdin.isatty():
        print("enter the text, end with Ctrl-D:", file=sys.stderr)
    data = sys.stdin.buffer.read() if argument is None else os.fsencode(argument)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise OptionError("the text is not UTF-8") from error


def terminal_safe(text: str) -> str:
    """The text with control characters replaced, so that it cannot send commands to the terminal."""
    return "".join(char if char in "\n\t" or unicodedata.category(char) != "Cc" else "\ufffd" for char in text)


def _status(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return f"{error.code().name}: {error.details()}"


def _channel(options: argparse.Namespace) -> grpc.Channel:
    files = (options.tls_ca, options.tls_key, options.tls_cert)
    if not (options.tls or options.tls_server_name or any(files)):
        return grpc.insecure_channel(options.target, _CHANNEL_OPTIONS)
    if (options.tls_key is None) != (options.tls_cert is None):
        raise OptionError("--tls-cert and --tls-key belong together")
    name = [("grpc.ssl_target_name_override", options.tls_server_name)] if options.tls_server_name else []
    credentials = grpc.ssl_channel_credentials(*map(_read, files))
    return grpc.secure_channel(options.target, credentials, [*_CHANNEL_OPTIONS, *name])


def _read(path: Path | None) -> bytes | None:
    try:
        return path.read_bytes() if path else None
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from error
