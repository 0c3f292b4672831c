"""Shared by the commands that call a server: its address, TLS, token and adapter, and errors as one line."""

import argparse
import contextlib
import http.client
import json
import os
import re
import ssl
import sys
import unicodedata
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from tgis.errors import OptionError, StartError, file_errors
from tgis.utils.options import PATH, TEXT, ValueType, decimal

GRPC_TARGET = "localhost:8033"
UNARY_TIMEOUT_SECONDS = 10.0
HTTP_TARGET = "localhost:3000"
NO_API = "there is no API of OpenAI"
_MAX_ERROR_BYTES = 2000
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]
_CLOSED = "failed to connect.*(closed|reset|pipe)|RemoteDisconnected|ConnectionReset|SSLEOF"
# Explanations by a pattern of the error text of gRPC or the standard library; the first match wins.
_CAUSES = {
    "Connection refused": "nothing listens at {target}; is `tgis serve` running?",
    r"http1\.x server|ALPN": "{target} is an HTTP port: gRPC has another, 8033 by default",
    "(?i)bad ?status ?line|closing transport": "{target} is a gRPC port: HTTP has another, 3000 by default",
    "WRONG_VERSION_NUMBER": "{target} has no TLS: leave out --tls, --ca-cert, --tls-cert and --tls-server-name",
    "[Hh]ostname (Ver|mis)|Peer name": "the certificate of {target} has another name, see --tls-server-name",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of {target} is not trusted: --ca-cert names a file with its CA",
    "security handshaker": "--ca-cert, --tls-cert and --tls-key must name PEM files of certificates and their key",
    _CLOSED: "{target} closes the connection: it may want {wanted}",
    "resol(ving|ution)|lookup|gaierror|Name or service": "{target}: there is no host of this name",
    "UNAVAILABLE: (Socket closed|recvmsg)|IncompleteRead": "{target} has closed the connection within the answer",
    "(?i)time.?out|timed out|deadline exceeded|read failed": "{target} has not answered completely in time (--timeout)",
}
_WORDS_OF_GRPC = re.compile(
    "UNAVAILABLE: (failed to connect|errors resolving|DNS resolution|Socket closed|recvmsg)|.*Deadline Exceeded"
)
_LOOPBACK = re.compile(r"(dns:/*|ipv[46]:)?(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")


class Refused(StartError):
    """The server has answered with an error."""


def _address(text: str) -> str:
    if not re.fullmatch(r"(?!https?:)[!-~]+:\d+|unix:[!-~]+", text):
        raise ValueError("must be HOST:PORT, without http://")
    return text


ADDRESS = ValueType("HOST:PORT", _address)


def add_arguments(
    parser: argparse.ArgumentParser, timeout: float | None = UNARY_TIMEOUT_SECONDS, target: str = GRPC_TARGET
) -> None:
    """Add the options for the server and how to call it, with their defaults; a `timeout` of None is no limit."""
    add, limit = parser.add_argument_group("Server").add_argument, "no limit" if timeout is None else f"{timeout:g}"
    help_text = f"address of the server (default: {target})"
    add("--target", type=ADDRESS, default=target, metavar="HOST:PORT", help=help_text)
    help_text = f"seconds that a call may take (default: {limit})"
    add("--timeout", type=decimal(0, 86400, exclude_low=True), default=timeout, metavar="X", help=help_text)
    add("--token-file", type=PATH, metavar="PATH", help="file with a bearer token in its first line")
    add("--tls", action="store_true", help="use TLS; implied by each option below")
    add("--ca-cert", "--tls-ca", type=PATH, metavar="PATH", help="PEM CA certificates to trust")
    add("--tls-cert", type=PATH, metavar="PATH", help="PEM client certificate")
    add("--tls-key", type=PATH, metavar="PATH", help="PEM key of the client certificate")
    add("--tls-server-name", type=TEXT, metavar="NAME", help="expected name in the server's certificate")


def add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ids that requests with a text take."""
    group = parser.add_argument_group("Adapter")
    group.add_argument("--adapter-id", type=TEXT, metavar="ID", help="LoRA adapter or soft prompt to apply")
    group.add_argument(
        "--prefix-id", type=TEXT, metavar="ID", help="soft prompt to apply, unless --adapter-id is given"
    )


@contextlib.contextmanager
def open_channel(options: argparse.Namespace) -> Iterator[grpc.Channel]:
    """A channel to the server; RPC errors in the block become StartErrors."""
    with make_channel(options.target, options) as channel, rpc_errors(options.target, options):
        yield channel


def make_channel(
    target: str,
    options: argparse.Namespace,
    arguments: Sequence[tuple[str, str | int]] = _CHANNEL_OPTIONS,
    library: Any = grpc,
) -> Any:
    """A channel of grpc, or of grpc.aio, with the options of TLS."""
    arguments = [*arguments]
    if _LOOPBACK.fullmatch(target):  # a proxy would connect to its own machine
        arguments.append(("grpc.enable_http_proxy", 0))
    if options.tls_server_name:
        arguments.append(("grpc.ssl_target_name_override", options.tls_server_name))
    if not wants_tls(options):
        return library.insecure_channel(target, arguments)
    credentials = grpc.ssl_channel_credentials(*map(_read, (options.ca_cert, options.tls_key, options.tls_cert)))
    return library.secure_channel(target, credentials, arguments)


@contextlib.contextmanager
def rpc_errors(target: str, options: argparse.Namespace) -> Iterator[None]:
    """RPC errors in the block become StartErrors."""
    try:
        yield
    except grpc.RpcError as error:
        raise StartError(_explain_rpc(target, error, options)) from error


@contextlib.contextmanager
def http_errors(target: str, options: argparse.Namespace) -> Iterator[None]:
    """Errors of an HTTP connection in the block become StartErrors."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise StartError(_explain(target, f"{type(error).__name__}: {error}", options)) from error


def http_call(options: argparse.Namespace, path: str, body: Any, timeout: float | None) -> Generator[bytes, Any, None]:
    """The lines of an answer over HTTP; Refused if its status is an error."""
    headers = dict(metadata(options)) | {"Content-Type": "application/json"}
    context = ssl_context(options)
    with http_errors(options.target, options):
        connection = http.client.HTTPConnection(options.target, timeout=timeout)
        with contextlib.closing(connection):
            connection.connect()
            if context:
                name = options.tls_server_name or connection.host
                connection.sock = context.wrap_socket(connection.sock, server_hostname=name)
            connection.request("POST" if body else "GET", path, body and json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise Refused(f"{options.target}: {error_message(response.read(_MAX_ERROR_BYTES))}")
            yield from response


def error_message(answer: bytes) -> str:
    """The message of an error answer; OpenAI errors are objects, other errors are texts."""
    try:
        error = json.loads(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return NO_API


def metadata(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    """The metadata of every call: the bearer token, if there is one."""
    if options.token_file is None:
        return ()
    token = (_read(options.token_file) or b"").split(b"\n")[0].strip()
    if not token.isascii() or not token:
        raise OptionError(f"{options.token_file}: the first line is no token")
    return (("authorization", f"Bearer {token.decode()}"),)


def ssl_context(options: argparse.Namespace) -> ssl.SSLContext | None:
    """A context for HTTP with TLS; None for plaintext."""
    if not wants_tls(options):
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca_cert)
        if options.tls_cert:
            context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as error:  # an SSLError, too
        files = ", ".join(str(path) for path in (options.ca_cert, options.tls_cert, options.tls_key) if path)
        raise OptionError(f"cannot use {files}: {error.strerror}") from error
    return context


def wants_tls(options: argparse.Namespace) -> bool:
    if (options.tls_key is None) != (options.tls_cert is None):
        raise OptionError("--tls-cert and --tls-key belong together")
    return bool(options.tls or options.tls_server_name or options.ca_cert or options.tls_key)


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


def _explain_rpc(target: str, error: grpc.RpcError, options: argparse.Namespace) -> str:
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    text = f"{error.code().name}: {error.details()}"
    return _explain(target, text, options) if _WORDS_OF_GRPC.match(text) else f"{target}: {text}"


def _explain(target: str, text: str, options: argparse.Namespace) -> str:
    """A sentence for what a library says, or else that."""
    sentences = (sentence for pattern, sentence in _CAUSES.items() if re.search(pattern, text))
    wanted = "a certificate, see --tls-cert and --tls-key" if wants_tls(options) else "TLS, see --tls and --ca-cert"
    return next(sentences, "{target}: {text}").format(target=target, text=text, wanted=wanted)


def _read(path: Path | None) -> bytes | None:
    with file_errors(f"cannot read {path}", OptionError):
        return path.read_bytes() if path else None
