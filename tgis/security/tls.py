"""The certificates of the gRPC port and of HTTP_API_PORT: read, checked, and reloaded when their files change."""

import logging
import math
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from tgis.errors import OptionError, file_errors
from tgis.utils.file_watch import WatchedFiles

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; with `client_ca`, clients must present a certificate issued by it."""

    cert: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The files as gRPC and the HTTP ports take them, and when they expire."""

    configuration: grpc.ServerCertificateConfiguration
    context: ssl.SSLContext
    expiry: dict[str, float]


class Certificates:
    """Credentials of the server that follow changes of their files."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Read and check the files; OptionError names the option and the path. `clock` is in seconds."""
        self._files = files
        paths = [path for path in (files.cert, files.key, files.client_ca) if path]
        self._loaded = WatchedFiles(paths, lambda: _load(files), clock)
        self._fetched = self._loaded.value()

    @property
    def expiry(self) -> dict[str, float]:
        """When those in use expire, in seconds since 1970."""
        return self._loaded.value().expiry

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that call `fetch` for every new connection."""
        mutual = self._files.client_ca is not None
        initial = self._fetched.configuration
        return grpc.dynamic_ssl_server_credentials(initial, self.fetch, mutual)  # type: ignore[arg-type]  # the stubs do not know that None means no change

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates if they have changed, else None; gRPC calls it on its own threads before each handshake."""
        before, self._fetched = self._fetched, self._loaded.value()
        return None if self._fetched is before else self._fetched.configuration

    def server_context(self) -> ssl.SSLContext:
        """A context of the ssl module whose handshakes use the certificates of that time."""
        context = _server_context(self._files)

        def use_current(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = self._loaded.value().context

        context.sni_callback = use_current  # called whether or not the client names a server
        return context


def _load(files: TlsFiles) -> _Loaded:
    """OptionError if a file is unusable or the key is another's."""
    certificates = {"server": _read_certificates("--tls-cert-path", files.cert)}
    key = _read("--tls-key-path", files.key)
    if files.client_ca is not None:
        certificates["client_ca"] = _read_certificates("--tls-client-ca-cert-path", files.client_ca)
    configuration = grpc.ssl_server_certificate_configuration(
        [(key, certificates["server"])], certificates.get("client_ca")
    )
    context = _server_context(files)
    expiry = {name: _expiry(pem) for name, pem in certificates.items()}
    _warn_if_expired(files, expiry)
    return _Loaded(configuration, context, expiry)


def _warn_if_expired(files: TlsFiles, expiry: dict[str, float]) -> None:
    for name, path in {"server": files.cert, "client_ca": files.client_ca}.items():
        if expiry.get(name, math.inf) <= time.time():
            since = datetime.fromtimestamp(expiry[name], UTC)
            _log.warning("%s has a certificate that expired on %s", path, since.strftime("%Y-%m-%d at %H:%M UTC"))


def _expiry(pem: bytes) -> float:
    """When the first of the certificates expires, in seconds since 1970; NaN if they cannot be parsed."""
    from cryptography import x509  # noqa: PLC0415 - only where TLS is on

    try:
        return min(certificate.not_valid_after_utc.timestamp() for certificate in x509.load_pem_x509_certificates(pem))
    except ValueError:  # OpenSSL, which decides, takes more
        return math.nan


def _read(option: str, path: str) -> bytes:
    with file_errors(f"{option} {path}", OptionError):
        return Path(path).read_bytes()


def _read_certificates(option: str, path: str) -> bytes:
    content = _read(option, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError as error:  # SSLError is one
        raise OptionError(f"{option} {path}: not PEM certificates") from error
    return content


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password OpenSSL would prompt on the terminal for that of an encrypted key.
        context.load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # SSLError is one
        reason = f"not the unencrypted PEM private key of --tls-cert-path {files.cert}"
        raise OptionError(f"--tls-key-path {files.key}: {reason}") from error
    if files.client_ca is not None:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
