"""What commands say about an address where something else listens, against real listeners."""

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent import futures
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from tables import read_table

from benchmarks.certificates import make_pair
from tgis.__main__ import run
from tgis.api.http.app import HttpServer
from tgis.config import Config
from tgis.limits import admission
from tgis.security.tls import Certificates, TlsFiles

COMMANDS = {"grpc": ("generate x", "bench --requests 1"), "http": ("chat",)}
CASES = [
    (command, row) for api, names in COMMANDS.items() for command in names for row in read_table("connections", api)
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


@pytest.mark.parametrize(("command", "row"), CASES)
def test_what_is_wrong_is_said(
    targets: dict[str, str], capsys: pytest.CaptureFixture[str], command: str, row: dict[str, Any]
) -> None:
    target = targets[row["at"]].replace("localhost", row.get("host", "localhost"))
    name, *arguments = f"{command} {row.get('options', '')}".split()
    assert run([name, "--target", target, *arguments]) == row.get("code", 1)
    assert capsys.readouterr() == ("", f"tgis: {row['said'].format(target)}\n")


def test_a_certificate_lets_a_command_in(targets: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = "--ca-cert ca.crt --tls-cert crt --tls-key key --service="
    assert run(["health", "--target", targets["grpc mutual"], *options.split()]) == 0
    assert capsys.readouterr() == ("SERVING\n", "")
