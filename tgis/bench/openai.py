"""OpenAI's API: /v1/completions and /v1/chat/completions, with the extensions of vLLM and llama.cpp."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tgis.bench.client import BenchSettings, FailedAnswer, RequestRecord

_DONE = b"[DONE]"


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @property
    def has_output(self) -> bool:
        return bool(self.content or self.reasoning or self.reasoning_content)


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    """A chunk of a stream, or a whole answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class OpenAIRequests:
    """Servers may put several tokens into a chunk: usage, at the end, says how many there are."""

    model_path = "/v1/models"

    def __init__(self, settings: BenchSettings) -> None:
        self.path = "/v1/chat/completions" if settings.chat else "/v1/completions"
        self._settings = settings
        self._model = settings.model

    def model_name(self, answer: bytes) -> str | None:
        models = msgspec.json.decode(answer, type=_Models).data
        if self._model is None and models:
            self._model = models[0].id
        return self._model

    def body(self, text: str, max_tokens: int) -> dict[str, Any]:
        prompt = {"messages": [{"role": "user", "content": text}]} if self._settings.chat else {"prompt": text}
        body = {"model": self._model or "", **prompt, "max_tokens": max_tokens, "temperature": 0}
        if self._settings.ignore_eos:
            body["ignore_eos"] = True
        if self._settings.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def record_event(self, event: bytes, now: float, record: RequestRecord) -> bool:
        """Record an event and return true if it is the last; FailedAnswer if it is an error."""
        if event == _DONE:
            record.counts_events = not record.input_tokens  # there was no usage
            return True
        chunk = _decode(event)
        _check(chunk)
        if any(choice.text or (choice.delta and choice.delta.has_output) for choice in chunk.choices):
            record.record_output(now, record.output_tokens + 1)
        if chunk.usage is not None:
            _record_usage(chunk.usage, record)
        return False

    def record_answer(self, answer: bytes, _headers: Mapping[str, str], record: RequestRecord) -> None:
        chunk = _decode(answer)
        _check(chunk)
        if chunk.usage is not None:
            _record_usage(chunk.usage, record)
        record.counts_events = chunk.usage is None


def _check(chunk: _Chunk) -> None:
    if chunk.error is not None:
        raise FailedAnswer("error", msgspec.json.encode(chunk.error).decode())


def _record_usage(usage: _Usage, record: RequestRecord) -> None:
    record.input_tokens, record.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if record.num_messages:
        record.first_message_tokens = usage.completion_tokens / record.num_messages
