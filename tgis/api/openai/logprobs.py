"""Logprobs of tokens, as the two kinds of completions want them."""

import math
from collections.abc import Iterable

from tgis.api.openai.bodies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.output import TokenInfo

_LOWEST = -9999.0  # JSON has no infinity


class TokenTexts:
    """The tokens of one output as text, one after the other; special tokens as well."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._previous: int | None = None
        self._offset = 0  # in the text, of the next token

    def chat_logprobs(self, infos: Iterable[TokenInfo]) -> ChatLogprobs:
        """The logprobs of the next tokens."""
        return ChatLogprobs([self._chat_logprob(info) for info in infos])

    def completion_logprobs(self, infos: Iterable[TokenInfo], *, with_top: bool) -> CompletionLogprobs:
        """The logprobs of the next tokens; the first token of a prompt has none."""
        found = CompletionLogprobs([], [], [], [] if with_top else None)
        for info in infos:
            text = _text(self._bytes(info.id))
            tops = {_text(self._bytes(id_)): _finite(logprob) for id_, _, logprob in info.top_tokens}
            unknown = math.isnan(info.logprob)
            found.text_offset.append(self._offset)
            found.tokens.append(text)
            found.token_logprobs.append(None if unknown else _finite(info.logprob))
            if found.top_logprobs is not None:
                found.top_logprobs.append(None if unknown else tops)
            self._offset += len(text)
            self._previous = info.id
        return found

    def _chat_logprob(self, info: TokenInfo) -> TokenLogprob:
        tops = [TopLogprob(*self._token(id_), _finite(logprob)) for id_, _, logprob in info.top_tokens]
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
