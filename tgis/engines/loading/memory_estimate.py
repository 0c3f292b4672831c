"""The memory that a model will need, without its weights: for `tgis serve --check`.

A pass of the model on the meta device shows its KV cache.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tgis.batcher.capacity import check_max_sequence_length
from tgis.engines.kernels.cpu.attention import HEAD_MULTIPLE
from tgis.engines.kernels.kv_codes import SCALE_BYTES, kv_dtype_of
from tgis.engines.loading.loader import DEFAULT_MAX_BATCH_SIZE, has_other_state, look_at_model, select_device
from tgis.engines.memory.available import available_memory, total_memory
from tgis.engines.sharding.plans import num_kv_heads
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes


class UnloadedModel:
    """The model that a start would load; `caches` are empty where the KV cache is unknown."""

    def __init__(self, options: EngineOptions) -> None:
        """StartError if the model is too big, or quantized in groups that ranks cannot share."""
        self._options = options
        self.device = select_device(options)
        self.max_batch_size = options.max_batch_size or DEFAULT_MAX_BATCH_SIZE[self.device.type]
        _, self.config, _, _, (self.model, self.weights) = look_at_model(options, self.device)  # bytes on each device
        self.kv_shards = min(options.num_shards, num_kv_heads(self.config)) if options.num_shards > 1 else 1
        coded = kv_dtype_of(options.kv_cache_dtype, self.device) is not None
        multiple = HEAD_MULTIPLE if self.device.type == "cpu" else 1
        self.caches = _kv_bytes(self.model, multiple, coded=coded)

    def table(
        self, engine: str, room: int, kv_cache: tuple[int, float, int], step: int, others: Mapping[str, int] = {}
    ) -> list[str]:
        """Lines with bytes and what they are for, on each device; `kv_cache`: tokens, the bytes of each, and others;
        `others`: more lines. StartError without `room`, in tokens, for the longest request.
        """
        check_max_sequence_length(room, self._options.max_sequence_length)
        tokens, token_bytes, fixed_bytes = kv_cache
        rows = {
            "weights, as loaded": self.weights,
            **others,
            f"KV cache, full: {tokens} tokens of {format_bytes(token_bytes)}": tokens * token_bytes + fixed_bytes,
            "the largest step beside it, estimated": step,
        }
        memory = f"{format_bytes(available_memory(self.device))} of {format_bytes(total_memory(self.device))} are free"
        rows |= {f"together; {memory}, room for {room} tokens": sum(rows.values())}
        ranks = f", each of {self._options.num_shards} ranks" if self._options.num_shards > 1 else ""
        lines = (f"{format_bytes(size):>10}  {what}" for what, size in rows.items() if size)
        return [f"{engine} on {self.device.type} needs{ranks}:", *lines]


def unknown_memory(engine: str, options: EngineOptions, files: str = "*.safetensors") -> list[str]:
    """The lines for a model whose memory only a start can tell."""
    size = format_bytes(sum(file.stat().st_size for file in Path(options.model_path).glob(files)))
    return [f"{engine} has {size} of weights in files; what its KV cache and steps need is known only at a start."]


def _kv_bytes(model: PreTrainedModel, multiple: int, *, coded: bool) -> list[list[int]]:
    """Bytes of a token's keys and values by layer, for a decoder's cache and for that of cross-attention if there is
    one; empty where a pass on the meta device does not show them. Sizes of heads are rounded up to a multiple; `coded`:
    in 8 bits, with their scales.
    """

    def row(states: torch.Tensor) -> int:  # bytes of one head
        size = int(states.shape[3]) + -int(states.shape[3]) % multiple
        return size + SCALE_BYTES if coded else size * states.itemsize

    encodes = model.config.is_encoder_decoder
    names = ["input_ids"]
    if encodes or not has_other_state(model):  # recurrent layers look for zeros in a mask
        names.append("decoder_input_ids" if encodes else "attention_mask")
    ids = torch.ones(1, 2, dtype=torch.int64, device="meta")
    try:
        model.set_attn_implementation("eager")  # other masks depend on values, as other mixtures of experts do
        model.set_experts_implementation("batched_mm")
        with torch.device("meta"), torch.inference_mode():
            output = model.eval()(**dict.fromkeys(names, ids), use_cache=True)
        cache = output.get("past_key_values", output.get("cache_params"))
        caches = [cache.self_attention_cache, cache.cross_attention_cache] if encodes else [cache]
        layers = [[layer for layer in part.layers if getattr(layer, "keys", None) is not None] for part in caches]
        states = [[(layer.keys, layer.values) for layer in part] for part in layers]
    except (RuntimeError, ValueError, AttributeError):
        return []
    return [[sum(t.shape[1] * row(t) for t in pair) for pair in layers] for layers in states]
