"""What the id of a call names in the engine's store, a soft prompt or a LoRA adapter; errors in TGIS's words.

Nothing is remembered here: the engine looks at the files each time, so that what it tells is true at that moment.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tgis.errors import InvalidRequest
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Metrics
from tgis.ipc.adapters import AdapterProblem, AdapterRef, AdapterResolved

_LOGGED_ID_CHARACTERS = 100  # characters of an id, in a message


class AdapterClient:
    """Resolves ids; `refusal` says why none can be, if so."""

    def __init__(self, client: EngineClient, metrics: Metrics, unsupported_reason: str | None) -> None:
        self._client = client
        self._metrics = metrics
        self._unsupported_reason = unsupported_reason

    @asynccontextmanager
    async def acquire(self, adapter: tuple[str, str] | None) -> AsyncIterator[AdapterRef | None]:
        """What a field and its id name, loaded until the block is left; else InvalidRequest."""
        if adapter is None:
            yield None
            return
        field, name = adapter
        if self._unsupported_reason is not None:
            raise self._error(field, f"{field} supplied but {self._unsupported_reason}")
        started = time.monotonic()
        async with self._client.acquire_adapter(name) as info:
            if info is None or info.problem is not None:
                raise self._error(field, _error_message(field, name, info))
            if info.loaded:
                self._metrics.adapter_loaded(time.monotonic() - started)
            yield AdapterRef(name, info.length, info.decoder_length, info.lookup_id, info.version)

    def _error(self, field: str, text: str) -> InvalidRequest:
        self._metrics.adapter_load_failed()
        return InvalidRequest(field, text)


def _error_message(field: str, name: str, info: AdapterResolved | None) -> str:
    """What went wrong, in the words of TGIS for `prefix_id` and in those of its adapter for `adapter_id`."""
    name = "".join(c if c.isprintable() else "?" for c in name[:_LOGGED_ID_CHARACTERS]) + "..." * (
        len(name) > _LOGGED_ID_CHARACTERS
    )
    soft = field == "prefix_id"
    head = f"can't retrieve {'prompt prefix' if soft else 'adapter'} with id '{name}': "
    if info is None:
        return f"{head}it could not be loaded in time"
    match info.problem:
        case AdapterProblem.NOT_FOUND if soft:
            return f'{head}prefix id "{name}" not found'
        case AdapterProblem.BAD_ID if not soft:
            return f"Invalid adapter id '{name}', must contain only alphanumeric, _ and - and /"
        case AdapterProblem.UNSUPPORTED:
            return f"adapter type {info.reason} is not currently supported"
    return head + info.reason
