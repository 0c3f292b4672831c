"""The certificates of the gRPC port: read, checked, and reloaded when their files change.

Unusable files are an OptionError at startup. Later they are logged once, and the last good ones stay in use.
"""

import logging
import math
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc

from tgis.errors import OptionError
from tgis.utils.file_watch import FileWatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; with `client_ca`, clients must present a certificate issued by it."""

    cert: str
    key: str
    client_ca: str | None = None


class Certificates:
    """Server credentials that follow changes of their files; `expiry` is of those in use."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Read and check the files; OptionError names the option and the path. `clock` is in seconds."""
        self._files = files
        self._lock = threading.Lock()
        self._watch = FileWatch([path for path in (files.cert, files.key, files.client_ca) if path], clock)
        self._initial, self.expiry = _load(files)
        self._warn_if_expired()

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that call `fetch` for every new connection."""
        mutual = self._files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._initial, self.fetch, mutual)  # type: ignore[arg-type]  # the stubs do not know that None means no change

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates if they have changed, else None; gRPC calls it on its own threads before each handshake."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._reload() if self._watch.changed() else None
        finally:
            self._lock.release()

    def _reload(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            configuration, self.expiry = _load(self._files)
        except OptionError as error:
            if self._watch.failed(error):
                _log.warning("the changed TLS files are unusable, keeping the previous ones: %s", error)
            return None
        self._warn_if_expired()
        _log.info("reloaded the TLS files for new connections")
        return configuration

    def _warn_if_expired(self) -> None:
        for name, path in {"server": self._files.cert, "client_ca": self._files.client_ca}.items():
            if self.expiry.get(name, math.inf) <= time.time():
                since = datetime.fromtimestamp(self.expiry[name], UTC)
                _log.warning("%s has a certificate that expired on %s", path, since.strftime("%Y-%m-%d at %H:%M UTC"))


def _load(files: TlsFiles) -> tuple[grpc.ServerCertificateConfiguration, dict[str, float]]:
    """The files in gRPC's form, and when they expire; OptionError if one is unusable or the key is another's."""
    cert = _read("--tls-cert-path", files.cert)
    key = _read("--tls-key-path", files.key)
    _check_certificates("--tls-cert-path", files.cert)
    _check_key(files)
    if files.client_ca is None:
        return grpc.ssl_server_certificate_configuration([(key, cert)]), {"server": _expiry(cert)}
    client_ca = _read("--tls-client-ca-cert-path", files.client_ca)
    _check_certificates("--tls-client-ca-cert-path", files.client_ca)
    expiry = {"server": _expiry(cert), "client_ca": _expiry(client_ca)}
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca), expiry


def _expiry(pem: bytes) -> float:
    """When the first of the certificates expires, in seconds since 1970; NaN if they cannot be parsed."""
    from cryptography import x509  # noqa: PLC0415 - only where TLS is on

    try:
        return min(certificate.not_valid_after_utc.timestamp() for certificate in x509.load_pem_x509_certificates(pem))
    except ValueError:  # OpenSSL, which decides, takes more
        return math.nan


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OptionError(f"{option} {path}: {error.strerror}") from error


def _check_certificates(option: str, path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError as error:  # SSLError is one
        raise OptionError(f"{option} {path}: not PEM certificates") from error


def _check_key(files: TlsFiles) -> None:
    try:
        # Without a password OpenSSL would prompt on the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # SSLError is one
        reason = f"not the unencrypted PEM private key of --tls-cert-path {files.cert}"
        raise OptionError(f"--tls-key-path {files.key}: {reason}") from error
