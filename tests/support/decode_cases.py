"""Test cases of decode attention: the GPU kernels, on a GPU or interpreted, and the CPU kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention_oracle import random_bias, reference_attention
from torch import Tensor

from tgis.engines.kernels.attention_inputs import AttentionParams


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    heads: int = 4
    kv_heads: int = 2
    k_size: int = 16
    v_size: int = 16
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64
    block: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: str | None = None  # "distance" or "key"
    num_sms: int = 2  # the more, the more splits of a sequence


CASES = {
    "one token": Case([1]),
    "of every length around a block and a tile": Case([15, 16, 17, 127, 128, 129]),
    "empty sequences": Case([0, 33, 0, 200, 0], sinks=True),
    "only empty sequences": Case([0, 0]),
    "one sequence in many splits": Case([2300], num_sms=12),
    "a long sequence among short ones": Case([3, 900, 5, 1, 40], num_sms=3),
    "many sequences": Case([5] * 21, heads=1, kv_heads=1),
    "one KV head for all, in parts": Case([70, 9], heads=35, kv_heads=1),
    "a KV head for each": Case([70, 9], heads=3, kv_heads=3, k_size=80, v_size=80),
    "window, in splits": Case([1000, 41, 40, 39, 1], window=700, num_sms=5),
    "window of one token": Case([100, 1], window=1),
    "soft cap, in splits": Case([600, 20], softcap=3.0, num_sms=4),
    "sinks, in splits": Case([600, 20], sinks=True, num_sms=4),
    "bias by distance": Case([129, 20, 0], bias="distance", num_sms=1),
    "bias by key, in splits": Case([600, 20, 1], heads=6, bias="key", num_sms=4),
    "all at once": Case([600, 20, 0], softcap=3.0, sinks=True, window=500, bias="distance", num_sms=4),
    "head size 96, int32, float16": Case([70, 17], k_size=96, v_size=96, dtype=torch.float16, index=torch.int32),
    "keys wider than values": Case([70], k_size=192, v_size=128),
    "values wider than keys": Case([70], k_size=24, v_size=72),
    "head size 256": Case([100], k_size=256, v_size=256),
    "blocks of one token": Case([200, 7], block=1),
}
BFLOAT16 = {  # Triton cannot interpret bfloat16
    "Llama": Case([600, 20, 0, 511, 1], 32, 8, 128, 128, torch.bfloat16, torch.int32, num_sms=132),
    "Llama, many rows": Case([50] * 300, 32, 8, 128, 128, torch.bfloat16, num_sms=132),
    "Gemma": Case([600, 20], 8, 4, 256, 256, torch.bfloat16, window=300, softcap=50.0, num_sms=132),
    "StarCoder": Case([600, 20], 48, 1, 128, 128, torch.bfloat16, num_sms=132),
    "Falcon": Case([600, 20], 71, 1, 64, 64, torch.bfloat16, num_sms=132),
    "GPT-OSS": Case([600, 20], 64, 8, 64, 64, torch.bfloat16, window=128, sinks=True, num_sms=132),
    "Phi": Case([600, 20], 32, 32, 80, 80, torch.bfloat16, num_sms=132),
    "BLOOM": Case([600, 20], 32, 32, 128, 128, torch.bfloat16, bias="key", num_sms=132),
}


def inputs(case: Case, device: str) -> tuple[list[Tensor], AttentionParams]:
    """The tensors and parameters of `paged_decode`; what no sequence may read is NaN, or outside of the cache."""
    generator = torch.Generator().manual_seed(0)
    widths = [-(-length // case.block) for length in case.lengths]
    blocks = torch.randperm(sum(widths) + 2, generator=generator)[: sum(widths)].split(widths)
    tables = torch.full((len(widths), max(widths) + 3), 2**30, dtype=case.index)
    layer = [
        torch.full((sum(widths) + 2, case.block, case.kv_heads, size), float("nan"))
        for size in (case.k_size, case.v_size)
    ]
    for row, numbers in enumerate(blocks):
        tables[row, : len(numbers)] = numbers
        length = case.lengths[row]
        for place in range(length - min(length, case.window or length), length):
            for states in layer:
                slot = states[numbers[place // case.block], place % case.block]
                slot.copy_(torch.randn(slot.shape, generator=generator))
    q = torch.randn(case.heads, len(widths), case.k_size, generator=generator).transpose(0, 1)
    sinks = torch.randn(case.heads, generator=generator).to(device, case.dtype) if case.sinks else None
    bias = random_bias(case.heads, max(case.lengths), by_distance=case.bias == "distance") if case.bias else {}
    bias |= {"bias": bias["bias"].to(device)} if bias else {}
    params = AttentionParams(2 * case.k_size**-0.5, case.window, case.softcap, sinks, **bias)
    lengths = torch.tensor(case.lengths, dtype=case.index)
    return [*(t.to(device, case.dtype) for t in (q, *layer)), tables.to(device), lengths.to(device)], params


def expected(
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


def error(case: Case, device: str, attention: Callable[..., Tensor], **arguments: int) -> float:
    """The largest difference from the oracle; infinity for NaN."""
    tensors, params = inputs(case, device)
    output = attention(*tensors, params=params, **arguments)
    difference = (output.double() - expected(*tensors, params=params)).abs().max().item()
    return float("inf") if difference != difference else difference
