"""Logprobs of tokens, as the two kinds of completions want them."""

import math
from collections.abc import Iterable

from msgspec import UNSET, UnsetType

from tgis.api.openai.bodies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.output import TokenInfo

_LOWEST = -9999.0  # JSON has no infinity


class TokenTexts:
    """The tokens of one output as text, one after the other; special tokens as well."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._previous: int | None = None
        self._offset = 0  # in the text, of the next token

    def chat_logprobs(self, infos: Iterable[TokenInfo], top_n: int) -> ChatLogprobs:
        """The logprobs of the next tokens, and of `top_n` candidates for each."""
        return ChatLogprobs([self._chat_logprob(info, top_n) for info in infos])

    def prompt_logprobs(self, infos: Iterable[TokenInfo], top_n: int | None) -> PromptLogprobs | UnsetType:
        """The logprobs of the tokens of a prompt and of `top_n` candidates for each, as in vLLM; None: not wanted."""
        if top_n is None:
            return UNSET
        return [None if math.isnan(info.logprob) else self._prompt_logprob(info, top_n) for info in infos]

    def _prompt_logprob(self, info: TokenInfo, top_n: int) -> dict[int, PromptLogprob]:
        tops = enumerate(info.top_tokens[:top_n], 1)
        ranked = [(info.id, info.logprob, info.rank), *((id_, logprob, rank) for rank, (id_, _, logprob) in tops)]
        return {
            id_: PromptLogprob(_finite(logprob), rank, _text(self._bytes(id_)))
            for id_, logprob, rank in reversed(ranked)
        }

    def completion_logprobs(self, infos: Iterable[TokenInfo], top_n: int) -> CompletionLogprobs:
        """The logprobs of the next tokens and of their candidates, to which the token belongs if it is none of the
        `top_n` best; the first token of a prompt has none.
        """
        found = CompletionLogprobs([], [], [], [] if top_n else None)
        for info in infos:
            text = _text(self._bytes(info.id))
            tops = {_text(self._bytes(id_)): _finite(logprob) for id_, _, logprob in info.top_tokens[:top_n]}
            tops.setdefault(text, _finite(info.logprob))
            unknown = math.isnan(info.logprob)
            found.text_offset.append(self._offset)
            found.tokens.append(text)
            found.token_logprobs.append(None if unknown else _finite(info.logprob))
            if found.top_logprobs is not None:
                found.top_logprobs.append(None if unknown else tops)
            self._offset += len(text)
            self._previous = info.id
        return found

    def _chat_logprob(self, info: TokenInfo, top_n: int) -> TokenLogprob:
        tops = [TopLogprob(*self._token(id_), _finite(logprob)) for id_, _, logprob in info.top_tokens[:top_n]]
        token = TokenLogprob(*self._token(info.id), _finite(info.logprob), tops)
        self._previous = info.id
        return token

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        data = self._bytes(token_id)
        return _text(data), list(data)

    def _bytes(self, token_id: int) -> bytes:
        return self._decoder.token_bytes(self._previous, token_id)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
