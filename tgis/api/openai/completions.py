"""POST /v1/completions."""

from typing import Any, cast

from aiohttp import web

from tgis.api.http.calls import HttpCall
from tgis.api.http.responses import best_first
from tgis.api.openai.answers import Answer, check_at_most, finish_reason
from tgis.api.openai.bodies import Completion, CompletionChoice, CompletionRequest
from tgis.api.openai.logprobs import TokenTexts
from tgis.api.openai.models import ServedModels
from tgis.api.openai.params import MAX_CHOICES, MAX_TOP_LOGPROBS, completion_params, num_candidates, num_choices
from tgis.api.openai.requests import RequestReader
from tgis.errors import InvalidRequest
from tgis.frontend.output import RequestOutput


class Completions:
    """The route."""

    def __init__(self, models: ServedModels, reader: RequestReader, max_prompts: int) -> None:
        self._models = models
        self._reader = reader
        self._max_prompts = max_prompts

    async def __call__(self, call: HttpCall) -> web.StreamResponse:
        body = self._reader.read(call, CompletionRequest)
        max_tokens = call.generator.server_info.limits.max_sequence_length
        texts, token_ids = _prompts(body.prompt, self._max_prompts, max_tokens)
        n, candidates = num_choices(body), num_candidates(body)
        most = min(MAX_CHOICES, max(1, call.max_inputs // len(texts)))
        check_at_most("n" if body.best_of is None else "best_of", candidates, most)
        check_at_most("logprobs", body.logprobs or 0, MAX_TOP_LOGPROBS)
        check_at_most("prompt_logprobs", body.prompt_logprobs or 0, MAX_TOP_LOGPROBS)
        params = completion_params(body, call)
        adapter = await self._models.adapter(body.model)
        fields = [f"prompt[{index}]" for index in range(len(texts))]
        generate_call = call.generate_call(
            params, texts, fields, adapter, n=candidates, stream=bool(body.stream), token_ids=token_ids
        )
        decoder = call.generator.token_decoder
        if body.echo and token_ids is not None:  # of too many, the number is refused later
            texts = await decoder.tokenizer.decode_batch([ids[-max_tokens:] for ids in token_ids])
        choices = [
            StreamedChoice(index, body, text, TokenTexts(decoder))
            for index, text in enumerate(text for text in texts for _ in range(n))
        ]
        answer = Answer("cmpl-", call, generate_call, body, adapter or self._models.names[0])
        if body.stream:
            return await answer.stream(Completion, lambda output: choices[output.index].chunks(output))

        def make_fields(outputs: list[RequestOutput]) -> dict[str, Any]:
            pairs = zip(choices, _chosen(outputs, candidates, n), strict=True)
            return {"choices": [chunk for choice, output in pairs for chunk in choice.chunks(output)]}

        return await answer.whole(Completion, make_fields)


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
        bound = f"prompt must have at most {max_prompts} prompts (MAX_CLIENT_BATCH_SIZE)"
        raise InvalidRequest("prompt", bound, str(len(prompt)))
    last = prompt[-max(max_prompts, max_tokens) :]  # of more token ids, the number is refused later
    kinds = {type(prompt[0]), *map(type, last)}
    if kinds == {str}:
        return cast("list[str]", prompt), None
    if len(kinds) > 1:
        raise InvalidRequest("prompt", "prompt must be a text, token ids, or several of one of them")
    token_ids = cast("list[list[int]]", prompt if kinds == {list} else [prompt])
    return [""] * len(token_ids), token_ids


def _chosen(outputs: list[RequestOutput], candidates: int, n: int) -> list[RequestOutput]:
    """The `n` best of each prompt."""
    if candidates == n:
        return outputs
    groups = [outputs[start : start + candidates] for start in range(0, len(outputs), candidates)]
    return [output for group in groups for output in best_first(group)[:n]]


class StreamedChoice:
    """One output while it is streamed; a whole output is one chunk."""

    def __init__(self, index: int, body: CompletionRequest, prompt: str, texts: TokenTexts) -> None:
        self._index = index
        self._body = body
        self._echo = prompt if body.echo else ""  # that no chunk has yet
        self._texts = texts

    def chunks(self, output: RequestOutput) -> list[CompletionChoice]:
        """The chunk that a message of the front end becomes; none if it says nothing to this client."""
        input_tokens = [*output.input_tokens]
        infos = [*(input_tokens if self._body.echo else ()), *output.tokens]
        if not infos and not output.generated_token_count and not output.stop_reason:
            return []  # before the first token
        logprobs, count = None, self._body.logprobs
        if count is not None:
            logprobs = self._texts.completion_logprobs(infos, count)
        text, self._echo = self._echo + output.text, ""
        prompt_logprobs = self._texts.prompt_logprobs(input_tokens, self._body.prompt_logprobs)
        return [CompletionChoice(self._index, text, logprobs, finish_reason(output.stop_reason), prompt_logprobs)]
