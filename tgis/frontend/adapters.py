"""The soft prompt or LoRA adapter that a call names: looked up in the engine process; errors in TGIS's words.

Nothing is cached here: the engine process checks the files for each call.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tgis.errors import InvalidRequest
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Metrics
from tgis.ipc.adapters import AdapterProblem, AdapterRef, AdapterResolved

_SHOWN_ID_CHARACTERS = 100  # in an error message


class AdapterClient:
    """Resolves adapter ids for calls."""

    def __init__(self, client: EngineClient, metrics: Metrics, unsupported_reason: str | None) -> None:
        """With an `unsupported_reason` every id is an error that gives it."""
        self._client = client
        self._metrics = metrics
        self._unsupported_reason = unsupported_reason

    @asynccontextmanager
    async def acquire(self, adapter: tuple[str, str] | None) -> AsyncIterator[AdapterRef | None]:
        """Load the adapter that a field and an id name, and keep it until the block is left; else InvalidRequest."""
        if adapter is None:
            yield None
            return
        field, adapter_id = adapter
        if self._unsupported_reason is not None:
            raise self._error(field, f"{field} supplied but {self._unsupported_reason}")
        started = time.monotonic()
        async with self._client.acquire_adapter(adapter_id) as found:
            if found is None or found.problem is not None:
                raise self._error(field, _error_message(field, adapter_id, found))
            if found.loaded:
                self._metrics.adapter_loaded(time.monotonic() - started)
            lengths = found.length, found.decoder_length
            yield AdapterRef(adapter_id, *lengths, found.lookup_id, found.version, found.rank)

    def _error(self, field: str, text: str) -> InvalidRequest:
        self._metrics.adapter_load_failed()
        return InvalidRequest(field, text)


def _error_message(field: str, adapter_id: str, found: AdapterResolved | None) -> str:
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
