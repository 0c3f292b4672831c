"""POST /v1/completions."""

from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import cast

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
    echoed, choices = await _echoed(call, body, generate_call), []
    for output in _chosen(outputs, generate_call.n, num_choices(body)):
        prompt = echoed[output.index // num_choices(body)]
        logprobs = await _logprobs(call, body, output) if body.logprobs is not None else None
        reason = finish_reason(output.stop_reason)
        choices.append(CompletionChoice(output.index, prompt + output.text, logprobs, reason))
    completion = Completion(answer.id, answer.created, answer.model, choices, FINGERPRINT, usage.usage())
    headers = call.compute_headers(generate_call.texts)
    return json_response(completion, headers | timing_headers(outputs, usage.usage().prompt_tokens, compute_time=False))


def _chosen(outputs: list[RequestOutput], candidates: int, n: int) -> list[RequestOutput]:
    """The `n` best of each prompt, numbered anew."""
    if candidates == n:
        return outputs
    groups = [outputs[start : start + candidates] for start in range(0, len(outputs), candidates)]
    best = chain.from_iterable(best_first(group)[:n] for group in groups)
    return [replace(output, index=index) for index, output in enumerate(best)]


async def _logprobs(call: HttpCall, body: CompletionRequest, output: RequestOutput) -> CompletionLogprobs:
    found = _no_logprobs(body)
    await _add_logprobs(found, call, TokenTexts(call.generator.token_decoder), output)
    return found


def _no_logprobs(body: CompletionRequest) -> CompletionLogprobs:
    return CompletionLogprobs([], [], [], [] if body.logprobs else None)


async def _add_logprobs(found: CompletionLogprobs, call: HttpCall, texts: TokenTexts, output: RequestOutput) -> None:
    """Append the logprobs of an output: input tokens, where it has any, and new tokens."""
    infos, with_top = chain(output.input_tokens, output.tokens), found.top_logprobs is not None
    async for some in call.generator.slicer.slices(infos, cost=output.details_per_token):
        more = texts.completion_logprobs(some, with_top=with_top)
        found.text_offset += more.text_offset
        found.tokens += more.tokens
        found.token_logprobs += more.token_logprobs
        if found.top_logprobs is not None:
            found.top_logprobs += more.top_logprobs or []


async def _stream(
    call: HttpCall, body: CompletionRequest, generate_call: GenerateCall, answer: Answer
) -> web.StreamResponse:
    events = call.event_stream(call.compute_headers(generate_call.texts))
    usage, n = UsageCounter(generate_call.n), generate_call.n
    count = len(generate_call.texts) * n
    to_echo: dict[int, str] | None = None  # by output
    texts = [TokenTexts(call.generator.token_decoder) for _ in range(count)]
    pending = [_no_logprobs(body) for _ in range(count)]
    async with aclosing(call.generator.stream(generate_call)) as outputs:
        async for output in outputs:
            if to_echo is None:  # the first message: the prompts are valid
                to_echo = dict(enumerate(each for each in await _echoed(call, body, generate_call) for _ in range(n)))
            usage.count(output)
            if body.logprobs is not None:
                await _add_logprobs(pending[output.index], call, texts[output.index], output)
            if not output.generated_token_count and not output.stop_reason:
                continue  # before the first token
            logprobs = pending[output.index] if body.logprobs is not None else None
            pending[output.index] = _no_logprobs(body)
            text = to_echo.pop(output.index, "") + output.text
            choice = CompletionChoice(output.index, text, logprobs, finish_reason(output.stop_reason))
            await events.send(answer.chunk(Completion, [choice], usage))
    return await answer.end(events, Completion, usage)
