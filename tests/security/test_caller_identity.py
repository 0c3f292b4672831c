"""What proves who a caller is."""

from dataclasses import dataclass

from tgis.security.bearer import caller_identity


@dataclass
class Context:
    token: str = ""
    certificate: tuple[bytes, ...] = ()

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    def peer_identities(self) -> tuple[bytes, ...] | None:
        return self.certificate or None


def test_callers_without_a_proof_are_alike() -> None:
    assert caller_identity(Context(), bearer_auth=True) == b""
    assert caller_identity(Context("anything"), bearer_auth=False) == b""


def test_every_proof_counts() -> None:
    callers = [Context("a"), Context("b"), Context("", (b"a",)), Context("", (b"a", b"b")), Context("a", (b"b",))]
    found = [caller_identity(caller, bearer_auth=True) for caller in callers]
    assert len(set(found)) == len(callers)
    assert b"" not in found
    assert found == [caller_identity(caller, bearer_auth=True) for caller in callers]
