"""Attention over the paged KV cache, as the attention function of transformers' own models.

It is registered once per engine and finds the batch of the step in the object that it is a method of, since not
every model passes unknown arguments through. The bodies here are plain PyTorch and run everywhere; the faster ones are
in `cpu_attention` and, for CUDA, in `decode_attention` and `prefill_attention`, and must give the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tgis.engines.kernels.cpu.attention import Kernel, find_kernel, kernel_rows
from tgis.engines.kernels.cuda.varlen_prefill import is_supported, make_varlen_batches, varlen_prefill
from tgis.engines.paged.batch import FlatBatch, PagedKVCache, PrefillChunk

_MAX_GATHERED_TOKENS = (
    1 << 16
)  # most tokens, padding included, whose keys and values of a layer are copied side by side


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How one layer attends."""

    scale: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: logits that take part in the softmax and add nothing


_Decode = Callable[[FlatBatch, Tensor, tuple[Tensor, Tensor], AttentionParams], Tensor]
_Prefill = Callable[[FlatBatch, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], AttentionParams], list[Tensor]]


class PagedAttention:
    """The attention function of one engine: writes the step's keys and values, then attends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch: FlatBatch | None = None
        self.cache = PagedKVCache(0, 1)
        self.windows: set[int | None] = set()  # that layers have named
        self.operator: Callable[..., Tensor] = self.attend  # or one that does the same inside of a compiled graph
        AttentionInterface.register(name, self)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, K, T, D]
        value: Tensor,  # [1, K, T, E]
        _attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_others: Any,
    ) -> tuple[Tensor, None]:
        """The output, [1, T, H, E]; the signature is that of transformers' attention functions."""
        return self.operator(query, key, value, module.layer_idx, scaling, sliding_window, softcap, s_aux), None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: int,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """The same, for the layer of that index."""
        batch = self.batch
        assert batch is not None
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, size]
        layer = self.cache.layer(index, k, v)
        self.windows.add(window)
        rules = AttentionParams(scaling or q.shape[-1] ** -0.5, window, softcap, sinks)
        if kernel := find_kernel(q, *layer):
            kernel.keep(k, v, *layer, batch.slot_mapping)
            return _cpu_kernel_attention(kernel, batch, q, layer, rules)[None]
        for stored, new in zip(layer, (k, v), strict=True):
            stored.flatten(0, 1).index_copy_(0, batch.slot_mapping, new.to(stored.dtype))
        decode, prefill = _select_backends(q, layer, rules)
        parts = [decode(batch, q[: batch.num_decodes], layer, rules)] if batch.num_decodes else []
        parts += prefill(batch, q, k, v, layer, rules) if batch.chunks else []
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _cpu_kernel_attention(
    kernel: Kernel, batch: FlatBatch, q: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams
) -> Tensor:
    """All rows at once, on the CPU."""
    if batch.kernel_rows is None:
        batch.kernel_rows = kernel_rows(batch)
    return kernel.attend(
        q, *layer, batch.kernel_rows, scale=rules.scale, window=rules.window, softcap=rules.softcap, sinks=rules.sinks
    )


def _select_backends(q: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams) -> tuple[_Decode, _Prefill]:
    """For rows with one token each and for chunks: the fastest that the device, the dtypes and the rules allow."""
    if not _has_cuda_kernels(q.device):
        return _torch_decode, _torch_prefill
    decode = _triton_decode if q.dtype == layer[0].dtype != torch.float64 else _torch_decode
    return decode, _varlen_prefill if is_supported(q, *layer, rules.softcap, rules.sinks) else _torch_prefill


@cache
def _has_cuda_kernels(device: torch.device) -> bool:
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def _triton_decode(batch: FlatBatch, q: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams) -> Tensor:
    """As `_singles`."""
    from tgis.engines.kernels.cuda.paged_decode import paged_decode  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return paged_decode(
        q,
        *layer,
        batch.block_tables,
        batch.seq_lens,
        scale=rules.scale,
        window=rules.window,
        softcap=rules.softcap,
        sinks=rules.sinks,
        num_sms=torch.cuda.get_device_properties(q.device).multi_processor_count,
    )


def _varlen_prefill(
    batch: FlatBatch, q: Tensor, k: Tensor, v: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams
) -> list[Tensor]:
    """As `_chunks`."""
    if batch.varlen_batches is None:
        batch.varlen_batches = make_varlen_batches(batch.chunks, layer[0].shape[1])
    return varlen_prefill(q, k, v, layer, batch.varlen_batches, scale=rules.scale, window=rules.window)


def _torch_decode(batch: FlatBatch, q: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams) -> Tensor:
    """Rows with one token each, q [B, H, D]: over their blocks, gathered side by side, of some rows at a time."""
    columns = batch.block_tables.shape[1] * layer[0].shape[1]
    mask = batch.decode_masks.get(rules.window)
    if mask is None:
        places = batch.seq_lens[:, None] - 1
        mask = batch.decode_masks[rules.window] = _causal_mask(places, columns, rules.window, q.dtype)[:, None]
    some = max(1, _MAX_GATHERED_TOKENS // columns)
    parts = [
        _attend_gathered(tables, rows, seen, layer, rules)
        for tables, rows, seen in zip(batch.block_tables.split(some), q.split(some), mask.split(some), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_gathered(
    tables: Tensor, q: Tensor, mask: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams
) -> Tensor:
    k, v = (
        states.index_select(0, tables.flatten()).unflatten(0, tables.shape).flatten(1, 2).transpose(1, 2)
        for states in layer
    )  # [B, K, W, D]
    packed = q.unflatten(1, (k.shape[1], -1))  # [B, K, G, D]
    return _masked_attention(packed, k, v, mask, rules).flatten(1, 2)


def _torch_prefill(
    batch: FlatBatch, q: Tensor, k: Tensor, v: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams
) -> list[Tensor]:
    """Rows with several tokens each, one after the other."""
    return [
        _torch_prefill_chunk(chunk, q[chunk.tokens], k[chunk.tokens], v[chunk.tokens], layer, rules)
        for chunk in batch.chunks
    ]


def _torch_prefill_chunk(
    chunk: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, layer: tuple[Tensor, Tensor], rules: AttentionParams
) -> Tensor:
    """One row with several tokens, q [n, H, D]; what is new of it is at hand, what came before is gathered."""
    count = q.shape[0]
    if chunk.num_computed_tokens:
        k, v = (
            states.index_select(0, chunk.block_table).flatten(0, 1)[: chunk.num_computed_tokens + count]
            for states in layer
        )
    groups = q.shape[1] // k.shape[1]
    packed = q.unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G * n, D]
    mask = chunk.masks.get(rules.window)
    if mask is None:
        places = torch.arange(chunk.num_computed_tokens, chunk.num_computed_tokens + count, device=q.device)
        mask = chunk.masks[rules.window] = _causal_mask(places, k.shape[0], rules.window, q.dtype).repeat(groups, 1)
    output = _masked_attention(packed[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, rules)[0]
    return output.unflatten(1, (groups, count)).permute(2, 0, 1, 3).flatten(1, 2)


def _causal_mask(places: Tensor, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of `width` tokens for one at each of `places` [..., n]: 0 or -inf [..., n, width]."""
    tokens = torch.arange(width, device=places.device)
    seen = tokens <= places[..., None]
    if window is not None:
        seen &= tokens > places[..., None] - window
    return torch.zeros(seen.shape, dtype=dtype, device=places.device).masked_fill_(~seen, float("-inf"))


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rules: AttentionParams) -> Tensor:
    """q [B, K, N, D] over k and v [B, K, W, D], mask added to [B, K, N, W]; N is query heads times tokens."""
    if rules.softcap is None and rules.sinks is None:
        return scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=rules.scale)
    scores = (q @ k.transpose(2, 3)).float() * rules.scale
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores + mask
    if rules.sinks is not None:
        sinks = rules.sinks.float().unflatten(0, (k.shape[1], -1))  # [K, G]
        column = sinks.repeat_interleave(q.shape[2] // sinks.shape[1], 1)[None, :, :, None]
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v
