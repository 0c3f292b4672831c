"""Who a caller is, as far as that was proven: cached prefixes are shared within one identity and not beyond."""

import hashlib
from typing import Any

from tgis.security.bearer import bearer_token


def caller_identity(context: Any, *, bearer_auth: bool) -> bytes:
    """A digest of the caller's token and certificate, empty where there is neither; it tells nothing about them.

    `tokens` says whether tokens are checked: otherwise one proves nothing.
    """
    token = bearer_token(context.invocation_metadata()) if bearer_auth else ""
    proofs = [token.encode(), *(context.peer_identities() or ())]
    if not any(proofs):
        return b""
    digests = b"".join(hashlib.sha256(proof).digest() for proof in proofs)
    return hashlib.sha256(digests).digest()
