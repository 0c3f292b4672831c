"""What the routes of all HTTP APIs share: tokens, bodies, errors, streams, origins, TLS, and clients that misbehave."""

import asyncio
import gzip
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import http_port
import pytest
from aiohttp import StreamReader, web
from harness import run_async

from tgis.api import clients
from tgis.api.clients import Clients
from tgis.api.http import event_stream
from tgis.api.http.auth import HttpAuth
from tgis.api.http.calls import HttpApi, HttpCall, receive
from tgis.api.http.event_stream import EventStream
from tgis.api.http.operations import ErrorFormat, HttpError, Operation
from tgis.config import Config
from tgis.errors import RequestError
from tgis.security.bearer import TokenFile


def plain(error: RequestError) -> tuple[int, str]:
    """Errors as their text."""
    return error.status if isinstance(error, HttpError) else 503, str(error)


ERRORS = ErrorFormat("plain", str, plain, b"[DONE]")


@asynccontextmanager
async def serving(routes: list[web.RouteDef], **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server with these routes."""
    async with (
        http_port.serving(routes, **options) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        yield client


async def echo_body(request: web.Request) -> web.Response:
    try:
        return web.Response(body=await receive(request))
    except RequestError as error:
        return ERRORS.response(error)


BODY = web.post("/body", echo_body)


@run_async
async def test_a_body_of_the_largest_size_is_read() -> None:
    async with serving([BODY], payload_limit=100) as client:
        for content in (b"", b"x" * 100):
            async with client.post("/body", data=content, headers={"Content-Type": "application/json"}) as answer:
                assert (answer.status, await answer.read()) == (200, content)


async def parts(*contents: bytes, pause: float = 0.0) -> AsyncIterator[bytes]:
    for content in contents:
        yield content
        await asyncio.sleep(pause)


@pytest.mark.parametrize("chunked", [True, False])
@run_async
async def test_a_larger_one_is_413(chunked: bool) -> None:
    async with serving([BODY], payload_limit=100) as client:
        data: Any = parts(b"x" * 60, b"x" * 41) if chunked else b"x" * 101
        async with client.post("/body", data=data, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 413
            assert "PAYLOAD_LIMIT" in await answer.json()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("application/vnd.x+json", 200),
        ("text/plain", 415),
        ("application/jsonl", 415),
        ("multipart/form-data", 415),
    ],
)
@run_async
async def test_only_json_is_read(content_type: str, status: int) -> None:
    headers = {"Content-Type": content_type}
    async with serving([BODY]) as client, client.post("/body", data=b"{}", headers=headers) as answer:
        assert answer.status == status


JSON_HEAD = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def connect(client: aiohttp.ClientSession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert client._base_url is not None
    return await asyncio.open_connection(client._base_url.host, client._base_url.port)


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@run_async
async def test_compressed_bodies_are_415() -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    data = gzip.compress(b"{}")
    async with serving([BODY]) as client, client.post("/body", data=data, headers=headers) as answer:
        assert answer.status == 415
        assert "Content-Encoding" in await answer.json()


SMALL_CHUNKS = b"1\r\nx\r\n" * 150_000


@pytest.mark.parametrize(
    ("path", "payload_limit", "status"),
    [("/body", 2_000_000, 200), ("/body", 160_000, 413), ("/events", 2_000_000, 200)],
)
@run_async
async def test_small_chunks_do_not_hold_the_event_loop(
    path: str, payload_limit: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser calls Python for each chunk; whether anybody reads them or not."""
    received, most, end_of_chunk = 0, 0, StreamReader.end_http_chunk_receiving

    def count(self: StreamReader) -> None:
        nonlocal received
        received += 1
        end_of_chunk(self)

    async def watch() -> None:
        nonlocal most, received
        while True:
            most, received = max(most, received), 0
            await asyncio.sleep(0)

    monkeypatch.setattr(StreamReader, "end_http_chunk_receiving", count)
    async with serving([BODY, events_route(1)], payload_limit=payload_limit) as client:
        watching = asyncio.create_task(watch())
        reader, writer = await connect(client)
        method = b"GET" if path == "/events" else b"POST"
        head = JSON_HEAD.replace(b"POST /body", method + b" " + path.encode())
        writer.write(head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + SMALL_CHUNKS + b"0\r\n\r\n")
        answer = await read_to_end(reader)
        watching.cancel()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert 0 < most < 10_000


@run_async
async def test_a_body_that_does_not_arrive_ends_the_call() -> None:
    async with serving([BODY], client_timeout_seconds=0.1) as client:
        reader, writer = await connect(client)
        writer.write(JSON_HEAD + b"Content-Length: 10\r\n\r\nhalf")
        answer = await reader.readuntil(b"has not arrived within 0.1 s")
        assert answer.startswith(b"HTTP/1.1 503 ")  # this API's status for it
        writer.close()


@pytest.mark.parametrize("pause", [0.0, 0.1])
@run_async
async def test_a_body_that_is_framed_wrongly_is_400(pause: float) -> None:
    async with serving([BODY]) as client:
        reader, writer = await connect(client)
        async for part in parts(JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"zz secret\r\n", pause=pause):
            writer.write(part)
        answer = await reader.read()
        assert answer.split()[1] == b"400"
        assert b"\r\nConnection: close\r\n" in answer
        assert b"secret" not in answer
        writer.close()


@run_async
async def test_a_large_body_right_behind_its_head_is_read() -> None:
    content = b"x" * (4 << 20)
    async with serving([BODY], payload_limit=len(content)) as client:
        reader, writer = await connect(client)
        for _ in range(2):  # the second request over the same connection
            writer.write(JSON_HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert await reader.readexactly(len(content)) == content
        writer.close()


@run_async
async def test_only_so_many_bodies_may_arrive_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_RECEIVING_BYTES", 2 << 20)
    async with serving([BODY], grpc_max_message_bytes=1 << 20) as client:
        slow = []
        for _ in range(4):
            slow.append(await connect(client))
            slow[-1][1].write(JSON_HEAD + b"Content-Length: 50\r\n\r\n" + b"x" * 40)
        gone = [asyncio.create_task(read_to_end(reader)) for reader, _ in slow]
        await asyncio.wait(gone[:2])  # two may go on
        assert not any(task.done() for task in gone[2:])
        for _, writer in slow[2:]:
            writer.write(b"x" * 10)
            writer.write_eof()
        answers = await asyncio.gather(*gone)
        assert [answer.split(b"\r\n")[0] for answer in answers] == [b"", b"", *[b"HTTP/1.1 200 OK"] * 2]
        for _, writer in slow:
            writer.close()


def events_route(
    number: int = 3, content: bytes = b"{}", pause: float = 0.0, ended: "asyncio.Future[int] | None" = None
) -> web.RouteDef:
    """A stream; `ended` gets how many events could be sent."""

    async def handle(request: web.Request) -> web.StreamResponse:
        events, sent = EventStream(request, {"x-extra": "1"}), 0
        try:
            while sent < number:
                await events.send(content)
                sent += 1
                await asyncio.sleep(pause)
        finally:
            events.close()
            if ended is not None:
                ended.set_result(sent)
        return events.response

    return web.get("/events", handle)


@run_async
async def test_a_stream_without_events_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.02)
    async with serving([events_route(number=1, pause=0.2)]) as client, client.get("/events") as answer:
        content = await answer.read()
    assert content.startswith(b"data: {}\n\n:\n\n:\n\n")
    assert content.count(b":\n\n") <= 10


@run_async
async def test_a_reader_that_does_not_read_holds_little_and_ends_its_call() -> None:
    """What the sockets take is the kernel's."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    content = b"x" * 1000
    async with serving([events_route(10**6, content, 0.0, ended)], client_timeout_seconds=0.1) as client:
        reader, writer = await connect(client)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        assert await ended * len(content) < 32 << 20
        writer.close()


@run_async
async def test_a_connection_that_has_been_slow_to_read_waits_again_afterwards() -> None:
    async def large(_request: web.Request) -> web.Response:
        return web.Response(body=b"x" * (32 << 20))

    async with serving([web.get("/large", large)], client_timeout_seconds=0.5) as client:
        reader, writer = await connect(client)
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(32 << 20)
        writer.write(b"GET /large HTT")  # and no more
        assert await read_to_end(reader) == b""
        writer.close()


@run_async
async def test_connections_take_turns() -> None:
    """However many ask at once, whoever else uses the event loop goes on between them."""
    iteration, begun = 0, Counter[int]()

    async def handle(_request: web.Request) -> web.Response:
        begun[iteration] += 1
        return web.Response()

    async def watch() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    async with serving([web.get("/thing", handle)]) as client:
        connections = [await connect(client) for _ in range(20)]
        watching = asyncio.create_task(watch())
        for _, writer in connections:
            writer.write(b"GET /thing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = await asyncio.gather(*(read_to_end(reader) for reader, _ in connections))
        watching.cancel()
        for _, writer in connections:
            writer.close()
    assert {answer.split(b" ", 2)[1] for answer in answers} == {b"200"}
    assert begun.total() == 20
    assert max(begun.values()) == 2


@run_async
async def test_at_the_limit_the_oldest_connection_that_waits_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "MAX_CONNECTIONS", 3)
    async with serving([events_route(number=10**6, pause=0.001), BODY]) as client:
        busy, half, idle = [await connect(client) for _ in range(3)]
        busy[1].write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await busy[0].readuntil(b"data: ")
        half[1].write(JSON_HEAD + b"Content-Length: 50\r\n\r\n" + b"x" * 40)
        for _ in range(5):  # after some iterations of the event loop, its body is read
            await busy[0].readuntil(b"data: ")
        more = await connect(client)
        assert await read_to_end(half[0]) == b""
        last = await connect(client)
        assert await read_to_end(idle[0]) == b""
        await busy[0].readuntil(b"data: ")  # its client reads
        for _, writer in (busy, half, idle, more, last):
            writer.close()


def api_route(**options: Any) -> web.RouteDef:
    """A route of an API that has no model yet."""
    tokens = TokenFile(options["auth_token_path"]) if "auth_token_path" in options else None

    async def handle(_call: HttpCall) -> web.StreamResponse:
        raise AssertionError

    config = Config(model_name="m")
    api = HttpApi(config, HttpAuth(tokens, options.get("api_key"), lambda: None), Clients(config), lambda *_: None)
    return api.route(Operation("GET", "/thing", handle, ERRORS, "thing", "A thing"))


@run_async
async def test_without_a_model_calls_fail_and_have_an_id() -> None:
    async with serving([api_route()]) as client:
        async with client.get("/thing", headers={"X-Request-Id": "my id"}) as answer:
            assert (answer.status, await answer.json()) == (503, "the model is still loading")
            assert answer.headers["x-request-id"] == "my id"
        async with client.get("/thing", headers={"X-Correlation-Id": "other"}) as answer:
            assert answer.headers["x-request-id"] == "other"
        async with client.get("/thing") as one, client.get("/thing") as other:
            assert len({one.headers["x-request-id"], other.headers["x-request-id"], ""}) == 3


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer of-file", 503),
        ("bearer of-file", 503),
        ("Bearer key", 503),
        ("Bearer Key", 401),
        ("Bearer ", 401),
        ("key", 401),
        ("Bearer k\u00e9y", 401),
        (None, 401),
    ],
)
@run_async
async def test_tokens(authorization: str | None, status: int, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("of-file\n")
    route = api_route(auth_token_path=tmp_path / "tokens", api_key="key")
    headers = {} if authorization is None else {"Authorization": authorization}
    async with serving([route]) as client, client.get("/thing", headers=headers) as answer:
        assert answer.status == status
        assert answer.headers.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)


PREFLIGHT = {"Origin": "https://a", "Access-Control-Request-Method": "POST"}


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("https://a", "https://b"), "https://a"), (("https://b",), None), (("*",), "*")],
)
@run_async
async def test_origins(origins: tuple[str, ...], allowed: str | None) -> None:
    async with serving([api_route(), events_route()], cors_allow_origin=origins) as client:
        async with client.options("/thing", headers=PREFLIGHT) as answer:
            assert answer.status == (200 if origins else 405)
            assert answer.headers.get("Access-Control-Allow-Origin") == allowed
            assert ("authorization" in answer.headers.get("Access-Control-Allow-Headers", "")) == bool(origins)
        for path in ("/thing", "/events"):
            async with client.get(path, headers={"Origin": "https://a"}) as answer:
                assert answer.headers.get("Access-Control-Allow-Origin") == allowed
