"""The operations of OpenAI's API."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tgis.api.http.operations import Operation
from tgis.api.openai import bodies
from tgis.api.openai.chat import ChatCompletions
from tgis.api.openai.chat_template import ChatTemplate
from tgis.api.openai.completions import Completions
from tgis.api.openai.errors import ERRORS
from tgis.api.openai.models import ServedModels
from tgis.api.openai.requests import RequestReader
from tgis.config import Config
from tgis.prompts.catalog import AdapterCatalog


class OpenAIApi:
    """The routes and what they share."""

    def __init__(
        self,
        config: Config,
        catalog: AdapterCatalog,
        generation_config: Mapping[str, Any],
        template: asyncio.Future[ChatTemplate | None],
    ) -> None:
        """`generation_config` and `template` are the model's; the template is there before the generator."""
        names = config.shown_model, config.model_name
        reader = RequestReader({} if config.generation_config == "none" else generation_config)
        self._models = ServedModels(names, catalog)
        self.chat = ChatCompletions(self._models, reader, template)
        self.completions = Completions(self._models, reader, config.max_client_batch_size)

    def operations(self) -> list[Operation]:
        """All of them, with the types of their bodies."""
        return [
            Operation(
                "POST",
                "/v1/chat/completions",
                self.chat,
                ERRORS,
                "chat_completions",
                "Answer a chat",
                (bodies.ChatCompletionRequest,),
                bodies.ChatCompletion,
                bodies.ChatCompletionChunk,
            ),
            Operation(
                "POST",
                "/v1/completions",
                self.completions,
                ERRORS,
                "completions",
                "Continue prompts",
                (bodies.CompletionRequest,),
                bodies.Completion,
                bodies.Completion,
            ),
            Operation(
                "GET",
                "/v1/models",
                self._models.list_models,
                ERRORS,
                "openai_get_model_info",
                "List the model and its adapters",
                response=bodies.ModelList,
            ),
            Operation(
                "GET",
                r"/v1/models/{id:[\s\S]+}",  # an id may have slashes, and line breaks
                self._models.get_model,
                ERRORS,
                "openai_get_model",
                "Describe the model or an adapter",
                response=bodies.Model,
            ),
        ]
