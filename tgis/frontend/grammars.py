"""The grammar that a call gives: compiled in the engine process, errors in the words of the request."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tgis.errors import InvalidRequest, Overloaded
from tgis.frontend.engine_client import EngineClient
from tgis.ipc.grammars import GrammarSpec


class GrammarClient:
    """Has grammars compiled for calls."""

    def __init__(self, client: EngineClient, timeout: float, unsupported_reason: str | None) -> None:
        """With an `unsupported_reason` every grammar is an error that gives it."""
        self._client = client
        self._timeout = timeout
        self._unsupported_reason = unsupported_reason

    @asynccontextmanager
    async def acquire(self, spec: GrammarSpec | None) -> AsyncIterator[int | None]:
        """The id of a compiled grammar, valid until the block is left; InvalidRequest if it cannot be used."""
        if spec is None:
            yield None
            return
        if self._unsupported_reason is not None:
            raise InvalidRequest(spec.kind, f"{spec.kind}: {self._unsupported_reason}")
        async with self._client.acquire_grammar(spec, self._timeout) as compiled:
            if compiled is None:
                raise Overloaded(f"no grammar was compiled within {self._timeout:g} s")
            if compiled.problem:
                text = f"{spec.kind}: {compiled.problem}"
                raise InvalidRequest(spec.kind, text, logged=f"{spec.kind} cannot be compiled")
            yield compiled.lookup_id
