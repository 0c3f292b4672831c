"""Which HTTP port serves what, with and without TLS."""

import logging
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from harness import run_async
from http_port import NO_AUTH

from benchmarks.certificates import Pair, make_pair
from tgis.api.clients import Clients
from tgis.api.http.ports import HttpPorts
from tgis.api.http.probes import Probes
from tgis.config import Config
from tgis.security.bearer import caller_identity
from tgis.security.tls import Certificates, TlsFiles
from tgis.utils.file_watch import CHECK_INTERVAL_SECONDS


async def identity(request: web.Request) -> web.Response:
    return web.Response(text=NO_AUTH.identity(request).hex())


@asynccontextmanager
async def serving(certificates: Certificates | None = None, **options: Any) -> AsyncIterator[tuple[int, int | None]]:
    config = Config(model_name="m", bind_address="127.0.0.1", port=0, **options)
    probes, routes = Probes(lambda: None, list, NO_AUTH), [web.get("/identity", identity)]
    ports = HttpPorts(config, probes, routes, Clients(config), certificates)
    numbers = await ports.start()
    try:
        yield numbers
    finally:
        await ports.stop()


async def statuses(port: int, **options: Any) -> dict[str, int]:
    """The status of each path on a port."""
    scheme = "https" if options else "http"
    found = {}
    async with aiohttp.ClientSession() as client:
        for path in ("/health", "/ping", "/metrics", "/identity"):
            async with client.get(f"{scheme}://127.0.0.1:{port}{path}", **options) as answer:
                found[path.removeprefix("/")] = answer.status
    return found


ALL = {"health": 200, "ping": 200, "metrics": 200, "identity": 200}
PROBES, API = ALL | {"identity": 404}, ALL | {"metrics": 404}


@pytest.mark.parametrize(
    ("options", "on_probes", "on_api"),
    [
        ({}, ALL, ALL),
        ({"http_api": False}, PROBES, None),
        ({"http_api_port": 0}, PROBES, API),
    ],
)
@run_async
async def test_ports(options: dict[str, Any], on_probes: dict[str, int], on_api: dict[str, int] | None) -> None:
    async with serving(None, **options) as (probes, api):
        assert await statuses(probes) == on_probes
        assert (None if api is None else await statuses(api)) == on_api
        assert (probes == api) == (on_probes == on_api)


class Files:
    """A server's certificate and key, and the authority of its clients."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.authority = make_pair()
        self.issue(self.authority)

    def issue(self, authority: Pair) -> None:
        self.authority, self.client = authority, make_pair(authority)
        server = make_pair(authority)
        for name, content in {"cert": server.cert, "key": server.key, "ca": authority.cert}.items():
            (self._directory / "new").write_bytes(content)
            os.replace(self._directory / "new", self._directory / name)

    def certificates(self, *, mutual: bool, clock: list[float]) -> Certificates:
        cert, key, ca = (str(self._directory / name) for name in ("cert", "key", "ca"))
        return Certificates(TlsFiles(cert, key, ca if mutual else None), lambda: clock[0])

    def client_context(self, *, mutual: bool) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=self.authority.cert.decode())
        context.check_hostname = False
        if mutual:
            for name, content in {"client": self.client.cert, "client-key": self.client.key}.items():
                (self._directory / name).write_bytes(content)
            context.load_cert_chain(self._directory / "client", self._directory / "client-key")
        return context


@run_async
async def test_with_tls_the_apis_need_a_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Files(tmp_path).certificates(mutual=False, clock=[0.0])) as (probes, api):
        assert api is None
        assert await statuses(probes) == PROBES
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "HTTP_API_PORT" in caplog.text


@pytest.mark.parametrize("mutual", [False, True])
@run_async
async def test_tls_follows_changes_of_its_files(mutual: bool, tmp_path: Path) -> None:
    files, clock = Files(tmp_path), [0.0]
    async with serving(files.certificates(mutual=mutual, clock=clock), http_api_port=0) as (probes, api):
        assert api is not None
        assert await statuses(probes) == PROBES
        before = files.client_context(mutual=mutual)
        assert await statuses(api, ssl=before) == API
        files.issue(make_pair())
        clock[0] += 2 * CHECK_INTERVAL_SECONDS
        with pytest.raises(aiohttp.ClientError):
            await statuses(api, ssl=before)
        assert await statuses(api, ssl=files.client_context(mutual=mutual)) == API
        if mutual:
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await statuses(api, ssl=files.client_context(mutual=False))


@run_async
async def test_a_client_certificate_is_the_same_client_over_grpc(tmp_path: Path) -> None:
    files = Files(tmp_path)
    certificates = files.certificates(mutual=True, clock=[0.0])
    identities: list[bytes] = []

    async def handle(_request: bytes, context: Any) -> bytes:
        identities.append(caller_identity(context, bearer_auth=True))
        return b""

    server = grpc.aio.server()
    handlers = {"m": grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", handlers),))
    port = server.add_secure_port("localhost:0", certificates.server_credentials())
    await server.start()
    async with serving(certificates, http_api_port=0) as (_, api), aiohttp.ClientSession() as client:
        context = files.client_context(mutual=True)
        async with client.get(f"https://127.0.0.1:{api}/identity", ssl=context) as answer:
            over_http = await answer.text()
        pair = files.client
        credentials = grpc.ssl_channel_credentials(files.authority.cert, pair.key, pair.cert)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            await channel.unary_unary("/s/m", bytes, bytes)(b"")
    await server.stop(0)
    assert [identity.hex() for identity in identities] == [over_http]
    assert over_http
