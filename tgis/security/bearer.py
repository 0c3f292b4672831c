"""Optional bearer tokens: every RPC but health must carry one of those in a file, which may change."""

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from tgis.errors import StartError
from tgis.utils.file_watch import FileWatch

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
_PUBLIC_METHODS = "/grpc.health.v1.Health/"
_SCHEME = "bearer "


class TokenFile:
    """The tokens of a file, one per line; blank lines and lines that begin with # are none."""

    def __init__(self, path: Path) -> None:
        """Reads the file; StartError if it cannot be used."""
        self._path = path
        self._watch = FileWatch([str(path)])
        self._digests = _read_digests(path)

    def accepts(self, token: str) -> bool:
        """Whether it is one of them, in a time that does not tell how much of it is right."""
        if self._watch.changed():
            self._reload()
        digest = _digest(token)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # looks at all of them

    def _reload(self) -> None:
        try:
            self._digests = _read_digests(self._path)
            log.info("the token file has changed: %d tokens", len(self._digests))
        except StartError as error:
            log.warning("the changed token file is unusable, keeping the old tokens: %s", error)


class BearerAuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # the stubs make it generic
    """Ends calls without a valid token as UNAUTHENTICATED, before their message is read."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or one that refuses it."""
        if details.method.startswith(_PUBLIC_METHODS) or self._tokens.accepts(
            bearer_token(details.invocation_metadata)
        ):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_reject)


async def _reject(_requests: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")


def bearer_token(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The token that a call carries, '' if there is none."""
    for key, value in metadata or ():
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(_SCHEME):
            return value[len(_SCHEME) :].strip()
    return ""


def _read_digests(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"AUTH_TOKEN_PATH {path}: {error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise StartError(f"AUTH_TOKEN_PATH {path}: more than {MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in text.splitlines()]
    tokens = [_digest(line) for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise StartError(f"AUTH_TOKEN_PATH {path}: no token in it")
    return tokens


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
