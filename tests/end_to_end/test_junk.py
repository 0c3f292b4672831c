"""Malformed requests and refused calls take bounded memory, with Python's own collections."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from harness import Server, run_async, running_fake

from benchmarks.certificates import make_pair

PIECE, PIECES = 1 << 18, 4
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
JUNK = {
    "x": b"",
    "zeros behind a head": b"GET /health HTTP/1.1\r\n",
    "no chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
    "TLS": bytes.fromhex("16030140000100"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}
# aiohttp keeps the bytes of a malformed request in reference cycles: some wait for the next collection.
JUNK_MIB = 100
REFUSED_MIB = 30


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_fake(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory, pair = tmp_path_factory.mktemp("secured"), make_pair()
    for name, content in (("cert", pair.cert), ("key", pair.key)):
        (directory / name).write_bytes(content)
    options = {"TLS_CERT_PATH": directory / "cert", "TLS_KEY_PATH": directory / "key", "HTTP_API_PORT": 0}
    with running_fake(directory, **options) as server:
        yield server


def resident(server: Server) -> float:
    """MiB of the front end."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def send_junk(port: int, beginning: bytes, **options: Any) -> None:
    """Whatever the server sends is not read, until it closes the connection."""
    with suppress(ConnectionError, ssl.SSLError):
        _, writer = await asyncio.open_connection("127.0.0.1", port, **options)
        try:
            for piece in (beginning + b"x" * PIECE, *[b"x" * PIECE] * (PIECES - 1)):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
        finally:
            writer.transport.abort()


async def flood(server: Server, port: int, number: int, **options: Any) -> float:
    """MiB that connections leave, of each kind of junk."""

    async def send(count: int) -> None:
        for beginning in JUNK.values():
            for _ in range(0, count, 20):
                await asyncio.gather(*(send_junk(port, beginning, **options) for _ in range(min(count, 20))))

    await send(40)  # what is imported and kept for later stays, and the heap has grown
    before = resident(server)
    await send(number)
    await asyncio.sleep(0.3)
    return resident(server) - before


@pytest.mark.parametrize("number", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("port", ["HTTP", "gRPC", "HTTP in TLS", "gRPC in TLS"])
@run_async
async def test_junk(plain: Server, secured: Server, port: str, number: int) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for server in [secured] if "TLS" in port else [plain, secured]:
        listens = server.grpc_port if "gRPC" in port else (server.api_port if "TLS" in port else server.http_port)
        assert listens is not None
        left = await flood(server, listens, number)
        if "HTTP in TLS" in port:
            left += await flood(server, listens, number, ssl=context)
        assert left < JUNK_MIB
        assert server.get("/health")[0] == 200


REFUSED: list[tuple[str, str, bytes]] = [
    ("POST", "/generate", b"{"),
    ("POST", "/generate", json.dumps({"inputs": "a" * 50_000, "parameters": {"max_new_tokens": -1}}).encode()),
    ("POST", "/v1/completions", json.dumps({"prompt": "a" * 50_000, "temperature": -1}).encode()),
    ("POST", "/v1/chat/completions", b'{"messages": 1}'),
    ("POST", "/nothing", b"x" * 1000),
    ("PUT", "/health", b"x" * 1000),
]


@pytest.mark.parametrize("number", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
@run_async
async def test_refused_calls(plain: Server, number: int) -> None:
    async def send(count: int) -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{plain.http_port}") as session:

            async def ask(numbers: Iterator[int]) -> None:
                for index in numbers:
                    method, path, body = REFUSED[index % len(REFUSED)]
                    headers = {"Content-Type": "application/json"}
                    async with session.request(method, path, data=body, headers=headers) as answer:
                        assert 400 <= answer.status < 500
                        await answer.json()

            numbers = iter(range(count))
            await asyncio.gather(*(ask(numbers) for _ in range(16)))

    await send(number // 10)
    before = resident(plain)
    await send(number)
    assert resident(plain) - before < REFUSED_MIB
