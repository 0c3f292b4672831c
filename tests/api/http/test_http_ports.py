"""Which HTTP port serves what, with and without TLS."""

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc_calls
import pytest
from aiohttp import web
from cryptography import x509
from harness import run_async
from http_port import NO_AUTH, no_metrics
from mounted_secret import Clock, Secret

from benchmarks.certificates import Pair, make_pair
from tgis.api.http.app import HttpPorts
from tgis.api.http.debug import debug_route
from tgis.api.http.probes import Probes
from tgis.config import Config
from tgis.errors import Unavailable
from tgis.ipc.messages import BatchState
from tgis.limits import admission
from tgis.security.identity import caller_identity
from tgis.security.tls import Certificates


async def identity(request: web.Request) -> web.Response:
    return web.Response(text=NO_AUTH.identity(request).hex())


@asynccontextmanager
async def serving(certificates: Certificates | None = None, **options: Any) -> AsyncIterator[tuple[int, int | None]]:
    config = Config(**{"model_name": "m", "port": 0, "bind_address": "127.0.0.1", **options})

    async def batch_state() -> BatchState:
        raise Unavailable("no engine")

    api_routes = [web.get("/identity", identity)] if config.http_api else []
    probes, routes = Probes(lambda: None, no_metrics), [debug_route(NO_AUTH, batch_state), *api_routes]
    ports = HttpPorts(config, probes, routes, admission(config), certificates)
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
        for path in ("/health", "/ping", "/metrics", "/debug/batch", "/identity"):
            async with client.get(f"{scheme}://127.0.0.1:{port}{path}", **options) as answer:
                found[path.removeprefix("/")] = answer.status
    return found


ALL = {"health": 200, "ping": 200, "metrics": 200, "debug/batch": 503, "identity": 200}
PROBES, API = ALL | {"identity": 404, "debug/batch": 404}, ALL | {"metrics": 404}


PORTS = [({}, ALL, ALL), ({"http_api": False}, ALL | {"identity": 404}, None), ({"http_api_port": 0}, PROBES, API)]


@pytest.mark.parametrize(("options", "on_probes", "on_api"), PORTS)
@run_async
async def test_ports(options: dict[str, Any], on_probes: dict[str, int], on_api: dict[str, int] | None) -> None:
    async with serving(None, **options) as (probes, api):
        assert await statuses(probes) == on_probes
        assert (None if api is None else await statuses(api)) == on_api
        assert (probes == api) == (on_probes == on_api)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@run_async
async def test_the_unspecified_address_of_ipv6_is_both_families() -> None:
    async with serving(bind_address="::") as (port, _):
        for address in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    return Secret(tmp_path, make_pair())


def client_context(directory: Path, secret: Secret, *, mutual: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=secret.authority.cert.decode())
    context.check_hostname = False
    if mutual:
        (directory / "client").write_bytes(secret.pair.cert + secret.pair.key)
        context.load_cert_chain(directory / "client")
    return context


@run_async
async def test_with_tls_the_apis_need_a_port(secret: Secret, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Certificates(secret.files())) as (probes, api):
        assert api is None
        assert await statuses(probes) == PROBES
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert all("HTTP_API_PORT" in message for message in caplog.messages)


@pytest.mark.parametrize("mutual", [False, True])
@run_async
async def test_tls_follows_changes_of_its_files(mutual: bool, secret: Secret, tmp_path: Path) -> None:
    clock = Clock()
    async with serving(Certificates(secret.files(mutual=mutual), clock), http_api_port=0) as (probes, api):
        assert api is not None
        assert await statuses(probes) == PROBES
        before = client_context(tmp_path, secret, mutual=mutual)
        assert await statuses(api, ssl=before) == API
        secret.authority = make_pair()
        secret.renew()
        clock.next_check()
        with pytest.raises(aiohttp.ClientError):
            await statuses(api, ssl=before)
        assert await statuses(api, ssl=client_context(tmp_path, secret, mutual=mutual)) == API
        if mutual:
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await statuses(api, ssl=client_context(tmp_path, secret, mutual=False))


@run_async
async def test_a_token_that_nobody_checks_makes_no_other_client() -> None:
    async with serving() as (probes, _), aiohttp.ClientSession(f"http://127.0.0.1:{probes}") as client:
        said = [{}, {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}]
        answers = [await client.get("/identity", headers=headers) for headers in said]
        assert len({await answer.text() for answer in answers}) == 1


NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "one")])
POLICY = x509.ObjectIdentifier("1.2.3")
CLIENTS: list[list[x509.GeneralName] | bytes] = [
    [x509.DNSName("one")],
    [x509.UniformResourceIdentifier("one")],
    [x509.DNSName("one"), x509.IPAddress(ipaddress.ip_address("::1"))],
    [x509.DirectoryName(NAME)],
    [x509.RegisteredID(POLICY)],
    [x509.OtherName(POLICY, b"\x0c\x03one")],
    [],
    b"\x30\x05\x87\x03\1\2\3",  # an IP address of three bytes, which gRPC refuses
]


def client_of(secret: Secret, names: list[x509.GeneralName] | bytes) -> Pair:
    if isinstance(names, bytes):
        extension = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, names)
        return make_pair(secret.authority, alternatives=extension)
    return make_pair(secret.authority, alternatives=x509.SubjectAlternativeName(names))


@run_async
async def test_a_client_certificate_is_the_same_client_over_grpc_and_no_other(secret: Secret, tmp_path: Path) -> None:
    certificates = Certificates(secret.files(mutual=True))
    over_grpc: list[str] = []
    over_http: list[str] = []

    async def handle(_request: bytes, context: Any) -> bytes:
        over_grpc.append(caller_identity(context, bearer_auth=True).hex())
        return b""

    async with (
        grpc_calls.serving(grpc_calls.service(Call=handle), certificates=certificates) as (_, port),
        serving(certificates, http_api_port=0) as (_, api),
    ):
        for names in CLIENTS:
            secret.pair = pair = client_of(secret, names)
            context = client_context(tmp_path, secret, mutual=True)
            async with (
                aiohttp.ClientSession() as client,
                client.get(f"https://127.0.0.1:{api}/identity", ssl=context) as answer,
            ):
                over_http.append(await answer.text())
            if isinstance(names, bytes):
                continue
            credentials = grpc.ssl_channel_credentials(secret.authority.cert, pair.key, pair.cert)
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                await channel.unary_unary("/test.Service/Call", bytes, bytes)(b"")
    assert over_grpc == over_http[:-1]
    assert len({*over_http, ""}) == len(CLIENTS) + 1
