"""What commands say about an address where something else listens, against real listeners."""

import asyncio
import itertools
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from benchmarks.certificates import make_pair
from tgis.__main__ import run
from tgis.api.http.app import HttpServer
from tgis.config import Config
from tgis.limits import admission
from tgis.security.tls import Certificates, TlsFiles

CA = ("--ca-cert", "ca.crt")
REFUSED = "nothing listens at {}; is `tgis serve` running?"
NO_TLS = "{} has no TLS: leave out --tls, --ca-cert, --tls-cert and --tls-server-name"
CLOSED = "{} closes the connection: it may want TLS, see --tls and --ca-cert"
NO_CERTIFICATE = "{} closes the connection: it may want a certificate, see --tls-cert and --tls-key"
UNTRUSTED = "the certificate of {} is not trusted: --ca-cert names a file with its CA"
BAD_FILES = "--ca-cert, --tls-cert and --tls-key must name PEM files of certificates and their key"
OTHER_NAME = "the certificate of {} has another name, see --tls-server-name"
HTTP_PORT = "{} is an HTTP port: gRPC has another, 8033 by default"
GRPC_PORT = "{} is a gRPC port: HTTP has another, 3000 by default"
SLOW = "{} has not answered completely in time (--timeout)"
NO_HOST = "{}: there is no host of this name"

BENCH = ("bench", "--requests", "1")
GRPC = [("generate", "x"), BENCH]
GRPC_ERRORS = [  # what listens, options, what is said
    ("none", (), REFUSED),
    ("none", CA, REFUSED),
    ("grpc", CA, NO_TLS),
    ("grpc tls", (), CLOSED),
    ("grpc tls", ("--tls",), UNTRUSTED),
    ("grpc tls", ("--ca-cert", "key"), BAD_FILES),
    ("grpc tls", (*CA, "--tls-server-name", "other.example"), OTHER_NAME),
    ("grpc mutual", (*CA, "--tls-server-name", "localhost"), NO_CERTIFICATE),
    ("http", (), HTTP_PORT),
    ("http tls", (*CA, "--tls-server-name", "localhost"), HTTP_PORT),
    ("silent", ("--timeout", "0.1"), SLOW),
    ("elsewhere", (), NO_HOST),
]
HTTP_ERRORS = [
    ("none", (), REFUSED),
    ("none", CA, REFUSED),
    ("http", CA, NO_TLS),
    ("http tls", ("--tls",), UNTRUSTED),
    ("http tls", (*CA, "--tls-server-name", "other.example"), OTHER_NAME),
    ("http tls", (), CLOSED),
    ("http tls", (*CA, "--tls-cert", "crt", "--tls-key", "key"), "{}: no /v1/models: this server generates text"),
    (
        "http tls",
        (*CA, "--tls-cert", "none", "--tls-key", "key"),
        "cannot use ca.crt, none, key: No such file or directory",
    ),
    ("grpc", (), GRPC_PORT),
    ("silent", ("--timeout", "0.1"), SLOW),
    ("elsewhere", (), NO_HOST),
]


@contextmanager
def serving_http(certificates: Certificates | None) -> Iterator[int]:
    """The port of our own server, with nothing else on it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    async def start() -> tuple[HttpServer, int]:
        config = Config(model_name="m", bind_address="127.0.0.1")
        server = HttpServer(config, 0, (), admission(config), certificates)
        return server, await server.start()

    server, port = run(start())
    try:
        yield port
    finally:
        run(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses by what listens there, with files of TLS in the working directory."""
    directory = tmp_path_factory.mktemp("tls")
    authority = make_pair()
    pair = make_pair(authority)
    for name, data in {"ca.crt": authority.cert, "crt": pair.cert, "key": pair.key}.items():
        (directory / name).write_bytes(data)
    ports: dict[str, int] = {"none": 1}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        tls = grpc.ssl_server_credentials([(pair.key, pair.cert)])
        mutual = grpc.ssl_server_credentials([(pair.key, pair.cert)], authority.cert, require_client_auth=True)
        for name, credentials in {"grpc": None, "grpc tls": tls, "grpc mutual": mutual}.items():
            server = grpc.server(stack.enter_context(futures.ThreadPoolExecutor(2)))
            health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
            address = "localhost:0"
            add = server.add_secure_port if credentials else server.add_insecure_port
            ports[name] = add(address, credentials) if credentials else add(address)  # type: ignore[call-arg]
            server.start()
            stack.callback(server.stop, None)
        ports["http"] = stack.enter_context(serving_http(None))
        ports["http tls"] = stack.enter_context(serving_http(Certificates(TlsFiles("crt", "key", None))))
        ports["silent"] = stack.enter_context(socket.create_server(("localhost", 0))).getsockname()[1]
        yield {name: f"localhost:{port}" for name, port in ports.items()} | {"elsewhere": "host.invalid:1"}


@pytest.mark.parametrize(
    ("command", "error"), [*itertools.product(GRPC, GRPC_ERRORS), *itertools.product([("chat",)], HTTP_ERRORS)]
)
def test_what_is_wrong_is_said(
    targets: dict[str, str], capsys: pytest.CaptureFixture[str], command: tuple[str, ...], error: Any
) -> None:
    listener, options, sentence = error
    target = targets[listener]
    if sentence in (HTTP_PORT, NO_CERTIFICATE):  # of several addresses gRPC tells only the last error, that of ::1
        target = target.replace("localhost", "127.0.0.1")
    name, *arguments = command
    assert run([name, "--target", target, *arguments, *options]) == 1 + sentence.startswith("cannot use")
    assert capsys.readouterr() == ("", f"tgis: {sentence.format(target)}\n")


def test_a_certificate_lets_a_command_in(targets: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = *CA, "--tls-cert", "crt", "--tls-key", "key", "--service="
    assert run(["health", "--target", targets["grpc mutual"], *options]) == 0
    assert capsys.readouterr() == ("SERVING\n", "")
