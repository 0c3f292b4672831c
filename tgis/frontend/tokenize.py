"""The Tokenize call: token counts, vocabulary strings and byte offsets, without the engine."""

import time
from dataclasses import dataclass

from tgis.frontend.adapters import AdapterClient
from tgis.frontend.calls import TokenizeCall
from tgis.frontend.metrics import Metrics
from tgis.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """One text; the lists are empty unless requested."""

    token_count: int
    tokens: list[str]
    offsets: list[tuple[int, int]]


async def tokenize(
    call: TokenizeCall, tokenizer: Tokenizer, adapters: AdapterClient, metrics: Metrics
) -> list[TokenizeResult]:
    """Tokenize the texts of one call, special tokens included; an adapter must exist, but changes nothing."""
    started = time.monotonic()
    metrics.tokenize_started(len(call.texts))
    async with adapters.acquire(call.adapter):
        encodings = [
            encoding.keep_last(call.truncate_input_tokens)
            for encoding in await tokenizer.encode(call.texts, offsets=call.return_offsets)
        ]
    metrics.tokenize_succeeded(sum(len(encoding.ids) for encoding in encodings), time.monotonic() - started)
    return [
        TokenizeResult(
            token_count=len(encoding.ids),
            tokens=[tokenizer.token_text(token) for token in encoding.ids] if call.return_tokens else [],
            offsets=encoding.offsets,
        )
        for encoding in encodings
    ]
