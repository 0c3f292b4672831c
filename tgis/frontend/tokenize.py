"""The Tokenize call: counts, vocabulary strings and byte offsets of texts, without the engine."""

import time
from dataclasses import dataclass

from tgis.frontend.adapters import Adapters
from tgis.frontend.metrics import Metrics
from tgis.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """What a face has read from one RPC."""

    texts: list[str]
    truncate: int  # keep the last so many; 0 keeps all
    tokens: bool
    offsets: bool
    adapter: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One text; the lists are empty unless they were asked for."""

    count: int
    tokens: list[str]
    offsets: list[tuple[int, int]]


async def tokenize(call: TokenizeCall, tokenizer: Tokenizer, adapters: Adapters, metrics: Metrics) -> list[Tokenized]:
    """Tokenize the texts of one call, special tokens included; an adapter must be there, and changes nothing."""
    started = time.monotonic()
    metrics.tokenize_started(len(call.texts))
    async with adapters.resolved(call.adapter):
        encoded = [one.last(call.truncate) for one in await tokenizer.encode(call.texts, offsets=call.offsets)]
    metrics.tokenize_succeeded(sum(len(one.ids) for one in encoded), time.monotonic() - started)
    return [
        Tokenized(
            count=len(one.ids),
            tokens=[tokenizer.token_text(token) for token in one.ids] if call.tokens else [],
            offsets=one.offsets,
        )
        for one in encoded
    ]
