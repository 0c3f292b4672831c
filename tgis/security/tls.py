"""The certificates of the gRPC port: read, checked, and read again when their files change.

Files that fail their checks are refused at start. Later they are logged once, and the last good ones stay
in use.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from tgis.errors import StartError
from tgis.utils.file_watch import FileWatch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files; with `client_ca` every client must show a certificate that chains to it."""

    cert: str
    key: str
    client_ca: str | None = None


class Certificates:
    """Server credentials that follow their files."""

    def __init__(self, files: TlsFiles, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads and checks the files; raises StartError with option and path. `clock` is in seconds."""
        self._files = files
        self._lock = threading.Lock()
        self._watch = FileWatch([path for path in (files.cert, files.key, files.client_ca) if path], clock)
        self._initial = _load(files)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials that ask `fetch` at each new connection."""
        mutual = self._files.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._initial, self.fetch, mutual)  # type: ignore[arg-type]  # the stubs forget that None means no change

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificates, or None for no change; called before a handshake, on threads of gRPC."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._reload() if self._watch.changed() else None
        finally:
            self._lock.release()

    def _reload(self) -> grpc.ServerCertificateConfiguration | None:
        try:
            configuration = _load(self._files)
        except StartError as error:
            _log.warning("the changed TLS files are unusable, keeping the old ones: %s", error)
            return None
        _log.info("the TLS files have changed, new connections get the new ones")
        return configuration


def _load(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """The files as gRPC takes them; raises StartError when one is missing, broken or of another pair."""
    cert = _read("--tls-cert-path", files.cert)
    key = _read("--tls-key-path", files.key)
    _check_certificates("--tls-cert-path", files.cert)
    _check_key(files)
    if files.client_ca is None:
        return grpc.ssl_server_certificate_configuration([(key, cert)])
    client_ca = _read("--tls-client-ca-cert-path", files.client_ca)
    _check_certificates("--tls-client-ca-cert-path", files.client_ca)
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


def _read(option: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"{option} {path}: {error.strerror}") from error


def _check_certificates(option: str, path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except OSError as error:  # SSLError is one
        raise StartError(f"{option} {path}: not PEM certificates") from error


def _check_key(files: TlsFiles) -> None:
    try:
        # Without a password OpenSSL would ask the terminal for that of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password="")
    except OSError as error:  # SSLError is one
        reason = f"not the unencrypted PEM private key of --tls-cert-path {files.cert}"
        raise StartError(f"--tls-key-path {files.key}: {reason}") from error
