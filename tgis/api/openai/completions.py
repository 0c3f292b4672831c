"""The prompts of a completion, and its outputs as choices."""

from typing import cast

from tgis.api.http.responses import best_first
from tgis.api.openai.answers import finish_reason
from tgis.api.openai.bodies import CompletionChoice, CompletionRequest
from tgis.api.openai.logprobs import TokenTexts
from tgis.errors import InvalidRequest
from tgis.frontend.output import RequestOutput


def split_prompt(
    prompt: str | list[str | int | list[int]], max_prompts: int, max_tokens: int
) -> tuple[list[str], list[list[int]] | None]:
    """Split a prompt into texts, or into token ids and empty texts."""
    match prompt:
        case str():
            return [prompt], None
        case []:
            raise InvalidRequest("prompt", "prompt cannot be empty")
    if not isinstance(prompt[0], int) and len(prompt) > max_prompts:
        bound = f"prompt must have at most {max_prompts} prompts, the inputs that a client may have in flight"
        raise InvalidRequest("prompt", bound, str(len(prompt)))
    last = prompt[-max(max_prompts, max_tokens) :]  # prompts that are too long fail later
    kinds = {type(prompt[0]), *map(type, last)}
    if kinds == {str}:
        return cast("list[str]", prompt), None
    if len(kinds) > 1:
        raise InvalidRequest("prompt", "prompt must be a text, token ids, or several of one of them")
    token_ids = cast("list[list[int]]", prompt if kinds == {list} else [prompt])
    return [""] * len(token_ids), token_ids


def best_outputs(outputs: list[RequestOutput], candidates: int, n: int) -> list[RequestOutput]:
    """The `n` best outputs of each prompt."""
    if candidates == n:
        return outputs
    groups = [outputs[start : start + candidates] for start in range(0, len(outputs), candidates)]
    return [output for group in groups for output in best_first(group)[:n]]


class CompletionText:
    """The choice of one output; a complete output is a single chunk."""

    def __init__(self, index: int, body: CompletionRequest, prompt: str, texts: TokenTexts) -> None:
        self._index = index
        self._body = body
        self._unsent_echo = prompt if body.echo else ""
        self._texts = texts

    def chunks(self, output: RequestOutput) -> list[CompletionChoice]:
        """Convert an output message to at most one chunk."""
        input_tokens = [*output.input_tokens]
        infos = [*(input_tokens if self._body.echo else ()), *output.tokens]
        if not infos and not output.generated_token_count and not output.stop_reason:
            return []  # before the first token
        logprobs, count = None, self._body.logprobs
        if count is not None:
            logprobs = self._texts.completion_logprobs(infos, count)
        text, self._unsent_echo = self._unsent_echo + output.text, ""
        prompt_logprobs = self._texts.prompt_logprobs(input_tokens, self._body.prompt_logprobs)
        return [CompletionChoice(self._index, text, logprobs, finish_reason(output.stop_reason), prompt_logprobs)]
