"""The HTTP port: probes, metrics, and hostile clients."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any
from unittest import mock

import http_port
import pytest
from aiohttp import web
from harness import run_async
from http_port import exchange
from tables import table

from tgis.api.http import app
from tgis.api.http.app import HttpServer
from tgis.api.http.cors import HostCheck
from tgis.api.http.probes import Probes
from tgis.config import Config
from tgis.errors import StartError
from tgis.limits import admission
from tgis.utils.options import Secret


def serving(
    healthy: Callable[[], str | None] = lambda: None, metrics: Callable[[], bytes] = lambda: b"x 1\n", **options: Any
) -> AbstractAsyncContextManager[int]:
    async def scrape() -> bytes:
        return await asyncio.to_thread(metrics)

    return http_port.serving(Probes(healthy, scrape).routes(), **options)


async def request(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of one request."""
    answer = await exchange(port, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    return int(status.split()[1]), dict(field.split(": ", 1) for field in fields), body


@run_async
async def test_health_is_200_and_empty_or_503_with_the_reason() -> None:
    reasons: list[str | None] = [None, 'engine "0" is gone\n', None]
    async with serving(healthy=lambda: reasons[0]) as port:
        while reasons:
            status, headers, body = await request(port, "/health")
            assert (await request(port, "/ping"))[::2] == (status, body)
            if reasons[0] is None:
                assert (status, body) == (200, b"")
            else:
                assert status == 503
                assert headers["Content-Type"].startswith("application/json")
                assert json.loads(body) == {"error": reasons[0], "error_type": "healthcheck"}
            reasons.pop(0)


@run_async
async def test_requests_during_a_scrape_share_the_next() -> None:
    """None of them shows what was before its request."""
    first, finish, scrapes = threading.Event(), threading.Event(), 0

    def scrape() -> bytes:
        nonlocal scrapes
        scrapes += 1
        text = b"%d" % scrapes
        first.set()
        assert finish.wait(10)
        return text

    async with serving(metrics=scrape) as port:
        running = asyncio.create_task(request(port, "/metrics"))
        assert await asyncio.to_thread(first.wait, 10)
        waiting = [asyncio.create_task(request(port, "/metrics")) for _ in range(20)]
        assert (await request(port, "/health"))[0] == 200
        finish.set()
        status, headers, text = await running
        assert (status, headers["Content-Type"], text) == (200, "text/plain; version=0.0.4; charset=utf-8", b"1")
        assert {body for _, _, body in await asyncio.gather(*waiting)} == {b"2"}


@table("errors", "paths of probes")
@run_async
async def test_other_paths_and_methods_are_rejected(row: dict[str, Any]) -> None:
    method, path, status = row["method"], row["path"], row["status"]
    async with serving() as port:
        found, headers, body = await request(port, path, method)
    assert found == status
    assert (headers.get("Content-Type") == "application/json; charset=utf-8") == (status >= 300)
    if status >= 400 and method != "HEAD":
        kind, text = "method_not_allowed", f"405: Method Not Allowed: {method} {path}"
        if status == 404:
            kind, text = "not_found", f"no {path:.100}: this server generates text"
        error = {"message": text, "type": "invalid_request_error", "param": None, "code": kind}
        assert json.loads(body) == {"error": error if path.startswith("/v1/") else text, "error_type": kind}
    assert ("GET" in headers.get("Allow", "")) == (status == 405)


HOSTS = ["localhost", "LOCALHOST:80", "127.0.0.1", "10.1.2.3:3000", "[::1]:3000"]
HOSTS += ["a.example", "b.example:8", "localhost.evil"]  # which a page of DNS rebinding has


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, HOSTS[5:]),
        ({"bind_address": "::1"}, HOSTS[5:]),
        ({"allowed_hosts": ("A.example",)}, HOSTS[6:]),
        ({"allowed_hosts": ("*",)}, []),
        ({"api_key": Secret("key")}, []),
        ({"api_key": Secret("key"), "allowed_hosts": ("a.example", "b.example")}, HOSTS[7:]),
        ({"bind_address": "0.0.0.0"}, []),
    ],
)
def test_a_page_cannot_make_its_name_mean_this_machine(options: dict[str, Any], refused: list[str]) -> None:
    check = HostCheck(Config(model_name="m", **{"bind_address": "127.0.0.1"} | options))
    assert [host for host in HOSTS if not check.allows(mock.Mock(headers={"Host": host}))] == refused


@run_async
async def test_other_hosts_are_403() -> None:
    async with serving() as port:
        answer = await exchange(port, b"GET /health HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b'"403: Host must be localhost, an address or one of ALLOWED_HOSTS: GET /health"' in answer


@run_async
async def test_a_port_is_taken_until_its_server_stops_which_closes_all_connections() -> None:
    config = Config(model_name="m", bind_address="127.0.0.1")
    server = HttpServer(config, 0, [], admission(config))
    port = await server.start()
    again = HttpServer(config, port, [], admission(config))
    with pytest.raises(StartError, match=f"HTTP on 127.0.0.1:{port}: Address already in use$"):
        await again.start()
    idle, writer = await asyncio.open_connection("127.0.0.1", port)
    await server.stop()
    assert await idle.read() == b""
    writer.close()
    assert await again.start() == port
    await again.stop()


LINE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
HOSTILE = {
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(range(200)),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "noise": bytes((i * 7919 + 13) % 256 for i in range(4096)),
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "long path": b"GET /" + b"secret" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "long header": LINE + b"X: " + b"secret" * 10_000 + b"\r\n\r\n",
    "many headers": LINE + b"X: secret\r\n" * 10_000 + b"\r\n",
    "bad chunk": LINE + b"Transfer-Encoding: chunked\r\n\r\nsecret\r\n",
    "two lengths": LINE + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nsecret",
    "bad url": b"GET http://[::secret HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "upgrade": LINE + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n" + b"secret" * 1000,
    "endless body": LINE + b"Content-Length: 1000000000000\r\n\r\n" + bytes(1 << 20),
    "broken gzip": LINE + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: 6\r\n\r\nsecret",
}


NO_REQUESTS = ("tls", "noise", "no host", "long path", "bad chunk", "two lengths", "bad url")


@pytest.mark.parametrize("name", HOSTILE)
@run_async
async def test_hostile_input_closes_its_connection_and_is_neither_sent_back_nor_logged(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "LINGER_SECONDS", 0.1)
    async with serving() as port:
        answer = await exchange(port, HOSTILE[name] + b"secret" * 1000)  # until the server has closed the connection
        assert (await request(port, "/health"))[0] == 200
    assert b"secret" not in answer
    assert caplog.records == []
    if name in NO_REQUESTS:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 400 ")
        assert json.loads(body) == {"error": "malformed HTTP request", "error_type": "bad_request"}


@run_async
async def test_the_headers_of_a_request_are_bounded_as_a_whole() -> None:
    async with serving() as port:
        few, many = (LINE + (b"X: %0500d\r\n" % 0) * count for count in (60, 70))
        assert b" 200 " in await exchange(port, few + b"Connection: close\r\n\r\n")
        assert b" 431 " in await exchange(port, many + b"Connection: close\r\n\r\n")


@pytest.mark.parametrize(
    ("error", "logged"),
    [(ConnectionResetError(), False), (web.RequestPayloadError(), False), (ZeroDivisionError(), True), (None, True)],
)
def test_clients_that_vanish_are_no_errors(error: Exception | None, logged: bool) -> None:
    record = logging.makeLogRecord({"exc_info": error and (type(error), error, None)})
    assert bool(app.log.filter(record)) == logged


@run_async
async def test_an_internal_error_is_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> bytes:
        raise ZeroDivisionError

    async with serving(metrics=broken) as port:
        assert (await request(port, "/metrics"))[0] == 500
        assert (await request(port, "/health"))[0] == 200
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
