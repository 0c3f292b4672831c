"""Authentication and identity of HTTP clients: bearer tokens, API_KEY and client certificates."""

import hmac
import ipaddress
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web

from tgis.api.http.errors import HttpError
from tgis.security.bearer import TokenFile, bearer_token, digest, identity_of

_NAME_KINDS = ("DNS", "URI", "email")


class HttpAuth:
    """Checks requests against AUTH_TOKEN_PATH and API_KEY; without both, every request is accepted."""

    def __init__(self, tokens: TokenFile | None, api_key: str | None, on_rejected: Callable[[], None]) -> None:
        self._tokens = tokens
        self._api_key = None if api_key is None else digest(api_key)
        self._on_rejected = on_rejected
        self.needed = tokens is not None or api_key is not None

    def check(self, request: web.Request) -> None:
        """HttpError for a request without a valid token, where one is needed."""
        if self.needed and not self._accepts(_token(request)):
            self._on_rejected()
            raise HttpError(401, "a valid bearer token is required")

    def identity(self, request: web.Request) -> bytes:
        """A digest of who the caller is, as gRPC's `caller_identity`: a client has one identity everywhere."""
        token = _token(request) if self.needed else ""
        certificate = request.transport.get_extra_info("peercert") if request.transport else None
        return identity_of(token, _certificate_names(certificate or {}))

    def _accepts(self, token: str) -> bool:
        is_key = self._api_key is not None and hmac.compare_digest(digest(token), self._api_key)
        return is_key or (self._tokens is not None and self._tokens.accepts(token))


def _token(request: web.Request) -> str:
    value = request.headers.get("Authorization", "")
    return bearer_token(value) if value.isascii() else ""


def _certificate_names(certificate: dict[str, Any]) -> Iterator[bytes]:
    """The names that gRPC takes from a certificate: the subject's alternative names, else its common name."""
    names = certificate.get("subjectAltName", ())
    for kind, value in names:
        if kind in _NAME_KINDS:
            yield value.encode()
        elif kind == "IP Address":
            yield str(ipaddress.ip_address(value)).encode()
    if not names:
        for (kind, value), *_ in certificate.get("subject", ()):
            if kind == "commonName":
                yield value.encode()
