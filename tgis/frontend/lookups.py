"""What the engine process looks up before a call is queued: the adapter and the grammar that the call names.

Nothing is cached here: the engine process checks an adapter's files for each call. Error texts are those of TGIS.
"""

import asyncio
import time
from contextlib import ExitStack, suppress

import msgspec

from tgis.errors import GrammarError, InvalidRequest, Overloaded
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Metrics
from tgis.ipc.lookups import Acquired, AdapterProblem, AdapterRef, GrammarSpec
from tgis.structured_output.lark import to_lark

ADAPTER_TIMEOUT, GRAMMAR_TIMEOUT = 5.0, 10.0  # seconds
_SHOWN_ID_CHARACTERS = 100  # length in an error message


class Lookups:
    """Finds adapters and grammars for calls; the engine process holds them until `resources` closes."""

    def __init__(
        self, client: EngineClient, metrics: Metrics, *, why_no_adapters: str | None, why_no_grammars: str | None
    ) -> None:
        """Where there is a reason why there are none, each one that a call names is an error that gives it."""
        self._client = client
        self._metrics = metrics
        self._why_no_adapters, self._why_no_grammars = why_no_adapters, why_no_grammars

    async def adapter(self, named: tuple[str, str], resources: ExitStack) -> AdapterRef:
        """Load the adapter that a field and an id name; InvalidRequest if it cannot be used."""
        field, adapter_id = named
        if self._why_no_adapters is not None:
            raise self._adapter_error(field, f"{field} supplied but {self._why_no_adapters}")
        started = time.monotonic()
        found = await self._client.acquire(adapter_id, ADAPTER_TIMEOUT, resources)
        if found is None or found.adapter is None:
            raise self._adapter_error(field, _error_text(field, adapter_id, found))
        if found.loaded:
            self._metrics.adapters.duration.observe(time.monotonic() - started)
        return found.adapter

    async def grammar(self, spec: GrammarSpec, resources: ExitStack) -> int:
        """Compile a grammar and give its id; InvalidRequest if it cannot be used. Schemas that need not be exact are
        enforced as far as possible.
        """
        if self._why_no_grammars is not None:
            raise InvalidRequest(spec.kind, f"{spec.kind}: {self._why_no_grammars}")
        try:
            return await self._compiled(spec, resources)
        except GrammarError as error:
            problem = error
        if not spec.is_exact:
            with suppress(GrammarError):
                return await self._compiled(msgspec.structs.replace(spec, rough=True), resources)
        logged = f"{spec.kind} cannot be compiled"
        raise InvalidRequest(spec.kind, f"{spec.kind}: {problem}", logged=logged)

    async def _compiled(self, spec: GrammarSpec, resources: ExitStack) -> int:
        lark = await asyncio.to_thread(to_lark, spec)  # Python code would delay steps in the engine process
        target = msgspec.structs.replace(spec, lark=lark)
        compiled = await self._client.acquire(target, GRAMMAR_TIMEOUT, resources)
        if compiled is None:
            raise Overloaded(f"no grammar was compiled within {GRAMMAR_TIMEOUT:g} s")
        if compiled.reason:
            raise GrammarError(compiled.reason)
        return compiled.lookup_id

    def _adapter_error(self, field: str, text: str) -> InvalidRequest:
        self._metrics.adapters.failure.inc()
        return InvalidRequest(field, text)


def _error_text(field: str, adapter_id: str, found: Acquired | None) -> str:
    """Describe the problem in the words of TGIS for `prefix_id`, in those of vllm-tgis-adapter for `adapter_id`."""
    shown = "".join(c if c.isprintable() else "?" for c in adapter_id[:_SHOWN_ID_CHARACTERS])
    shown += "..." * (len(adapter_id) > _SHOWN_ID_CHARACTERS)
    is_prefix = field == "prefix_id"
    head = f"can't retrieve {'prompt prefix' if is_prefix else 'adapter'} with id '{shown}': "
    if found is None:
        return f"{head}it could not be loaded in time"
    match found.problem:
        case AdapterProblem.NOT_FOUND if is_prefix:
            return f'{head}prefix id "{shown}" not found'
        case AdapterProblem.BAD_ID if not is_prefix:
            return f"Invalid adapter id '{shown}', must contain only alphanumeric, _ and - and /"
        case AdapterProblem.UNSUPPORTED:
            return f"adapter type {found.reason} is not currently supported"
    return head + found.reason
