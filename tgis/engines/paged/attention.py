"""The paged KV cache, and attention over it as an attention function of transformers' own models.

The function is an object that is registered once per engine and holds the batch of the step, since not every model
passes unknown arguments on. The backends here are plain PyTorch and run everywhere; those of `tgis.engines.kernels` are
faster and must give the same result.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tgis.engines.host_memory import HugePageBuffer
from tgis.engines.kernels.attention_inputs import AttentionParams, PrefillChunk
from tgis.engines.kernels.cpu.attention import HEAD_MULTIPLE, CpuAttention
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.padding import zero_padded
from tgis.engines.kernels.cuda.self_test import KernelSelfTest, has_kernels
from tgis.engines.kernels.cuda.varlen_prefill import is_supported, make_varlen_batches, varlen_prefill
from tgis.engines.kernels.kv_codes import SCALE_BYTES, channel_scales, dequantize, is_coded, quantize
from tgis.engines.paged.attention_metadata import AttentionMetadata

if TYPE_CHECKING:
    from tgis.engines.paged.batch import FlatBatch
    from tgis.engines.paged.states import RecurrentStates

_MAX_GATHERED_TOKENS = 1 << 16  # keys and values copied at a time, padding included
_GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples modulo 1 are evenly spread, however many there are


_KVCache = tuple[Tensor, Tensor]  # cache of one layer: twice [blocks, block size, K, D], codes [..., D + SCALE_BYTES]
_Backends = tuple[Callable[..., None], Callable[..., Tensor], Callable[..., list[Tensor]]]  # write, decode, prefill


class PagedKVCache:
    """Keys and values by layer: [blocks, block size, heads, head size], allocated when a layer is first seen. The
    batcher decides who owns a block; the order of the numbers in it is that of the kernel that writes it.
    """

    def __init__(self, num_blocks: int, block_size: int, kv_dtype: torch.dtype | None = None) -> None:
        """`kv_dtype`: int8 for codes; None: the dtype of the keys and values."""
        self.block_size, self.kv_dtype = block_size, kv_dtype
        self.num_blocks = num_blocks
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._buffers: list[HugePageBuffer] = []  # on CPUs

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers seen."""
        return sum(int(t[0].nbytes) for layer in self._layers.values() for t in layer)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers seen."""
        return self.bytes_per_block * self.num_blocks

    def clear(self) -> bool:
        """Forget all keys and values to give their memory back; False where that is not possible."""
        for buffer in self._buffers:
            buffer.clear()
        return bool(self._buffers)

    def __getitem__(self, layer_index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has been seen."""
        return self._layers[layer_index]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of any layer, allocated for states like `key` and `value` [1, heads, tokens, head size]."""
        if index not in self._layers:
            self._layers[index] = self._allocate(key), self._allocate(value)
        return self._layers[index]

    def _allocate(self, like: Tensor) -> Tensor:
        dtype, row = (self.kv_dtype, like.shape[3] + SCALE_BYTES) if self.kv_dtype else (like.dtype, like.shape[3])
        size = self.num_blocks, self.block_size, like.shape[1], row
        if like.device.type != "cpu":
            return like.new_zeros(size)  # slots that were never written may be read and masked, and must be finite
        # Keys and values of a layer begin at the same place of a page, and reach the next one together. Layers do not,
        # or one step would wait until the system has given pages for all.
        place = len(self._buffers) // 2 * _GOLDEN_RATIO % 1
        self._buffers.append(HugePageBuffer(math.prod(size) * dtype.itemsize, place))
        return self._buffers[-1].bytes.view(dtype).view(size)


class PagedAttention:
    """The attention function of one engine: writes the keys and values of the step, then attends."""

    def __init__(self, name: str, block_size: int, kernels: CpuKernels | None) -> None:
        self.name = name
        self._cpu_attention = CpuAttention(kernels) if kernels else None
        self._self_test = KernelSelfTest()
        self.runs_cpu_kernel = bool(kernels)  # whether all layers so far have
        self.batch: FlatBatch | None = None
        self.states: RecurrentStates | None = None
        self.shares_modules = False  # whether several layers have called with one module
        self.cache = PagedKVCache(0, block_size)
        self._key_scales: dict[nn.Module, Tensor] = {}  # scales of codes, fixed by the first keys of a module
        self.windows: set[int | None] = set()  # windows of layers that have called
        self.modules: dict[int, nn.Module] = {}  # layers that have called, by index
        # Of an encoder-decoder: the modules of its encoder, whose keys and values are kept for one layer only, and the
        # modules of its decoder that attend to what the encoder gives.
        self.encoder_modules: frozenset[nn.Module] = frozenset()
        self.cross_modules: frozenset[nn.Module] = frozenset()
        self.encoder_cache = PagedKVCache(0, block_size)
        # Windows of encoder layers that have called; all see the complete input.
        self.encoder_windows: set[int | None] = set()
        self.operator: Callable[..., Tensor] = self._attend_in_layer  # replaced by a custom operator for torch.compile
        AttentionInterface.register(name, self)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,  # [1, H, T, D]
        key: Tensor,  # [1, K, T, D]
        value: Tensor,  # [1, K, T, E]
        attention_mask: Tensor | None,  # noqa: ARG002 - some models pass it by keyword
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        bias_table: Tensor | None = None,
        bias_origin: int | None = None,
        **_others: Any,
    ) -> tuple[Tensor, None]:
        """The output [1, T, H, E]; an attention function of transformers."""
        params = scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux, bias_table, bias_origin
        return self.operator(module, query, key, value, *params), None

    def _attend_in_layer(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *params: Any) -> Tensor:
        batch, size = self.batch, value.shape[3]
        assert batch is not None
        if self._cpu_attention and value.dtype in DTYPES:  # zeros add nothing to products
            query, key, value = (zero_padded(states, HEAD_MULTIPLE) for states in (query, key, value))
        if module in self.encoder_modules:
            scale, window, *rest = params
            self.encoder_windows.add(window)
            kv_cache = self.encoder_cache.layer(0, key, value)
            whole = AttentionParams(scale, None, *rest, causal=False)
            return self.attend(batch.attention, query, key, value, kv_cache, whole)[..., :size].contiguous()
        index = self.states.attention_layer_of(module) if self.states else module.layer_idx
        self.shares_modules |= index != module.layer_idx
        kv_cache = self.cache.layer(index, key, value)
        if self.cache.kv_dtype and module not in self._key_scales:
            self._key_scales[module] = channel_scales(key[0])
        self.modules[index] = module
        metadata = batch.cross if module in self.cross_modules else batch.attention
        assert metadata is not None
        scaled = AttentionParams(*params, key_scales=self._key_scales.get(module))
        return self.attend(metadata, query, key, value, kv_cache, scaled)[..., :size].contiguous()

    def attend(
        self,
        metadata: AttentionMetadata,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: _KVCache,
        params: AttentionParams,
    ) -> Tensor:
        """The output [1, T, H, E]; in cross-attention there may be no keys, or no queries."""
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # [T, heads, size]
        key_scales = params.key_scales
        self.windows.add(params.window)
        if self._cpu_attention and q.dtype == k.dtype == v.dtype and self._cpu_attention.supports(q, *kv_cache):
            if len(k):
                self._cpu_attention.write_kv_cache(k, v, *kv_cache, metadata.slot_mapping, key_scales)
            return self._cpu_attention.attend(q, *kv_cache, metadata.cpu_sequences, params)[None]
        self.runs_cpu_kernel = False
        if key_scales is not None:
            factors = key_scales.to(q.dtype)
            q, k = q * factors.repeat_interleave(q.shape[1] // k.shape[1], 0), k / factors
        write, decode, prefill = _select_backends(q, kv_cache, params)
        kind = q.dtype, q.shape[1:], *(states.shape[1:] for states in kv_cache), params.kind
        run = partial(self._self_test.run, kind)
        if len(k):
            run(write, _torch_write, lambda _: _slots(kv_cache, metadata.slot_mapping), metadata, k, v, kv_cache)
        decodes = q[: metadata.num_decodes], kv_cache, params
        outputs = [run(decode, _torch_decode, torch.clone, metadata, *decodes)] if metadata.num_decodes else []
        outputs += (
            run(prefill, _torch_prefill, torch.cat, metadata, q, k, v, kv_cache, params) if metadata.chunks else []
        )
        outputs = outputs or [q.new_empty(0, q.shape[1], v.shape[2])]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _slots(kv_cache: _KVCache, slot_mapping: Tensor) -> Tensor:
    """The contents of the slots, flat."""
    return torch.cat([stored.flatten(0, 1)[slot_mapping].flatten() for stored in kv_cache])


def _select_backends(q: Tensor, kv_cache: _KVCache, params: AttentionParams) -> _Backends:
    """The fastest backends for the device, the dtypes and the parameters."""
    if not has_kernels(q.device) or q.dtype != kv_cache[0].dtype or q.dtype == torch.float64:
        return _TORCH_BACKENDS
    prefill = _varlen_prefill if is_supported(q, *kv_cache, params) else _triton_prefill
    return _triton_write, _triton_decode, prefill


def _triton_write(metadata: AttentionMetadata, k: Tensor, v: Tensor, kv_cache: _KVCache) -> None:
    from tgis.engines.kernels.cuda.kv_cache import write_kv_cache  # noqa: PLC0415 - needs Triton, which CPUs lack

    write_kv_cache(k, v, *kv_cache, metadata.slot_mapping)


def _torch_write(metadata: AttentionMetadata, k: Tensor, v: Tensor, kv_cache: _KVCache) -> None:
    for stored, new in zip(kv_cache, (k, v), strict=True):
        stored.flatten(0, 1).index_copy_(
            0, metadata.slot_mapping, quantize(new) if is_coded(stored) else new.to(stored.dtype)
        )


def _gathered(stored: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of a cache; what codes stand for is of this dtype."""
    gathered = stored.index_select(0, blocks)
    return dequantize(gathered, dtype) if is_coded(stored) else gathered


def _triton_decode(metadata: AttentionMetadata, q: Tensor, kv_cache: _KVCache, params: AttentionParams) -> Tensor:
    from tgis.engines.kernels.cuda.paged_decode import paged_decode  # noqa: PLC0415 - as above

    return paged_decode(
        q,
        *kv_cache,
        metadata.block_tables,
        metadata.seq_lens,
        params=params,
        num_sms=torch.cuda.get_device_properties(q.device).multi_processor_count,
    )


def _varlen_prefill(
    metadata: AttentionMetadata, q: Tensor, k: Tensor, v: Tensor, kv_cache: _KVCache, params: AttentionParams
) -> list[Tensor]:
    if metadata.varlen_batches is None:
        metadata.varlen_batches = make_varlen_batches(metadata.chunks, kv_cache[0].shape[1])
    return varlen_prefill(q, k, v, kv_cache, metadata.varlen_batches, params)


def _triton_prefill(
    metadata: AttentionMetadata, q: Tensor, _k: Tensor, _v: Tensor, kv_cache: _KVCache, params: AttentionParams
) -> list[Tensor]:
    """New keys and values are in the cache already."""
    from tgis.engines.kernels.cuda.paged_prefill import paged_prefill  # noqa: PLC0415 - as above

    most = max(chunk.num_tokens for chunk in metadata.chunks)
    return [paged_prefill(q[metadata.num_decodes :], *kv_cache, metadata.chunk_sequences, most, params)]


def _torch_decode(metadata: AttentionMetadata, q: Tensor, kv_cache: _KVCache, params: AttentionParams) -> Tensor:
    """Attention of sequences with one token each, q [B, H, D], over their gathered blocks, some sequences at a time."""
    block_size, kv_heads = kv_cache[0].shape[1:3]
    width = metadata.block_tables.shape[1] * block_size
    mask = metadata.decode_masks.get(params.mask_key)
    if mask is None:
        positions = metadata.seq_lens[:, None] - 1
        mask = metadata.decode_masks[params.mask_key] = _mask(positions, width, params, q.dtype, kv_heads)
    num_seqs = max(1, _MAX_GATHERED_TOKENS // width)
    outputs = [
        _attend_gathered(tables, queries, own_mask, kv_cache, params)
        for tables, queries, own_mask in zip(
            metadata.block_tables.split(num_seqs), q.split(num_seqs), mask.split(num_seqs), strict=True
        )
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_gathered(
    block_tables: Tensor, q: Tensor, mask: Tensor, kv_cache: _KVCache, params: AttentionParams
) -> Tensor:
    k, v = (
        _gathered(states, block_tables.flatten(), q.dtype)
        .unflatten(0, block_tables.shape)
        .flatten(1, 2)
        .transpose(1, 2)
        for states in kv_cache
    )  # [B, K, W, D]
    packed = q.unflatten(1, (k.shape[1], -1))  # [B, K, G, D]
    return _masked_attention(packed, k, v, mask, params).flatten(1, 2)


def _torch_prefill(
    metadata: AttentionMetadata, q: Tensor, k: Tensor, v: Tensor, kv_cache: _KVCache, params: AttentionParams
) -> list[Tensor]:
    """Attention of the prefill chunks, one after the other."""
    return [
        _torch_prefill_chunk(chunk, q[chunk.tokens], k[chunk.tokens], v[chunk.tokens], kv_cache, params)
        for chunk in metadata.chunks
    ]


def _torch_prefill_chunk(
    chunk: PrefillChunk, q: Tensor, k: Tensor, v: Tensor, kv_cache: _KVCache, params: AttentionParams
) -> Tensor:
    """Attention of q [n, H, D]; keys and values are gathered from the cache if the chunk has context or they are codes,
    so that they do not depend on the chunk.
    """
    if chunk.num_computed_tokens or is_coded(kv_cache[0]):
        k, v = (_gathered(each, chunk.block_table, q.dtype).flatten(0, 1)[: chunk.seq_len] for each in kv_cache)
    groups = q.shape[1] // k.shape[1]
    packed = q.unflatten(1, (-1, groups)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, G * n, D]
    mask = chunk.masks.get(params.mask_key)
    if mask is None:
        positions = torch.arange(chunk.num_computed_tokens, chunk.seq_len, device=q.device)
        mask = _mask(positions, k.shape[0], params, q.dtype, k.shape[1])
        mask = mask[0].repeat(groups, 1) if params.bias is None else mask[None]
        chunk.masks[params.mask_key] = mask
    output = _masked_attention(packed[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask, params)[0]
    return output.unflatten(1, (groups, chunk.num_tokens)).permute(2, 0, 1, 3).flatten(1, 2)


def _mask(positions: Tensor, width: int, params: AttentionParams, dtype: torch.dtype, kv_heads: int) -> Tensor:
    """What to add to the scores of `width` keys for queries at `positions` [..., n]: -inf where a query does not see
    the key, else 0 or the bias. [..., 1, n, width], with a bias [..., K, G * n, width].
    """
    keys, positions = torch.arange(width, device=positions.device), positions[..., None]
    last = positions if params.causal else positions[..., -1:, :]
    visible = (keys <= last).expand(*positions.shape[:-1], width)
    if params.window is not None:
        visible &= keys > positions - params.window
    mask = torch.zeros(visible.shape, dtype=dtype, device=keys.device).masked_fill_(~visible, float("-inf"))
    if params.bias is None:
        return mask.unsqueeze(-3)
    columns = keys.expand(visible.shape) if params.bias_origin is None else keys - positions + params.bias_origin
    bias = params.bias[:, columns.clamp(0, params.bias.shape[1] - 1)].to(dtype)  # [H, ..., n, width]
    return (bias + mask).movedim(0, -3).unflatten(-3, (kv_heads, -1)).flatten(-3, -2)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Attention of q [B, K, N, D] over k and v [B, K, W, D], mask added to [B, K, N, W]; N is query heads times
    tokens.
    """
    if params.softcap is None and params.sinks is None:
        return scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=params.scale)
    scores = (q @ k.transpose(2, 3)).float() * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores + mask
    if params.sinks is not None:
        sinks = params.sinks.float().unflatten(0, (k.shape[1], -1))  # [K, G]
        column = sinks.repeat_interleave(q.shape[2] // sinks.shape[1], 1)[None, :, :, None]
        scores = torch.cat([scores, column.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v


_TORCH_BACKENDS = _torch_write, _torch_decode, _torch_prefill
