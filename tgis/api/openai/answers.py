"""What the answers of both kinds of completions have in common."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tgis import __version__
from tgis.api.http.calls import HttpCall
from tgis.api.http.event_stream import EventStream
from tgis.api.openai.bodies import ChatCompletionChunk, Completion, SamplingBody, Usage
from tgis.errors import InvalidRequest
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.output import RequestOutput
from tgis.frontend.sampling_params import RawParams
from tgis.ipc.request import StopReason
from tgis.utils import logs

FINGERPRINT = f"tgis-{__version__}"
DONE = b"[DONE]"
C = TypeVar("C", Completion, ChatCompletionChunk)
_STOPS = (StopReason.EOS_TOKEN, StopReason.STOP_SEQUENCE)


def make_call(
    call: HttpCall,
    params: RawParams,
    texts: list[str],
    fields: list[str],
    n: int,
    adapter: str | None,
    *,
    token_ids: list[list[int]] | None = None,
    stream: bool,
) -> GenerateCall:
    """The call that the front end gets."""
    several = CallKind.SINGLE if len(texts) * n == 1 else CallKind.BATCH
    return GenerateCall(
        kind=CallKind.STREAM if stream else several,
        texts=texts,
        fields=fields,
        params=params,
        account=call.account,
        token_ids=token_ids,
        identity=call.identity,
        adapter=None if adapter is None else ("adapter_id", adapter),
        correlation_id=logs.correlation_id(),
        n=n,
    )


def check_at_most(field_name: str, value: int, limit: int) -> None:
    """Raise InvalidRequest if `value` exceeds `limit`."""
    if value > limit:
        raise InvalidRequest(field_name, f"{field_name} must be <= {limit}", str(value))


def finish_reason(reason: StopReason, num_calls: int = 0) -> str | None:
    """The finish_reason of an output with `num_calls` tool calls; None before its end."""
    if not reason:
        return None
    if reason in _STOPS:
        return "tool_calls" if num_calls else "stop"
    return "length"


@dataclass(slots=True)
class UsageCounter:
    """The tokens of a call: those of a prompt count once, however many outputs it has."""

    n: int  # outputs of each prompt
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: dict[int, int] = field(default_factory=dict)

    def count(self, output: RequestOutput) -> None:
        """Add a whole output, or a message of a stream."""
        if output.input_token_count:
            self.prompt_tokens[output.index // self.n] = output.input_token_count
        self.completion_tokens[output.index] = max(
            output.generated_token_count, self.completion_tokens.get(output.index, 0)
        )

    def usage(self) -> Usage:
        prompt, completion = sum(self.prompt_tokens.values()), sum(self.completion_tokens.values())
        return Usage(prompt, completion, prompt + completion)


@dataclass(frozen=True, slots=True)
class Answer:
    """The fields that all chunks of an answer share."""

    id: str
    model: str
    include_usage: bool
    usage_in_chunks: bool
    created: int

    @classmethod
    def of(cls, prefix: str, body: SamplingBody, model: str) -> "Answer":
        options = body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = include_usage and options is not None and bool(options.continuous_usage_stats)
        return cls(prefix + uuid.uuid4().hex, model, include_usage, continuous, int(time.time()))

    def chunk(self, kind: type[C], choices: list[Any], usage: UsageCounter) -> bytes:
        """An event of a stream; the last one has no choices."""
        chunk = kind(self.id, self.created, self.model, choices, FINGERPRINT)
        if self.include_usage:
            chunk.usage = usage.usage() if self.usage_in_chunks or not choices else None
        return msgspec.json.encode(chunk)

    async def end(self, events: EventStream, kind: type[C], usage: UsageCounter) -> web.StreamResponse:
        """Send the usage, if wanted, and the end of the stream."""
        if self.include_usage:
            await events.send(self.chunk(kind, [], usage))
        await events.send(DONE)
        return events.response
