"""The REST API of Hugging Face's TGI: /generate and /generate_stream."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tgis.bench.client import BenchSettings, FailedAnswer, RequestRecord


class _Info(msgspec.Struct):
    model_id: str | None = None


class _Details(msgspec.Struct):
    generated_tokens: int
    input_length: int = 0


class _Event(msgspec.Struct):
    generated_text: str | None = None  # of the last one
    details: _Details | None = None
    error: str | None = None
    error_type: str = "error"


_decode_event = msgspec.json.Decoder(_Event).decode


class TgiRequests:
    """Requests of TGI's API, where every event is a token."""

    model_path = "/info"

    def __init__(self, settings: BenchSettings) -> None:
        self.path = "/generate_stream" if settings.stream else "/generate"
        self._settings = settings

    def model_name(self, answer: bytes) -> str | None:
        return msgspec.json.decode(answer, type=_Info).model_id

    def body(self, text: str, max_tokens: int) -> dict[str, Any]:
        """TGI itself has no parameter to go on after the end of sequence, and ignores the name that others gave it."""
        parameters = {
            "max_new_tokens": max_tokens,
            "details": self._settings.stream,  # at the end of a stream only
            "ignore_eos_token": self._settings.ignore_eos,
            "adapter_id": self._settings.adapter_id,
        }
        return {"inputs": text, "parameters": parameters}

    def record_event(self, event: bytes, now: float, record: RequestRecord) -> bool:
        """Record an event and return true if it is the last; FailedAnswer if it is an error."""
        found = _decode_event(event)
        if found.error is not None:
            raise FailedAnswer(found.error_type, found.error)
        record.record_output(now, record.output_tokens + 1)
        if found.details is not None:
            record.input_tokens, record.output_tokens = found.details.input_length, found.details.generated_tokens
        return found.generated_text is not None

    def record_answer(self, _answer: bytes, headers: Mapping[str, str], record: RequestRecord) -> None:
        """Headers say how many tokens there are; details would have them all."""
        record.counts_events = "x-generated-tokens" not in headers
        record.input_tokens = int(headers.get("x-prompt-tokens", 0))
        record.output_tokens = int(headers.get("x-generated-tokens", 1))
