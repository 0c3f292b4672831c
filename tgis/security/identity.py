"""Who a caller is: a digest of its token and of the names in its client certificate, the same over gRPC and HTTP."""

import functools
import hashlib
from typing import Any

from tgis.security.bearer import token_of


def caller_identity(context: Any, *, bearer_auth: bool) -> bytes:
    """The identity of the caller of a gRPC call; its token counts only if `bearer_auth` is on, which checks it.

    Empty for an anonymous caller. KV blocks are shared only between calls of the same identity.
    """
    token = token_of(context) if bearer_auth else ""
    (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
    return identity_of(token, certificate)


def identity_of(token: str, certificate: bytes) -> bytes:
    """A digest of a checked token and of the names in a certificate in PEM; empty without both."""
    if not token and not certificate:
        return b""
    return hashlib.sha256(hashlib.sha256(token.encode()).digest() + _certificate_names(certificate)).digest()


@functools.lru_cache(maxsize=1024)
def _certificate_names(pem: bytes) -> bytes:
    """The DNS, URI, e-mail and IP names of a certificate with their kinds; else all of its names, or all of it."""
    if not pem:
        return b""
    from cryptography import x509  # noqa: PLC0415 - only where TLS is on

    kinds = (x509.DNSName, x509.UniformResourceIdentifier, x509.RFC822Name, x509.IPAddress)
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        values = [extension.value for extension in certificate.extensions]
        alternatives = [name for value in values if isinstance(value, x509.SubjectAlternativeName) for name in value]
        usual = [name for name in alternatives if isinstance(name, kinds)]
        names: list[object] = [*usual] or [certificate.subject.public_bytes(), *alternatives]
    except (ValueError, x509.UnsupportedGeneralNameType, x509.DuplicateExtension):  # OpenSSL has accepted it
        return b"".join(pem.split())
    return repr(sorted(map(repr, names))).encode()
