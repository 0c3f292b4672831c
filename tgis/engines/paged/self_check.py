"""A check at load that paged attention can replace a model's own: both must give the same logits."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.paged.attention import PagedAttention
from tgis.engines.paged.kv_cache import PagedKVCache
from tgis.errors import Unsupported
from tgis.ipc.request import LogprobOptions, Request

_NUM_TOKENS = 40
_CHUNKS = (17, _NUM_TOKENS - 18, 1)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; half precision is coarser
ComputeLogits = Callable[[StepPlan], tuple[Tensor, dict[int, slice]]]  # and the slices for prompt logprobs, by id
_WINDOW_LAYER_TYPES = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}


def verify_attention(
    model: PreTrainedModel, attention: PagedAttention, compute_logits: ComputeLogits, max_sequence_length: int
) -> None:
    """Replace the model's attention, for good. Unsupported unless its logits stay the same, for a prompt in chunks and
    a decode. Leaves a KV cache of the few tokens of this check.
    """
    vocab_size = model.get_output_embeddings().out_features
    tokens = torch.randint(vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0].double()
    model.set_attn_implementation(attention.name)
    logits = _paged_logits(tokens, attention, compute_logits)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(attention.cache) != num_layers:
        raise Unsupported(f"{len(attention.cache)} of {num_layers} layers use replaceable attention")
    difference = ((logits.double() - expected).norm() / expected.norm()).item()
    if not difference <= _TOLERANCE.get(model.dtype, 0.03):
        raise Unsupported(f"paged attention does not give the model's own logits (off by {difference:.1e})")
    _verify_windows(model, attention, max_sequence_length)


def dummy_sequence(tokens: list[int], block_size: int, *, prompt_logprobs: bool = False) -> Sequence:
    """A sequence of no request, in the first blocks."""
    options = LogprobOptions(input_tokens=prompt_logprobs)
    seq = Sequence(Request(-1, tokens, 2, logprob_options=options), arrival_time=0.0)
    seq.block_table = list(range(-(-len(tokens) // block_size)))
    return seq


def _paged_logits(tokens: list[int], attention: PagedAttention, compute_logits: ComputeLogits) -> Tensor:
    block_size = attention.cache.block_size
    seq = dummy_sequence(tokens, block_size, prompt_logprobs=True)
    attention.cache = PagedKVCache(len(seq.block_table), block_size)
    logits = []
    for count in _CHUNKS:
        computed, prompt_slices = compute_logits(StepPlan([seq], [count], [], has_prefill=True))
        logits.append(computed[prompt_slices[seq.id]])
        seq.num_computed_tokens += count
    return torch.cat(logits)


def _verify_windows(model: PreTrainedModel, attention: PagedAttention, max_sequence_length: int) -> None:
    """A short prompt does not reveal that a layer sees only the last of many tokens: it must pass its window."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or _WINDOW_LAYER_TYPES.values()
    for name, layer_type in _WINDOW_LAYER_TYPES.items():
        window = getattr(config, name, None)
        is_local = window is not None and window < max_sequence_length and layer_type in layer_types
        if is_local and window not in attention.windows:
            raise Unsupported(f"layers with {name} {window} do not pass it to their attention function")
