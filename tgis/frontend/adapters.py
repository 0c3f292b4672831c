"""What the id of a call names in the engine's store, a soft prompt or a LoRA adapter; errors in TGIS's words.

Nothing is remembered here: the engine looks at the files each time, so that what it tells is true at that moment.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tgis.errors import InvalidRequest
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Metrics
from tgis.ipc.adapters import Prefix, PromptInfo, PromptProblem

_SHOWN = 100  # characters of an id, in a message


class Adapters:
    """Resolves ids; `refusal` says why none can be, if so."""

    def __init__(self, client: EngineClient, metrics: Metrics, refusal: str | None) -> None:
        self._client = client
        self._metrics = metrics
        self._refusal = refusal

    @asynccontextmanager
    async def resolved(self, adapter: tuple[str, str] | None) -> AsyncIterator[Prefix | None]:
        """What a field and its id name, loaded until the block is left; else InvalidRequest."""
        if adapter is None:
            yield None
            return
        field, name = adapter
        if self._refusal is not None:
            raise self._failed(field, f"{field} supplied but {self._refusal}")
        started = time.monotonic()
        async with self._client.prompt(name) as info:
            if info is None or info.problem is not None:
                raise self._failed(field, _text(field, name, info))
            if info.loaded:
                self._metrics.prompt_loaded(time.monotonic() - started)
            yield Prefix(name, info.length, info.decoder_length, info.number, info.version)

    def _failed(self, field: str, text: str) -> InvalidRequest:
        self._metrics.prompt_load_failed()
        return InvalidRequest(field, text)


def _text(field: str, name: str, info: PromptInfo | None) -> str:
    """What went wrong, in the words of TGIS for `prefix_id` and in those of its adapter for `adapter_id`."""
    name = "".join(c if c.isprintable() else "?" for c in name[:_SHOWN]) + "..." * (len(name) > _SHOWN)
    soft = field == "prefix_id"
    head = f"can't retrieve {'prompt prefix' if soft else 'adapter'} with id '{name}': "
    if info is None:
        return f"{head}it could not be loaded in time"
    match info.problem:
        case PromptProblem.NOT_FOUND if soft:
            return f'{head}prefix id "{name}" not found'
        case PromptProblem.BAD_ID if not soft:
            return f"Invalid adapter id '{name}', must contain only alphanumeric, _ and - and /"
        case PromptProblem.UNSUPPORTED:
            return f"adapter type {info.reason} is not currently supported"
    return head + info.reason
