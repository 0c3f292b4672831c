"""POST /v1/completions."""

import functools
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import cast

import msgspec
from aiohttp import web

from tgis.api.http.calls import HttpCall, json_response
from tgis.api.http.timing_headers import timing_headers
from tgis.api.openai.answers import (
    FINGERPRINT,
    Answer,
    UsageCounter,
    check_at_most,
    finish_reason,
    make_call,
)
from tgis.api.openai.bodies import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from tgis.api.openai.logprobs import TokenTexts
from tgis.api.openai.models import ServedModels
from tgis.api.openai.params import MAX_TOP_LOGPROBS, completion_params, num_candidates, num_choices
from tgis.errors import InvalidRequest
from tgis.frontend.calls import GenerateCall
from tgis.frontend.output import RequestOutput, best_first


class Completions:
    """The route."""

    def __init__(self, models: ServedModels, max_choices: int, max_prompts: int) -> None:
        self._models = models
        self._max_choices = max_choices
        self._max_prompts = max_prompts

    async def __call__(self, call: HttpCall) -> web.StreamResponse:
        body = await call.body(CompletionRequest)
        max_tokens = call.generator.server_info.limits.max_sequence_length
        texts, token_ids = _prompts(body.prompt, self._max_prompts, max_tokens)
        params, candidates = completion_params(body), num_candidates(body)
        check_at_most("n" if body.best_of is None else "best_of", candidates, self._max_choices)
        check_at_most("logprobs", body.logprobs or 0, MAX_TOP_LOGPROBS)
        adapter = await self._models.adapter(body.model)
        fields = [f"prompt[{index}]" for index in range(len(texts))]
        generate_call = make_call(
            call, params, texts, fields, candidates, adapter, token_ids=token_ids, stream=bool(body.stream)
        )
        answer = Answer.of("cmpl-", body, adapter or self._models.names[0])
        if body.stream:
            return await _stream(call, body, generate_call, answer)
        return await _unary(call, body, generate_call, answer)


def _prompts(
    prompt: str | list[str | int | list[int]], max_prompts: int, max_tokens: int
) -> tuple[list[str], list[list[int]] | None]:
    """Texts, and the token ids of prompts that come tokenized."""
    match prompt:
        case str():
            return [prompt], None
        case []:
            raise InvalidRequest("prompt", "prompt cannot be empty")
    if not isinstance(prompt[0], int) and len(prompt) > max_prompts:
        raise InvalidRequest("prompt", f"prompt must have at most {max_prompts} prompts", str(len(prompt)))
    last = prompt[-max(max_prompts, max_tokens) :]  # of more token ids, the number is refused later
    kinds = {type(prompt[0]), *map(type, last)}
    if kinds == {str}:
        return cast("list[str]", prompt), None
    if len(kinds) > 1:
        raise InvalidRequest("prompt", "prompt must be a text, token ids, or several of one of them")
    token_ids = cast("list[list[int]]", prompt if kinds == {list} else [prompt])
    return [""] * len(token_ids), token_ids


async def _echoed(call: HttpCall, body: CompletionRequest, generate_call: GenerateCall) -> list[str]:
    """The text that is put before the outputs of each prompt."""
    if not body.echo:
        return [""] * len(generate_call.texts)
    if generate_call.token_ids is None:
        return generate_call.texts
    return await call.generator.token_decoder.tokenizer.decode_batch(generate_call.token_ids)


async def _unary(
    call: HttpCall, body: CompletionRequest, generate_call: GenerateCall, answer: Answer
) -> web.StreamResponse:
    outputs = await call.generator.generate(generate_call)
    usage = UsageCounter(generate_call.n)
    for output in outputs:
        usage.count(output)
    echoed = await _echoed(call, body, generate_call)

    def make_body() -> bytes:
        choices = [
            CompletionChoice(
                output.index,
                echoed[output.index // num_choices(body)] + output.text,
                _logprobs(body, TokenTexts(call.generator.token_decoder), output),
                finish_reason(output.stop_reason),
            )
            for output in _chosen(outputs, generate_call.n, num_choices(body))
        ]
        completion = Completion(answer.id, answer.created, answer.model, choices, FINGERPRINT, usage.usage())
        return msgspec.json.encode(completion)

    data = await call.run(sum(output.conversion_cost for output in outputs), make_body)
    headers = call.compute_headers(generate_call.texts)
    return json_response(data, headers | timing_headers(outputs, usage.usage().prompt_tokens, compute_time=False))


def _chosen(outputs: list[RequestOutput], candidates: int, n: int) -> list[RequestOutput]:
    """The `n` best of each prompt, numbered anew."""
    if candidates == n:
        return outputs
    groups = [outputs[start : start + candidates] for start in range(0, len(outputs), candidates)]
    best = chain.from_iterable(best_first(group)[:n] for group in groups)
    return [replace(output, index=index) for index, output in enumerate(best)]


def _logprobs(body: CompletionRequest, texts: TokenTexts, output: RequestOutput) -> CompletionLogprobs | None:
    """The logprobs of the prompt, if they are asked for, and of what is new."""
    if body.logprobs is None:
        return None
    return texts.completion_logprobs(chain(output.input_tokens, output.tokens), with_top=bool(body.logprobs))


def _joined(first: CompletionLogprobs | None, more: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if first is None or more is None:
        return more
    first.text_offset += more.text_offset
    first.tokens += more.tokens
    first.token_logprobs += more.token_logprobs
    if first.top_logprobs is not None:
        first.top_logprobs += more.top_logprobs or []
    return first


async def _stream(
    call: HttpCall, body: CompletionRequest, generate_call: GenerateCall, answer: Answer
) -> web.StreamResponse:
    events = call.event_stream(call.compute_headers(generate_call.texts))
    usage, n = UsageCounter(generate_call.n), generate_call.n
    count = len(generate_call.texts) * n
    to_echo: dict[int, str] | None = None  # by output
    texts = [TokenTexts(call.generator.token_decoder) for _ in range(count)]
    pending: list[CompletionLogprobs | None] = [None] * count  # of messages before the first token
    async with aclosing(call.generator.stream(generate_call)) as outputs:
        async for output in outputs:
            if to_echo is None:  # the first message: the prompts are valid
                to_echo = dict(enumerate(each for each in await _echoed(call, body, generate_call) for _ in range(n)))
            usage.count(output)
            convert = functools.partial(_logprobs, body, texts[output.index], output)
            logprobs = _joined(pending[output.index], await call.run(output.conversion_cost, convert))
            if not output.generated_token_count and not output.stop_reason:
                pending[output.index] = logprobs
                continue  # before the first token
            pending[output.index] = None
            text = to_echo.pop(output.index, "") + output.text
            choice = CompletionChoice(output.index, text, logprobs, finish_reason(output.stop_reason))
            await events.send(answer.chunk(Completion, [choice], usage))
    return await answer.end(events, Completion, usage)
