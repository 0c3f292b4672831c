"""The served model and its adapters."""

import asyncio
import time
from dataclasses import dataclass, field

from aiohttp import web

from tgis.api.http.calls import HttpCall
from tgis.api.http.errors import HttpError
from tgis.api.http.responses import json_response
from tgis.api.openai.bodies import Model, ModelList
from tgis.prompts.catalog import AdapterCatalog

# What the packages of TGI send instead of a name: text-generation and huggingface_hub.
_ANY_MODEL = ("", "tgi", "dummy")
_OWNER = "tgis"


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The names of the model, and the adapters of the store."""

    names: tuple[str, ...]  # answers have the first
    catalog: AdapterCatalog
    created: int = field(default_factory=lambda: int(time.time()))

    async def adapter(self, name: str | None) -> str | None:
        """Return the adapter with this name, None for the model itself; HttpError if there is neither."""
        if name is None or name in _ANY_MODEL or name in self.names:
            return None
        if not await asyncio.to_thread(self.catalog.has, name):
            raise HttpError(404, f"The model `{name:.40}` does not exist.")
        return name

    async def list_models(self, call: HttpCall) -> web.StreamResponse:
        """List the model and its adapters."""
        adapter_ids = await asyncio.to_thread(self.catalog.ids)
        models = [self._model(call, None), *(self._model(call, adapter_id) for adapter_id in adapter_ids)]
        return json_response(ModelList(models))

    async def get_model(self, call: HttpCall) -> web.StreamResponse:
        """Describe the model or an adapter."""
        return json_response(self._model(call, await self.adapter(call.request.match_info["id"])))

    def _model(self, call: HttpCall, adapter_id: str | None) -> Model:
        name, length = self.names[0], call.generator.server_info.limits.max_sequence_length
        return Model(adapter_id or name, self.created, _OWNER, length, None if adapter_id is None else name)
