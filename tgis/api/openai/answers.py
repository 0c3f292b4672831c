"""Answers of chats and completions: unary or streamed, with usage."""

import functools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET

from tgis.api.http.calls import HttpCall
from tgis.api.http.responses import json_response, timing_headers
from tgis.api.openai.bodies import ChatCompletionChunk, Completion, SamplingBody, StreamOptions, Usage
from tgis.api.openai.params import is_echo_only
from tgis.frontend.calls import GenerateCall
from tgis.frontend.output import RequestOutput
from tgis.ipc.request import StopReason

Chunk = ChatCompletionChunk | Completion

_STOPS = (StopReason.EOS_TOKEN, StopReason.STOP_SEQUENCE)


def finish_reason(reason: StopReason, num_calls: int = 0) -> str | None:
    """The finish_reason of an output with `num_calls` tool calls; None before its end."""
    if not reason:
        return None
    if reason in _STOPS:
        return "tool_calls" if num_calls else "stop"
    return "length"


class Answer:
    """The answer to one request. Usage counts the tokens of a prompt once, not for each of its outputs."""

    def __init__(
        self, prefix: str, call: HttpCall, generate_call: GenerateCall, body: SamplingBody, model: str
    ) -> None:
        self._call = call
        self._generate_call = generate_call
        self._is_echo_only = is_echo_only(body)
        # Makes the events of a chunk or of an error, with their names; None if these are the events.
        self.convert: Callable[[Any], Iterable[tuple[str, Any]]] | None = None
        # Returns the thoughts of all outputs; None if outputs are not parsed.
        self.thoughts: Callable[[], list[str]] | None = None
        self._options = body.stream_options or StreamOptions()
        self.common: dict[str, Any] = {
            "id": prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": call.generator.server_info.engine.fingerprint,
        }
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens: dict[int, int] = {}
        self._cached_tokens = 0
        self._prediction_tokens: Counter[str] = Counter()

    async def whole(
        self, kind: Callable[..., Any], make_fields: Callable[[list[RequestOutput]], dict[str, Any]]
    ) -> web.Response:
        """Generate and answer with one body, made by `kind`; `make_fields` makes its choices from the outputs."""
        outputs = await self._call.generator.generate(self._generate_call)
        for output in outputs:
            self._count(output)

        def make_body() -> bytes:
            fields = make_fields(outputs)
            return msgspec.json.encode(kind(usage=self._usage(final=True), **self.common, **fields))

        size = sum(output.num_details + len(output.text) for output in outputs)
        body = await self._call.generator.pool.run(size, make_body)
        headers = self._call.compute_headers(self._generate_call.texts)
        return json_response(body, headers | timing_headers(outputs, sum(self._prompt_tokens.values())))

    async def stream(self, kind: type[Chunk], make_choices: Callable[[RequestOutput], list[Any]]) -> web.StreamResponse:
        """Stream a chunk for each choice; `make_choices` makes them from an output message."""
        events = self._call.event_stream(self._call.compute_headers(self._generate_call.texts))
        events.convert = self.convert or events.convert
        async with aclosing(self._call.generator.stream(self._generate_call)) as outputs:
            async for output in outputs:
                self._count(output)
                convert = functools.partial(make_choices, output)
                for choice in await self._call.generator.pool.run(output.num_details + len(output.text), convert):
                    await events.write(events.encode(self._chunk(kind, [choice])))
        if self._options.include_usage:
            size = sum(map(len, self.thoughts())) if self.thoughts else 0
            await events.write(await self._call.generator.pool.run(size, lambda: events.encode(self._chunk(kind, []))))
        if self._call.errors.last_event:
            await events.send(self._call.errors.last_event)
        return events.response

    def _chunk(self, kind: type[Chunk], choices: list[Any]) -> Chunk:
        """A chunk; the last one has the total usage and no choices."""
        chunk = kind(choices=choices, **self.common)
        if self._options.include_usage:
            wanted = self._options.continuous_usage_stats or not choices
            chunk.usage = self._usage(final=not choices) if wanted else None
        return chunk

    def _count(self, output: RequestOutput) -> None:
        """Count the tokens of an output message; with `is_echo_only` drop the generated ones."""
        if self._is_echo_only:
            output.text, output.tokens, output.generated_token_count = "", (), 0
            output.stop_reason = output.stop_reason and StopReason.MAX_TOKENS
        prompt, number = divmod(output.index, self._generate_call.n)
        if output.input_token_count:
            self._prompt_tokens[prompt] = output.input_token_count
        if not number:  # later outputs find the prompt of the first
            self._cached_tokens += output.num_cached_tokens
        self._prediction_tokens.update(output.prediction_tokens or ())
        if output.generated_token_count:
            self._completion_tokens[output.index] = output.generated_token_count

    def _usage(self, *, final: bool) -> Usage:
        prompt, completion = sum(self._prompt_tokens.values()), sum(self._completion_tokens.values())
        usage = Usage(prompt, completion, prompt + completion, {"cached_tokens": self._cached_tokens})
        details = dict(self._prediction_tokens)
        if final and self.thoughts:
            num_tokens = self._call.generator.token_decoder.tokenizer.count(self.thoughts())
            details["reasoning_tokens"] = min(num_tokens, completion)
        usage.completion_tokens_details = details or UNSET
        return usage
