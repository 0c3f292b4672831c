"""What this API serves."""

from tgis.api.http.operations import Operation
from tgis.api.openai import bodies
from tgis.api.openai.chat import ChatCompletions
from tgis.api.openai.completions import Completions
from tgis.api.openai.face import OpenAIFace
from tgis.api.openai.models import ServedModels
from tgis.config import Config
from tgis.prompts.catalog import AdapterCatalog


class OpenAIApi:
    """The routes and what they share."""

    def __init__(self, config: Config, catalog: AdapterCatalog) -> None:
        names = config.shown_model, config.model_name
        self._models = ServedModels(names, catalog, config.strict_model_names)
        self.chat = ChatCompletions(self._models, config.max_best_of)
        self.completions = Completions(self._models, config.max_best_of, config.max_client_batch_size)

    def operations(self) -> list[Operation]:
        """All of them, with the types of their bodies."""
        return _operations(self._models, self.chat, self.completions)


def _operations(models: ServedModels, chat: ChatCompletions, completions: Completions) -> list[Operation]:
    face = OpenAIFace()
    return [
        Operation(
            "POST",
            "/v1/chat/completions",
            chat,
            face,
            id="chat_completions",
            summary="Answer a chat",
            request=bodies.ChatCompletionRequest,
            response=bodies.ChatCompletion,
            event=bodies.ChatCompletionChunk,
        ),
        Operation(
            "POST",
            "/v1/completions",
            completions,
            face,
            id="completions",
            summary="Continue prompts",
            request=bodies.CompletionRequest,
            response=bodies.Completion,
            event=bodies.Completion,
        ),
        Operation(
            "GET",
            "/v1/models",
            models.list_models,
            face,
            id="openai_get_model_info",
            summary="List the model and its adapters",
            response=bodies.ModelList,
        ),
        Operation(
            "GET",
            r"/v1/models/{id:[\s\S]+}",  # an id may have slashes, and line breaks
            models.get_model,
            face,
            id="openai_get_model",
            summary="Describe the model or an adapter",
            response=bodies.Model,
        ),
    ]
