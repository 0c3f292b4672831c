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
from tgis.engines.kernels.cuda.varlen_prefill import fits, make_groups, prefill_attention
from tgis.engines.paged.batch import Chunk, FlatBatch, PagedCache

_GATHERED = 1 << 16  # most tokens, padding included, whose keys and values of a layer are copied side by side


@dataclass(frozen=True, slots=True)
class Rules:
    """How one layer attends."""

    scale: float
    window: int | None = None  # tokens that a token sees, itself included
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: logits that take part in the softmax and add nothing


_Decode = Callable[[FlatBatch, Tensor, tuple[Tensor, Tensor], Rules], Tensor]
_Prefill = Callable[[FlatBatch, Tensor, Tensor, Tensor, tuple[Tensor, Tensor], Rules], list[Tensor]]


class PagedAttention:
    """The attention function of one engine: writes the step's keys and values, then attends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batch: FlatBatch | None = None
        self.cache = PagedCache(0, 1)
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
        rules = Rules(scaling or q.shape[-1] ** -0.5, window, softcap, sinks)
        if kernel := find_kernel(q, *layer):
            kernel.keep(k, v, *layer, batch.slots)
            return _compiled(kernel, batch, q, layer, rules)[None]
        for stored, new in zip(layer, (k, v), strict=True):
            stored.flatten(0, 1).index_copy_(0, batch.slots, new.to(stored.dtype))
        decode, prefill = _bodies(q, layer, rules)
        parts = [decode(batch, q[: batch.singles], layer, rules)] if batch.singles else []
        parts += prefill(batch, q, k, v, layer, rules) if batch.chunks else []
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


def _compiled(kernel: Kernel, batch: FlatBatch, q: Tensor, layer: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
    """All rows at once, on the CPU."""
    if batch.rows is None:
        batch.rows = kernel_rows(batch)
    return kernel.attend(
        q, *layer, batch.rows, scale=rules.scale, window=rules.window, softcap=rules.softcap, sinks=rules.sinks
    )


def _bodies(q: Tensor, layer: tuple[Tensor, Tensor], rules: Rules) -> tuple[_Decode, _Prefill]:
    """For rows with one token each and for chunks: the fastest that the device, the dtypes and the rules allow."""
    if not _is_modern(q.device):
        return _singles, _chunks
    decode = _fast_singles if q.dtype == layer[0].dtype != torch.float64 else _singles
    return decode, _fast_chunks if fits(q, *layer, rules.softcap, rules.sinks) else _chunks


@cache
def _is_modern(device: torch.device) -> bool:
    return bool(device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0))


def _fast_singles(batch: FlatBatch, q: Tensor, layer: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
    """As `_singles`."""
    from tgis.engines.kernels.cuda.paged_decode import decode_attention  # noqa: PLC0415 - Triton comes with torch for CUDA only

    return decode_attention(
        q,
        *layer,
        batch.tables,
        batch.lengths,
        scale=rules.scale,
        window=rules.window,
        softcap=rules.softcap,
        sinks=rules.sinks,
        processors=torch.cuda.get_device_properties(q.device).multi_processor_count,
    )


def _fast_chunks(
    batch: FlatBatch, q: Tensor, k: Tensor, v: Tensor, layer: tuple[Tensor, Tensor], rules: Rules
) -> list[Tensor]:
    """As `_chunks`."""
    if batch.groups is None:
        batch.groups = make_groups(batch.chunks, layer[0].shape[1])
    return prefill_attention(q, k, v, layer, batch.groups, scale=rules.scale, window=rules.window)


def _singles(batch: FlatBatch, q: Tensor, layer: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
    """Rows with one token each, q [B, H, D]: over their blocks, gathered side by side, of some rows at a time."""
    columns = batch.tables.shape[1] * layer[0].shape[1]
    mask = batch.masks.get(rules.window)
    if mask is None:
        places = batch.lengths[:, None] - 1
        mask = batch.masks[rules.window] = _mask(places, columns, rules.window, q.dtype)[:, None]
    some = max(1, _GATHERED // columns)
    parts = [
        _gathered(tables, rows, seen, layer, rules)
        for tables, rows, seen in zip(batch.tables.split(some), q.split(some), mask.split(some), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _gathered(tables: Tensor, q: Tensor, mask: Tensor, layer: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
    k, v = (
        states.index_select(0, tables.flatten()).unflatten(0, tables.shape).flatten(1, 2).transpose(1, 2)
        for states in layer
    )  # [B, K, W, D]
    packed = q.unflatten(1, (k.shape[1], -1))  # [B, K, G, D]
    return _attend(packed, k, v, mask, rules).flatten(1, 2)


def _chunks(
    batch: FlatBatch, q: Tensor, k: Tensor, v: Tensor, layer: tuple[Tensor, Tensor], rules: Rules
) -> list[Tensor]:
    """Rows with several tokens each, one after the other."""
    return [_chunk(chunk, q[chunk.tokens], k[chunk.tokens], v[chunk.tokens], layer, rules) for chunk in batch.chunks]


def _chunk(chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, layer: tuple[Tensor, Tensor], rules: Rules) -> Tensor:
    """One row with several tokens, q [n, H, D]; what is new of it is at hand, what came before is gathered."""
    count = q.shape[0]
    if chunk.before:
        k, v = (states.index_select(0, chunk.blocks).flatten(0, 1)[: chunk.before + count] for states in layer)
    groups = q.shape[1] // k.shape[1]
    packed = q.unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G * n, D]
    mask = chunk.masks.get(rules.window)
    if mask is None:
        places = torch.arange(chunk.before, chunk.before + count, device=q.device)
        mask = chunk.masks[rules.window] = _mask(places, k.shape[0], rules.window, q.dtype).repeat(groups, 1)
    output = _attend(packed[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, rules)[0]
    return output.unflatten(1, (groups, count)).permute(2, 0, 1, 3).flatten(1, 2)


def _mask(places: Tensor, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of `width` tokens for one at each of `places` [..., n]: 0 or -inf [..., n, width]."""
    tokens = torch.arange(width, device=places.device)
    seen = tokens <= places[..., None]
    if window is not None:
        seen &= tokens > places[..., None] - window
    return torch.zeros(seen.shape, dtype=dtype, device=places.device).masked_fill_(~seen, float("-inf"))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rules: Rules) -> Tensor:
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
