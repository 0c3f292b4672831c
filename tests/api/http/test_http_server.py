"""What the calls of all HTTP APIs share: tokens, bodies, errors, streams, origins, limits, and the end of a server."""

import asyncio
import gzip
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import http_port
import pytest
from aiohttp import web
from harness import run_async
from http_port import exchange

from tgis.api.http import app, sse
from tgis.api.http.auth import HttpAuth
from tgis.api.http.calls import HttpCall
from tgis.api.http.errors import ErrorFormat, HttpError
from tgis.api.http.operations import HttpApi, Operation
from tgis.config import Config
from tgis.errors import RequestError
from tgis.limits import admission
from tgis.security.bearer import TokenFile
from tgis.utils.options import Secret


def plain(error: RequestError) -> tuple[int, str]:
    """Errors as their text."""
    return error.status if isinstance(error, HttpError) else 503, str(error)


ERRORS = ErrorFormat("plain", str, plain, b"[DONE]")


class Api:
    """A server of operations, and what it counts."""

    def __init__(self, *operations: Operation, loaded: bool = True, **options: Any) -> None:
        self.config = Config(model_name="m", **options)
        self.limits = admission(self.config)
        self.counted: list[tuple[str, str, str]] = []
        self.refused: list[str] = []
        self.generator: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        metrics = SimpleNamespace(
            request_started=lambda kind, number: self.refused.append(f"{kind} {number}"),
            request_failed=self.refused.append,
        )
        if loaded:
            self.generator.set_result(SimpleNamespace(metrics=metrics))
        tokens = TokenFile(self.config.auth_token_path) if self.config.auth_token_path else None
        auth = HttpAuth(tokens, self.config.api_key.text if self.config.api_key else None, self._reject)
        api = HttpApi(self.config, auth, self.limits, lambda *call: self.counted.append(call), self.generator)
        self.routes = [api.route(operation) for operation in operations]

    def _reject(self) -> None:
        self.refused.append("token")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[aiohttp.ClientSession]:
        options = {"payload_limit": self.config.payload_limit, "cors_allow_origin": self.config.cors_allow_origin}
        options["client_timeout_seconds"] = self.config.client_timeout_seconds
        options["http_keep_alive_seconds"] = self.config.http_keep_alive_seconds
        async with (
            http_port.serving(self.routes, self.limits, **options) as port,
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
        ):
            yield client


@asynccontextmanager
async def serving(*operations: Operation, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with Api(*operations, **options).serving() as client:
        yield client


async def echo_body(call: HttpCall) -> web.Response:
    return web.Response(body=call.data)


ECHO = Operation("POST", "/body", echo_body, ERRORS, (str,))
JSON = {"Content-Type": "application/json"}


def events(
    number: int = 3, content: bytes = b"{}", pause: float = 0.0, ended: "asyncio.Future[int] | None" = None
) -> Operation:
    """A stream; `ended` gets how many events could be sent."""

    async def handle(call: HttpCall) -> web.StreamResponse:
        stream, sent = call.event_stream({"x-extra": "1"}), 0
        try:
            while sent < number:
                await stream.send(content)
                sent += 1
                await asyncio.sleep(pause)
        finally:
            if ended is not None:
                ended.set_result(sent)
        return stream.response

    return Operation("GET", "/events", handle, ERRORS)


def answering(*outcomes: Any) -> Operation:
    """An operation that raises an error, awaits a future or returns a response."""

    async def handle(call: HttpCall) -> web.StreamResponse:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            if isinstance(outcome, asyncio.Future):
                await outcome
        return web.Response(text="done")

    return Operation("GET", "/thing", handle, ERRORS)


# --- bodies ---


async def parts(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content
        await asyncio.sleep(0)


@run_async
async def test_a_body_of_the_largest_size_is_read_and_a_larger_one_is_413() -> None:
    api = Api(ECHO, payload_limit=100)
    async with api.serving() as client:
        for content in (b"", b"x" * 100):
            async with client.post("/body", data=content, headers=JSON) as answer:
                assert (answer.status, await answer.read()) == (200, content)
        for data in (parts(b"x" * 60, b"x" * 41), b"x" * 101):
            async with client.post("/body", data=data, headers=JSON) as answer:
                assert (answer.status, "PAYLOAD_LIMIT" in await answer.json()) == (413, True)
    assert api.refused == ["single 1", "validation"] * 2


@run_async
async def test_only_json_is_read_and_nothing_compressed() -> None:
    statuses = {"application/json": 200, "application/json; charset=utf-8": 200, "application/vnd.x+json": 200}
    statuses |= {"text/plain": 415, "application/jsonl": 415, "multipart/form-data": 415}
    api = Api(ECHO)
    async with api.serving() as client:
        for content_type, status in statuses.items():
            async with client.post("/body", data=b"{}", headers={"Content-Type": content_type}) as answer:
                assert answer.status == status, content_type
        async with client.post("/body", data=b"{}", headers={**JSON, "Content-Encoding": "Identity"}) as answer:
            assert answer.status == 200
        headers = {**JSON, "Content-Encoding": "gzip"}
        async with client.post("/body", data=gzip.compress(b"{}"), headers=headers) as answer:
            assert (answer.status, "Content-Encoding" in await answer.json()) == (415, True)
    assert api.refused == ["single 1", "validation"] * 4


JSON_HEAD = b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def port_of(client: aiohttp.ClientSession) -> int:
    assert client._base_url is not None
    return client._base_url.port or 0


async def connect(client: aiohttp.ClientSession) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port_of(client))


@run_async
async def test_a_late_body_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LINGER_SECONDS", 0.1)
    api = Api(ECHO, client_timeout_seconds=0.1)
    async with api.serving() as client:
        answer = await exchange(port_of(client), JSON_HEAD + b"Content-Length: 10\r\n\r\nhalf")
    assert answer.startswith(b"HTTP/1.1 503 ")  # this API's status for it
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b'"the message has not arrived within 0.1 s"')
    assert api.counted == [("plain", "/body", "503")]


@run_async
async def test_a_malformed_body_is_400() -> None:
    async with serving(ECHO) as client:
        answer = await exchange(port_of(client), JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz secret\r\n")
    assert answer.split()[1] == b"400"
    assert b"secret" not in answer


# --- streams and readers ---


@run_async
async def test_a_stream_without_events_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)
    async with serving(events(number=2, pause=1000)) as client, client.get("/events") as answer:
        assert answer.headers["x-request-id"]
        assert await answer.content.readexactly(18) == b"data: {}\n\n:\n\n:\n\n:\n"
    async with serving(events()) as client, client.get("/events") as answer:
        assert await answer.read() == b"data: {}\n\n" * 3
        while any("_keep_alive" in repr(task) for task in asyncio.all_tasks()):
            await asyncio.sleep(0)


@run_async
async def test_a_reader_that_does_not_read_holds_little_and_ends_its_call() -> None:
    """What the sockets take is the kernel's."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    content = b"x" * 1000
    api = Api(events(10**6, content, 0.0, ended), client_timeout_seconds=0.1)
    async with api.serving() as client:
        reader, writer = await connect(client)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readline()
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        assert await ended * len(content) < 32 << 20
        writer.close()
    assert api.counted == [("plain", "/events", "499")]


# --- connections ---


@run_async
async def test_a_late_first_head_closes_its_connection_and_a_later_one_when_it_is_idle() -> None:
    async with serving(ECHO, client_timeout_seconds=0.1) as client:
        assert await exchange(port_of(client), b"POST /body HTT") == b""
        reader, writer = await connect(client)
        for _ in range(2):
            writer.write(JSON_HEAD + b"Content-Length: 2\r\n\r\n{}")
            assert b"200 OK" in await reader.readuntil(b"{}")
            await asyncio.gather(exchange(port_of(client), b"POST"), return_exceptions=True)  # longer than the timeout
        writer.close()
    async with serving(ECHO, http_keep_alive_seconds=0.1) as client:
        answer = await exchange(port_of(client), JSON_HEAD + b"Content-Length: 2\r\n\r\n{}" + b"POST /body HTT")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@run_async
async def test_connections_above_the_limit_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_CONNECTIONS", 3)
    async with serving(answering()) as client:
        held = [await connect(client) for _ in range(3)]
        assert await exchange(port_of(client), b"") == b""
        held[0][1].close()
        await held[0][1].wait_closed()
        async with client.get("/thing") as answer:
            assert answer.status == 200
        for _, writer in held:
            writer.close()


# --- calls ---


@run_async
async def test_without_a_model_calls_fail_and_have_an_id() -> None:
    async with serving(answering(), loaded=False) as client:
        async with client.get("/thing", headers={"X-Correlation-Id": "other", "X-Request-Id": "my id"}) as answer:
            assert (answer.status, await answer.json()) == (503, "the model is still loading")
            assert answer.headers["x-request-id"] == "my id"
            assert answer.headers["Retry-After"] == "1"
        async with client.get("/thing", headers={"X-Correlation-Id": "other"}) as answer:
            assert answer.headers["x-request-id"] == "other"
        given = "", "é", "a\tb"  # not as they are
        answers = [await client.get("/thing", headers={"X-Request-Id": name}) for name in given]
        assert len({answer.headers["x-request-id"] for answer in answers} | {*given}) == 6


@pytest.mark.parametrize(
    ("error", "status"), [(RecursionError(), 400), (ZeroDivisionError(), 500), (TimeoutError(), 500)]
)
@run_async
async def test_errors_of_handlers(error: Exception, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(answering(error)) as client, client.get("/thing") as answer:
        text = f"internal error: {type(error).__name__}" if status == 500 else "the body is nested too deeply"
        assert (answer.status, await answer.json()) == (status, text)
    assert len(caplog.records) == (status == 500)


@run_async
async def test_further_calls_and_bytes_are_refused() -> None:
    api = Api(ECHO, max_concurrent_requests=1, max_call_memory_mb=1)
    async with api.serving() as client:
        api.limits.calls.limit = 1
        reader, writer = await connect(client)
        writer.write(JSON_HEAD + b"Content-Length: 2\r\n\r\n{")
        await asyncio.sleep(0.05)
        async with client.post("/body", data=b"{}", headers=JSON) as answer:
            assert await answer.json() == "Model is overloaded"
            assert answer.headers["Retry-After"] == "1"
        writer.write(b"}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        async with client.post("/body", data=io.BytesIO(b"x" * ((1 << 20) + 1)), headers=JSON) as answer:
            assert await answer.json() == "Model is overloaded"


@run_async
async def test_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("of-file\n")
    accepted = ["Bearer of-file", "bearer of-file", "Bearer key"]
    api = Api(answering(), auth_token_path=tmp_path / "tokens", api_key=Secret("key"))
    async with api.serving() as client:
        for given in (*accepted, "Bearer Key", "Bearer ", "key", "Bearer k\u00e9y", None):
            headers = {} if given is None else {"Authorization": given}
            async with client.get("/thing", headers=headers) as answer:
                expected = (200, None) if given in accepted else (401, "Bearer")
                assert (answer.status, answer.headers.get("WWW-Authenticate")) == expected, given
        head = b"GET /thing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer \xff\r\n\r\n"
        assert (await exchange(port_of(client), head)).startswith(b"HTTP/1.1 401 ")
    assert api.refused == ["token"] * 6


@run_async
async def test_a_call_knows_its_client() -> None:
    """By its credentials, or else by its address."""

    async def handle(call: HttpCall) -> web.Response:
        return web.json_response([call.client.decode(errors="replace"), bool(call.identity), call.max_inputs])

    operation, key = Operation("GET", "/client", handle, ERRORS), {"Authorization": "Bearer key"}
    options = {"limit_by_address": True, "max_concurrent_requests_per_client": 4}
    async with serving(operation, **options) as client, client.get("/client") as answer:
        assert await answer.json() == ["127.0.0.1", False, 4]
    async with serving(operation, api_key=Secret("key")) as client, client.get("/client", headers=key) as answer:
        assert (await answer.json())[1]


# Of the package openai in a browser.
HEADERS = "authorization,content-type,idempotency-key,openai-organization,traceparent,user-agent,x-stainless-os"
PREFLIGHT = {"Origin": "https://a", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": HEADERS}


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), (("https://a", "https://b"), "https://a"), (("https://b",), None), (("*",), "*")],
)
@run_async
async def test_origins(origins: tuple[str, ...], allowed: str | None) -> None:
    async with serving(answering(), events(), cors_allow_origin=origins) as client:
        async with client.options("/thing", headers=PREFLIGHT) as answer:
            assert answer.status == (200 if origins else 405)
            names = ("Allow-Headers", "Allow-Methods", "Max-Age", "Allow-Origin")
            found = [answer.headers.get(f"Access-Control-{name}") for name in names]
            assert found == [*([HEADERS, "GET, POST", "600"] if origins else [None] * 3), allowed]
        async with client.options("/thing", headers=PREFLIGHT | {"Access-Control-Request-Headers": "é"}) as answer:
            assert not answer.headers.get("Access-Control-Allow-Headers")
        read = [f"Access-Control-{name}" for name in ("Allow-Origin", "Expose-Headers", "Allow-Methods")]
        for path in ("/thing", "/events"):
            async with client.get(path, headers=PREFLIGHT) as answer:  # which only OPTIONS is
                found = [answer.headers.get(name) for name in (*read, "Vary")]
                assert found == [allowed, allowed and "*", None, "Origin" if origins else None]


# --- the end of a server ---


@run_async
async def test_a_drain_waits_for_running_calls_but_not_for_bodies() -> None:
    finish: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    api = Api(ECHO, answering(finish))
    async with api.serving() as client:
        _, late = await connect(client)
        late.write(JSON_HEAD + b"Content-Length: 2\r\n\r\n{")
        running = asyncio.create_task(client.get("/thing"))
        await asyncio.sleep(0.05)
        api.limits.draining = True
        idle = asyncio.create_task(api.limits.wait_until_idle())
        refused = await exchange(port_of(client), JSON_HEAD + b"Content-Length: 2\r\n\r\n{}")  # until it is closed
        head, _, body = refused.partition(b"\r\n\r\n")
        assert (head[:12], b"\r\nConnection: close" in head) == (b"HTTP/1.1 503", True)
        assert body == b'"the server is shutting down"'
        assert not idle.done()
        finish.set_result(None)
        await asyncio.wait_for(idle, 5)
        assert (await (await running).text()) == "done"
        late.close()


@run_async
async def test_a_drain_waits_until_a_large_answer_is_read() -> None:
    connections: list[Any] = []

    async def handle(call: HttpCall) -> web.Response:
        connections.append(call.request.protocol)
        return web.Response(body=b"x" * (32 << 20))

    api = Api(Operation("GET", "/large", handle, ERRORS))
    async with api.serving() as client:
        reader, writer = await connect(client)
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        idle = asyncio.create_task(api.limits.wait_until_idle())
        await asyncio.sleep(0.05)
        assert not idle.done()
        await reader.readexactly(32 << 20)
        await asyncio.wait_for(idle, 5)
        assert connections[0]._read_timer.cancelled()  # it may stay open
        writer.close()
