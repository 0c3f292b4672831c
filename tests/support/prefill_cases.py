"""Test cases of prefill attention in Triton, on a GPU or interpreted."""

from dataclasses import dataclass

import torch
from attention_oracle import random_bias
from chunk_batches import ChunkedBatch, chunk_batch

from tgis.engines.kernels.attention_inputs import AttentionParams, make_paged_chunks


@dataclass(frozen=True)
class Case:
    rows: list[tuple[int, int]]  # cached tokens and new ones of each chunk
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    v_size: int | None = None
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: str | None = None  # "distance" or "key"
    causal: bool = True


NEW, MIXED = [(0, 40), (0, 2), (0, 16), (0, 17)], [(7, 30), (0, 5), (16, 2), (300, 33), (31, 170)]
CASES = {
    "prompts": Case(NEW),
    "chunks with context": Case(MIXED),
    "soft cap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, sinks=True),
    "window": Case(MIXED, window=20),
    "window of one token": Case(MIXED, window=1),
    "a window that is longer than the tiles": Case([(200, 300)], window=150, sinks=True),
    "bias by distance": Case(MIXED, bias="distance"),
    "bias by key": Case(MIXED, bias="key"),
    "all at once": Case(MIXED, softcap=2.0, sinks=True, window=50, bias="distance"),
    "not causal": Case(MIXED, causal=False),
    "not causal, bias by distance": Case(MIXED, bias="distance", causal=False),
    "not causal, all at once": Case(MIXED, softcap=2.0, sinks=True, bias="key", causal=False),
    "a head for each KV head, of 80": Case(MIXED, heads=2, size=80, softcap=2.0),
    "one KV head, of 256": Case([(20, 50)], kv_heads=1, size=256, softcap=2.0),
    "keys wider than values": Case(MIXED, size=24, v_size=16),
    "float16": Case(MIXED, size=64, dtype=torch.float16, softcap=2.0, sinks=True),
}
BFLOAT16 = {  # Triton cannot interpret bfloat16
    "Gemma": Case([(100, 600), (0, 20)], 8, 4, 256, dtype=torch.bfloat16, window=300, softcap=50.0),
    "GPT-OSS": Case([(100, 600), (0, 20)], 64, 8, 64, dtype=torch.bfloat16, window=128, sinks=True),
    "BLOOM": Case([(100, 600), (0, 20)], 32, 32, 128, dtype=torch.bfloat16, bias="key"),
    "T5": Case([(0, 600), (0, 20)], 12, 12, 64, dtype=torch.bfloat16, bias="distance", causal=False),
    "DeepSeek": Case([(100, 600), (0, 20)], 16, 16, 192, 128, dtype=torch.bfloat16),
}


def inputs(case: Case, device: str) -> tuple[ChunkedBatch, AttentionParams]:
    made = chunk_batch(case.rows, case.heads, case.kv_heads, case.size, case.dtype, device, case.v_size)
    sinks = torch.randn(case.heads, generator=torch.Generator().manual_seed(1)).to(device, case.dtype)
    longest = max(map(sum, case.rows))
    by_distance = case.bias == "distance"
    bias = random_bias(case.heads, longest, by_distance=by_distance, causal=case.causal) if case.bias else {}
    bias |= {"bias": bias["bias"].to(device)} if bias else {}
    scale, sinks = 2 * case.size**-0.5, sinks if case.sinks else None
    return made, AttentionParams(scale, case.window, case.softcap, sinks, **bias, causal=case.causal)


def error(case: Case, device: str) -> float:
    """The largest difference from the oracle; infinity for NaN."""
    from tgis.engines.kernels.cuda.paged_prefill import paged_prefill

    made, params = inputs(case, device)
    output = paged_prefill(made.q, *made.layer, make_paged_chunks(made.batch.chunks), params)
    difference = (output.double() - made.expected(params)).abs().max().item()
    return float("inf") if difference != difference else difference
