"""Authentication and identity of HTTP clients: bearer tokens, API_KEY and client certificates."""

import hmac
import ssl
from collections.abc import Callable

from aiohttp import web

from tgis.api.http.errors import HttpError
from tgis.security.bearer import TokenFile, bearer_token, digest
from tgis.security.identity import identity_of


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
        """The identity of the caller, the same as over gRPC."""
        connection = request.transport.get_extra_info("ssl_object") if request.transport else None
        certificate = connection.getpeercert(binary_form=True) if connection else None
        pem = ssl.DER_cert_to_PEM_cert(certificate).encode() if certificate else b""
        return identity_of(_token(request) if self.needed else "", pem)

    def _accepts(self, token: str) -> bool:
        is_key = self._api_key is not None and hmac.compare_digest(digest(token), self._api_key)
        return is_key or (self._tokens is not None and self._tokens.accepts(token))


def _token(request: web.Request) -> str:
    value = request.headers.get("Authorization", "")
    return bearer_token(value) if value.isascii() else ""
