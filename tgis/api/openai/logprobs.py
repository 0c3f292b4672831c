"""Logprobs of tokens in the formats of chats, completions and prompts."""

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

# The logprob instead of minus infinity, which JSON lacks.
_LOWEST = -9999.0


class TokenTexts:
    """Converts the tokens of one output to text, in order, special tokens included."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._previous: int | None = None
        self._text_offset = 0

    def chat_logprobs(self, infos: Iterable[TokenInfo], top_n: int) -> ChatLogprobs:
        """The logprobs of the next tokens, and of `top_n` candidates for each."""
        tokens = []
        for info in infos:
            tops = self._tops(info, top_n)
            token = self._token(info.id, info.logprob)
            tokens.append(TokenLogprob(token.token, token.bytes, token.logprob, tops))
            self._previous = info.id
        return ChatLogprobs(tokens)

    def prompt_logprobs(self, infos: Iterable[TokenInfo], top_n: int | None) -> PromptLogprobs | UnsetType:
        """The logprobs of the tokens of a prompt and of `top_n` candidates for each, as in vLLM; None: not wanted."""
        if top_n is None:
            return UNSET
        return [None if math.isnan(info.logprob) else self._prompt_logprob(info, top_n) for info in infos]

    def _prompt_logprob(self, info: TokenInfo, top_n: int) -> dict[int, PromptLogprob]:
        tops = enumerate(info.top_tokens[:top_n], 1)
        ranked = [(info.id, info.logprob, info.rank), *((id_, logprob, rank) for rank, (id_, _, logprob) in tops)]
        tokens = [(id_, self._token(id_, logprob), rank) for id_, logprob, rank in reversed(ranked)]
        return {id_: PromptLogprob(token.logprob, rank, token.token) for id_, token, rank in tokens}

    def completion_logprobs(self, infos: Iterable[TokenInfo], top_n: int) -> CompletionLogprobs:
        """The logprobs of the next tokens and of their candidates; a token that is not among the `top_n` best is added.

        The first token of a prompt has no logprob.
        """
        logprobs = CompletionLogprobs([], [], [], [] if top_n else None)
        for info in infos:
            token = self._token(info.id, info.logprob)
            tops = {top.token: top.logprob for top in self._tops(info, top_n)}
            tops.setdefault(token.token, token.logprob)
            unknown = math.isnan(info.logprob)
            logprobs.text_offset.append(self._text_offset)
            logprobs.tokens.append(token.token)
            logprobs.token_logprobs.append(None if unknown else token.logprob)
            if logprobs.top_logprobs is not None:
                logprobs.top_logprobs.append(None if unknown else tops)
            self._text_offset += len(token.token)
            self._previous = info.id
        return logprobs

    def _tops(self, info: TokenInfo, top_n: int) -> list[TopLogprob]:
        return [self._token(id_, logprob) for id_, _, logprob in info.top_tokens[:top_n]]

    def _token(self, token_id: int, logprob: float) -> TopLogprob:
        data = self._decoder.token_bytes(self._previous, token_id)
        return TopLogprob(data.decode(errors="replace"), list(data), max(logprob, _LOWEST))
