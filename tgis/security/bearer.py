"""Bearer tokens, checked against a file that may change."""

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tgis.errors import OptionError
from tgis.utils.file_watch import WatchedFiles

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


def token_of(context: Any) -> str:
    """The bearer token of a gRPC call, "" if it has none."""
    for key, value in context.invocation_metadata() or ():
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
    """The digest by which tokens are compared: it says nothing about their lengths."""
    return hashlib.sha256(token.encode()).digest()
