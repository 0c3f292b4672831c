"""Certificates of the gRPC port: real handshakes, mutual TLS, and files that change while serving."""

import asyncio
import math
import ssl
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from grpc_calls import OWN_CONNECTION, echo, service
from grpc_calls import serving as serving_grpc
from harness import run_async
from mounted_secret import Clock, Secret

from benchmarks.certificates import Pair, make_pair
from tgis.api.grpc.server import GrpcServer
from tgis.errors import OptionError
from tgis.security.tls import Certificates, TlsFiles, _expiry


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_pair()


@pytest.fixture
def secret(tmp_path: Path, authority: Pair) -> Secret:
    return Secret(tmp_path, authority)


def serving(files: TlsFiles, clock: Clock | None = None) -> AbstractAsyncContextManager[tuple[GrpcServer, int]]:
    return serving_grpc(service(Echo=echo), certificates=Certificates(files, clock or Clock()))


def connect(port: int, authority: Pair, client: Pair | None = None) -> grpc.aio.Channel:
    key, cert = (client.key, client.cert) if client else (None, None)
    credentials = grpc.ssl_channel_credentials(authority.cert, key, cert)
    return grpc.aio.secure_channel(f"localhost:{port}", credentials, options=OWN_CONNECTION)


async def call(channel: grpc.aio.Channel) -> grpc.StatusCode:
    try:
        await channel.unary_unary("/test.Service/Echo", bytes, bytes)(b"x", timeout=30)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def call_once(port: int, authority: Pair, client: Pair | None = None) -> grpc.StatusCode:
    async with connect(port, authority, client) as channel:
        return await call(channel)


async def shown_serial(port: int, authority: Pair) -> int:
    """Serial number of the certificate presented to a new connection, as seen by OpenSSL."""
    context = ssl.create_default_context(cadata=authority.cert.decode())
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("localhost", port, ssl=context)
    tls = writer.get_extra_info("ssl_object")
    writer.close()
    assert tls.selected_alpn_protocol() == "h2"
    return x509.load_der_x509_certificate(tls.getpeercert(binary_form=True)).serial_number


def test_the_expiry_is_of_the_certificates_in_use(secret: Secret, caplog: pytest.LogCaptureFixture) -> None:
    """Unusable ones are logged at each look, and never used."""
    clock = Clock()
    certificates = Certificates(secret.files(mutual=True), clock)
    assert certificates.expiry == {"server": expires(secret.pair), "client_ca": expires(secret.authority)}
    assert Certificates(secret.files()).expiry == {"server": expires(secret.pair)}
    assert math.isnan(_expiry(b"only OpenSSL can read it"))
    chain = make_pair(secret.authority, days=3)
    secret.publish(chain.cert + secret.authority.cert, chain.key)
    clock.next_check()
    certificates.fetch()
    assert certificates.expiry["server"] == min(expires(chain), expires(secret.authority)) == expires(secret.authority)
    for cert, key in ((b"nonsense", chain.key), (chain.cert, make_pair().key)):
        secret.publish(cert, key)
        for _ in range(2):  # the log itself holds repeated lines back
            caplog.clear()
            clock.next_check()
            assert certificates.fetch() is None
            assert f"--tls-{'key' if key != chain.key else 'cert'}-path" in caplog.text
            assert "PRIVATE KEY" not in caplog.text
    assert certificates.expiry["server"] == expires(secret.authority)
    secret.publish(secret.pair.cert, secret.pair.key)
    Path(secret.files(mutual=True).client_ca or "").write_bytes((other := make_pair(days=9)).cert)
    clock.next_check()
    assert certificates.expiry == {"server": expires(secret.pair), "client_ca": expires(other)}


def test_an_expired_certificate_is_a_warning(secret: Secret, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    certificates = Certificates(secret.files(mutual=True), clock)
    assert caplog.messages == []
    expired = make_pair(secret.authority, days=0)
    secret.publish(expired.cert, expired.key)
    clock.next_check()
    certificates.fetch()
    day = expired.certificate.not_valid_after_utc.strftime("%Y-%m-%d")
    assert f"{secret.files().cert} has a certificate that expired on {day} at " in caplog.text


def expires(pair: Pair) -> float:
    return pair.certificate.not_valid_after_utc.timestamp()


@run_async
async def test_calls_need_tls_and_a_certificate_of_the_client_ca_where_there_is_one(secret: Secret) -> None:
    ok, refused, stranger = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, make_pair()
    async with serving(secret.files()) as (_, port):
        async with grpc.aio.insecure_channel(f"localhost:{port}") as plain:
            assert await call(plain) is refused
        assert await call_once(port, stranger) is refused  # another CA
        assert await call_once(port, secret.authority) is ok
    async with serving(secret.files(mutual=True)) as (_, port):
        for client, code in ((None, refused), (make_pair(stranger), refused), (make_pair(secret.authority), ok)):
            assert await call_once(port, secret.authority, client) is code


@pytest.mark.parametrize("mutual", [False, True])
@run_async
async def test_a_renewed_certificate_is_used_for_new_connections(secret: Secret, mutual: bool) -> None:
    client, clock = make_pair(secret.authority), Clock()
    old = secret.pair.certificate.serial_number
    async with (
        serving(secret.files(mutual=mutual), clock) as (_, port),
        connect(port, secret.authority, client) as open_one,
    ):
        assert await call(open_one) is grpc.StatusCode.OK
        assert await shown_serial(port, secret.authority) == old
        new = secret.renew().certificate.serial_number
        clock.next_check()
        assert await shown_serial(port, secret.authority) == new
        assert await call(open_one) is grpc.StatusCode.OK
        assert await call_once(port, secret.authority, client) is grpc.StatusCode.OK
        if mutual:
            assert await call_once(port, secret.authority) is grpc.StatusCode.UNAVAILABLE


CASES: dict[str, list[bytes | str]] = {
    "--tls-cert-path": [b"", b"junk", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"],
    "--tls-key-path": [b"", b"junk", "other", "encrypted"],
    "--tls-client-ca-cert-path": [b"", b"junk"],
}


@pytest.mark.parametrize(("option", "content"), [(o, c) for o, contents in CASES.items() for c in contents])
def test_unusable_files_are_rejected_at_startup_with_option_and_path(
    secret: Secret, tmp_path: Path, option: str, content: bytes | str
) -> None:
    path = tmp_path / {"--tls-cert-path": "tls.crt", "--tls-key-path": "tls.key"}.get(option, "ca.crt")
    named = {"other": make_pair(secret.authority).key, "encrypted": secret.pair.encrypted_key}
    path.write_bytes(named[content] if isinstance(content, str) else content)
    with pytest.raises(OptionError) as caught:
        Certificates(secret.files(mutual=True))
    assert str(caught.value).startswith(f"{option} {path}: not ")
    path.unlink()
    with pytest.raises(OptionError) as caught:
        Certificates(secret.files(mutual=True))
    assert str(caught.value) == f"{option} {path}: No such file or directory"
