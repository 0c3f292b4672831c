"""Bearer tokens: checked against a file that may change, and part of who a caller is."""

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from tgis.errors import OptionError
from tgis.utils.file_watch import WatchedFiles

_PUBLIC_METHODS = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


class TokenFile:
    """The tokens of a file, one per line; blank lines and lines starting with # are ignored."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file; OptionError if it is unusable. `clock` is in seconds."""
        self._digests = WatchedFiles([str(path)], lambda: _read_digests(path), clock)

    def accepts(self, token: str) -> bool:
        """Return true if the file has the token, in constant time with regard to the token."""
        given = digest(token)
        return sum(hmac.compare_digest(given, known) for known in self._digests.value()) > 0  # no early exit


class BearerAuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the stubs make it generic
    """Rejects calls without a valid token as UNAUTHENTICATED before reading their message; health is exempt."""

    def __init__(self, tokens: TokenFile, on_rejected: Callable[[], None]) -> None:
        self._tokens = tokens
        self._on_rejected = on_rejected

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if details.method.startswith(_PUBLIC_METHODS) or self._tokens.accepts(_token_of(details.invocation_metadata)):
            return await continuation(details)
        self._on_rejected()
        return grpc.stream_stream_rpc_method_handler(_reject)


def caller_identity(context: Any, *, bearer_auth: bool) -> bytes:
    """A digest of what a caller has proven: its token if `bearer_auth` is on, and its client certificate.

    Empty for an anonymous caller. KV blocks are shared only between calls of the same identity.
    """
    token = _token_of(context.invocation_metadata()) if bearer_auth else ""  # an unchecked token proves nothing
    return identity_of(token, context.peer_identities() or ())


def identity_of(token: str, certificate_names: Iterable[bytes]) -> bytes:
    """A digest of a checked token and of the names in a client certificate; empty if there are none."""
    proofs = [token.encode(), *certificate_names]
    if not any(proofs):
        return b""
    digests = b"".join(hashlib.sha256(proof).digest() for proof in proofs)
    return hashlib.sha256(digests).digest()


async def _reject(_requests: Any, context: Any) -> None:
    context.set_code(grpc.StatusCode.UNAUTHENTICATED)  # not `abort`: the call would keep its error, with this frame
    context.set_details("a valid bearer token is required")


def _token_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The bearer token of a call, "" if it has none."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str) and (token := bearer_token(value)):
            return token
    return ""


def bearer_token(authorization: str) -> str:
    """The token in the value of the header, "" if it has none."""
    return authorization[len(_SCHEME) :].strip() if authorization.lower().startswith(_SCHEME) else ""


def _read_digests(path: Path) -> list[bytes]:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"AUTH_TOKEN_PATH {path}: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    tokens = [digest(line) for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise OptionError(f"AUTH_TOKEN_PATH {path}: no token in it")
    return tokens


def digest(token: str) -> bytes:
    """What tokens are compared by: it says nothing about their lengths."""
    return hashlib.sha256(token.encode()).digest()
