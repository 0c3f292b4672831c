"""What both kinds of completions have in common: the way from a call to its answer, whole or as a stream."""

import functools
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from tgis import __version__
from tgis.api.http.calls import HttpCall
from tgis.api.http.responses import json_response, timing_headers
from tgis.api.openai.bodies import ChatCompletion, ChatCompletionChunk, Completion, SamplingBody, StreamOptions, Usage
from tgis.api.openai.errors import ERRORS
from tgis.api.openai.params import only_prompt
from tgis.errors import InvalidRequest
from tgis.frontend.calls import GenerateCall
from tgis.frontend.output import RequestOutput
from tgis.ipc.request import StopReason

C = TypeVar("C", Completion, ChatCompletionChunk)
_STOPS = (StopReason.EOS_TOKEN, StopReason.STOP_SEQUENCE)


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


class Answer:
    """The answer to one request. The tokens of a prompt count once, however many outputs it has."""

    def __init__(
        self, prefix: str, call: HttpCall, generate_call: GenerateCall, body: SamplingBody, model: str
    ) -> None:
        self._call = call
        self._generate_call = generate_call
        self._only_prompt = only_prompt(body)
        options = body.stream_options or StreamOptions()
        self._include_usage = bool(options.include_usage)
        self._usage_in_chunks = bool(options.include_usage and options.continuous_usage_stats)
        self._common: dict[str, Any] = {  # fields of all chunks
            "id": prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"tgis-{__version__}",
        }
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens: dict[int, int] = {}

    async def whole(
        self, kind: type[ChatCompletion | Completion], make_fields: Callable[[list[RequestOutput]], dict[str, Any]]
    ) -> web.Response:
        """Generate, and answer once with the fields, `choices` among them, that are made of the outputs."""
        outputs = await self._call.generator.generate(self._generate_call)
        for output in outputs:
            self._take(output)
        usage = self._usage()

        def make_body() -> bytes:
            return msgspec.json.encode(kind(usage=usage, **self._common, **make_fields(outputs)))

        body = await self._call.generator.pool.run(sum(output.conversion_cost for output in outputs), make_body)
        headers = self._call.compute_headers(self._generate_call.texts)
        return json_response(body, headers | timing_headers(outputs, usage.prompt_tokens))

    async def stream(self, kind: type[C], choices: Callable[[RequestOutput], list[Any]]) -> web.StreamResponse:
        """Stream what `choices` makes of each message of an output: each choice is an event."""
        events = self._call.event_stream(self._call.compute_headers(self._generate_call.texts))
        async with aclosing(self._call.generator.stream(self._generate_call)) as outputs:
            async for output in outputs:
                self._take(output)
                convert = functools.partial(choices, output)
                for choice in await self._call.generator.pool.run(output.conversion_cost, convert):
                    await events.send(self._chunk(kind, [choice]))
        if self._include_usage:
            await events.send(self._chunk(kind, []))
        await events.send(ERRORS.last_event)
        return events.response

    def _chunk(self, kind: type[C], choices: list[Any]) -> bytes:
        """An event of a stream; the one with the usage of the whole has no choices."""
        chunk = kind(choices=choices, **self._common)
        if self._include_usage:
            chunk.usage = self._usage() if self._usage_in_chunks or not choices else None
        return msgspec.json.encode(chunk)

    def _take(self, output: RequestOutput) -> None:
        """Count the tokens of a whole output, or of a message of a stream; drop them if only the prompt is wanted."""
        if self._only_prompt:
            output.text, output.tokens, output.generated_token_count = "", (), 0
            output.stop_reason = output.stop_reason and StopReason.MAX_TOKENS
        if output.input_token_count:
            self._prompt_tokens[output.index // self._generate_call.n] = output.input_token_count
        self._completion_tokens[output.index] = max(
            output.generated_token_count, self._completion_tokens.get(output.index, 0)
        )

    def _usage(self) -> Usage:
        prompt, completion = sum(self._prompt_tokens.values()), sum(self._completion_tokens.values())
        return Usage(prompt, completion, prompt + completion)
