"""Test cases of attention kernels on CPUs, on GPUs and interpreted: decodes, and chunks of prompts."""

from dataclasses import dataclass
from typing import Any

import torch
from attention_oracle import random_bias, reference_attention
from chunk_batches import ChunkedBatch, chunk_batch
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams


@dataclass(frozen=True)
class Case:
    rows: list[Any]  # lengths of the sequences of decodes; cached tokens and new ones of chunks
    heads: int = 4
    kv_heads: int = 2
    k_size: int = 16
    v_size: int | None = None  # None: as wide as keys
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    block: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: str | None = None  # "distance" or "key"
    causal: bool = True
    num_sms: int = 2  # the more, the more splits of a sequence

    def params(self, longest: int, device: str) -> AttentionParams:
        """For sequences of at most that many tokens."""
        sinks = torch.randn(self.heads, generator=torch.Generator().manual_seed(1)).to(device, self.dtype)
        by_distance = self.bias == "distance"
        bias = random_bias(self.heads, longest, by_distance=by_distance, causal=self.causal) if self.bias else {}
        bias |= {"bias": bias["bias"].to(device)} if bias else {}
        rules = self.window, self.softcap, sinks if self.sinks else None
        return AttentionParams(2 * self.k_size**-0.5, *rules, **bias, causal=self.causal)


DECODES = {
    "one token": Case([1]),
    "of every length around a block and a tile": Case([15, 16, 17, 127, 128, 129]),
    "empty sequences": Case([0, 33, 0, 200, 0], sinks=True),
    "only empty sequences": Case([0, 0]),
    "one sequence in many splits": Case([2300], num_sms=12),
    "a long sequence among short ones": Case([3, 900, 5, 1, 40], num_sms=3),
    "many sequences": Case([5] * 21, heads=1, kv_heads=1),
    "one KV head for all, in parts": Case([70, 9], heads=35, kv_heads=1),
    "a KV head for each": Case([70, 9], heads=3, kv_heads=3, k_size=80),
    "window, in splits": Case([1000, 41, 40, 39, 1], window=700, num_sms=5),
    "window of one token": Case([100, 1], window=1),
    "soft cap, in splits": Case([600, 20], softcap=3.0, num_sms=4),
    "sinks, in splits": Case([600, 20], sinks=True, num_sms=4),
    "bias by distance": Case([129, 20, 0], bias="distance", num_sms=1),
    "bias by key, in splits": Case([600, 20, 1], heads=6, bias="key", num_sms=4),
    "all at once": Case([600, 20, 0], softcap=3.0, sinks=True, window=500, bias="distance", num_sms=4),
    "head size 96, int32, float16": Case([70, 17], k_size=96, dtype=torch.float16, index=torch.int32),
    "keys wider than values": Case([70], k_size=192, v_size=128),
    "values wider than keys": Case([70], k_size=24, v_size=72),
    "head size 256": Case([100], k_size=256),
    "blocks of one token": Case([200, 7], block=1),
}
BFLOAT16_DECODES = {  # Triton cannot interpret bfloat16
    "Llama": Case([600, 20, 0, 511, 1], 32, 8, 128, 128, torch.bfloat16, torch.int32, num_sms=132),
    "Llama, many rows": Case([50] * 300, 32, 8, 128, 128, torch.bfloat16, num_sms=132),
    "Gemma": Case([600, 20], 8, 4, 256, 256, torch.bfloat16, window=300, softcap=50.0, num_sms=132),
    "StarCoder": Case([600, 20], 48, 1, 128, 128, torch.bfloat16, num_sms=132),
    "Falcon": Case([600, 20], 71, 1, 64, 64, torch.bfloat16, num_sms=132),
    "GPT-OSS": Case([600, 20], 64, 8, 64, 64, torch.bfloat16, window=128, sinks=True, num_sms=132),
    "Phi": Case([600, 20], 32, 32, 80, 80, torch.bfloat16, num_sms=132),
    "BLOOM": Case([600, 20], 32, 32, 128, 128, torch.bfloat16, bias="key", num_sms=132),
}
NEW, MIXED = [(0, 40), (0, 2), (0, 16), (0, 17)], [(7, 30), (0, 5), (16, 2), (300, 33), (31, 170)]
CHUNKS = {
    "prompts": Case(NEW),
    "chunks with context": Case(MIXED),
    "soft cap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, sinks=True),
    "window": Case(MIXED, window=20),
    "window of one token": Case(MIXED, window=1),
    "a window that is longer than the tiles": Case([(200, 300)], window=150, sinks=True),
    "a window that is longer than a span": Case([(1000, 33), (509, 7)], window=600),
    "bias by distance": Case(MIXED, bias="distance"),
    "bias by key": Case(MIXED, bias="key"),
    "all at once": Case(MIXED, softcap=2.0, sinks=True, window=50, bias="distance"),
    "not causal": Case(MIXED, causal=False),
    "not causal, bias by distance": Case(MIXED, bias="distance", causal=False),
    "not causal, all at once": Case(MIXED, softcap=2.0, sinks=True, bias="key", causal=False),
    "a head for each KV head, of 80": Case(MIXED, heads=2, k_size=80, softcap=2.0),
    "one KV head, of 256": Case([(20, 50)], kv_heads=1, k_size=256, softcap=2.0),
    "keys wider than values": Case(MIXED, k_size=24, v_size=16),
    "float16": Case(MIXED, k_size=64, dtype=torch.float16, softcap=2.0, sinks=True),
}
BFLOAT16_CHUNKS = {
    "Gemma": Case([(100, 600), (0, 20)], 8, 4, 256, dtype=torch.bfloat16, window=300, softcap=50.0),
    "GPT-OSS": Case([(100, 600), (0, 20)], 64, 8, 64, dtype=torch.bfloat16, window=128, sinks=True),
    "BLOOM": Case([(100, 600), (0, 20)], 32, 32, 128, dtype=torch.bfloat16, bias="key"),
    "T5": Case([(0, 600), (0, 20)], 12, 12, 64, dtype=torch.bfloat16, bias="distance", causal=False),
    "DeepSeek": Case([(100, 600), (0, 20)], 16, 16, 192, 128, dtype=torch.bfloat16),
}


def decode_inputs(case: Case, device: str) -> tuple[list[Tensor], AttentionParams]:
    """The tensors and parameters of `paged_decode`; what no sequence may read is NaN, or outside of the cache."""
    generator = torch.Generator().manual_seed(0)
    widths = [-(-length // case.block) for length in case.rows]
    blocks = torch.randperm(sum(widths) + 2, generator=generator)[: sum(widths)].split(widths)
    tables = torch.full((len(widths), max(widths) + 3), 2**30, dtype=case.index)
    shape = sum(widths) + 2, case.block, case.kv_heads
    layer = [torch.full((*shape, size), float("nan")) for size in (case.k_size, case.v_size or case.k_size)]
    for row, (length, numbers) in enumerate(zip(case.rows, blocks, strict=True)):
        tables[row, : len(numbers)] = numbers
        places = torch.arange(length - min(length, case.window or length), length)
        for states in layer:
            new = torch.randn(len(places), *states.shape[2:], generator=generator)
            states[numbers[places // case.block], places % case.block] = new
    q = torch.randn(case.heads, len(widths), case.k_size, generator=generator).transpose(0, 1)
    lengths = torch.tensor(case.rows, dtype=case.index)
    tensors = [*(t.to(device, case.dtype) for t in (q, *layer)), tables.to(device), lengths.to(device)]
    return tensors, case.params(max(case.rows), device)


def expected_decodes(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, *, params: AttentionParams
) -> Tensor:
    """The oracle's [B, H, E], in float64."""
    output = torch.zeros(*q.shape[:2], values.shape[-1], dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        if length:
            blocks = tables[row, : -(-length // keys.shape[1])].long()
            k, v = (states[blocks].flatten(0, 1)[:length] for states in (keys, values))
            output[row] = reference_attention(q[row : row + 1], k, v, params)[0]
    return output


def chunk_inputs(case: Case, device: str) -> tuple[ChunkedBatch, AttentionParams]:
    made = chunk_batch(case.rows, case.heads, case.kv_heads, case.k_size, case.dtype, device, case.v_size)
    return made, case.params(max(map(sum, case.rows)), device)


def decode_error(case: Case, device: str) -> float:
    """The largest difference of the Triton kernel from the oracle; NaN if there is one."""
    from tgis.engines.kernels.cuda.paged_decode import paged_decode

    tensors, params = decode_inputs(case, device)
    output = paged_decode(*tensors, params=params, num_sms=case.num_sms)
    return float((output.double() - expected_decodes(*tensors, params=params)).abs().max())


def prefill_error(case: Case, device: str) -> float:
    from tgis.engines.kernels.cuda.paged_prefill import paged_prefill

    made, params = chunk_inputs(case, device)
    output = paged_prefill(*made.prefill_inputs(), params)
    return float((output.double() - made.expected(params)).abs().max())
