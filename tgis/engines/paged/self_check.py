"""A check at load that paged attention can replace a model's own: both must give the same.

The outputs of each layer's attention for the same queries, keys and values are compared closely. The logits are, too,
in single and double precision; in half precision, or with activations in 8 bits, the rounding of a deep model makes
them differ by several percent, so that they reveal only errors around attention, such as wrong positions.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.kernels.agreement import agrees, dtype_of_logits, relative_error
from tgis.engines.kernels.cuda.self_test import fallback_reason
from tgis.engines.loading.loader import input_vocab_size
from tgis.engines.paged.attention import PagedAttention, PagedKVCache
from tgis.engines.paged.attention_hooks import hooked_modules, install_hooks
from tgis.engines.paged.batch import FlatBatch
from tgis.engines.sharding.collectives import least_of_ranks
from tgis.errors import Unsupported
from tgis.ipc.request import LogprobOptions, Request
from tgis.prompts.lora import LoraAdapter, LoraLayerWeights

_NUM_TOKENS = 40
MIN_POSITIONS = _NUM_TOKENS + 1  # minimum of an encoder-decoder
_PREFILLED_OUTPUT = 17
_CHUNKS = (17, _NUM_TOKENS - 18, 1)
_ADAPTER_RANK, _NUM_ADAPTED_LAYERS = 4, 10
_RECORDED = "tgis_recorded"  # attention function
ComputeLogits = Callable[[StepPlan], tuple[Tensor, dict[int, slice]]]  # and the slices for prompt logprobs, by id
_Result = TypeVar("_Result")
_WINDOW_LAYER_TYPES = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """A call of the model's own attention by a layer: how to repeat it for some of the tokens, and its output."""

    module: nn.Module
    repeat: Callable[[slice], Tensor]
    output: Tensor  # [1, tokens, ...]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def verify_attention(
    model: PreTrainedModel, attention: PagedAttention, compute_logits: ComputeLogits, max_sequence_length: int
) -> None:
    """Replace the model's attention, for good. Unsupported unless layers and logits stay the same, for a prompt in
    chunks and a decode. Leaves a KV cache of the few tokens of this check.
    """
    vocab_size = model.get_output_embeddings().out_features
    tokens = torch.randint(vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    expected, calls = _own_logits(model, tokens, attention)
    model.set_attn_implementation(attention.name)
    block_size = attention.cache.block_size
    install_hooks(model, attention, -(-max(max_sequence_length, _NUM_TOKENS) // block_size) * block_size)
    logits, outputs = _paged_logits(tokens, attention, compute_logits, calls)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    # The layers of hybrids without attention are checked by their logits.
    if len(attention.cache) != num_layers and not attention.states:
        raise Unsupported(f"{len(attention.cache)} of {num_layers} layers use replaceable attention")
    for index, (call, output) in enumerate(zip(calls, outputs, strict=True)):
        failure = f"paged attention does not give the model's own attention in layer {index}"
        _compare(output, call.output, model.dtype, failure)
    _compare_logits(logits, expected, model)
    _verify_windows(model, attention, max_sequence_length)


@torch.inference_mode()  # type: ignore[untyped-decorator]
def verify_encoder_decoder(
    model: PreTrainedModel,
    attention: PagedAttention,
    build: Callable[[StepPlan], tuple[FlatBatch, dict[int, slice]]],
    compute_logits: ComputeLogits,
    start_token: int,
    install: Callable[[], None],
    max_length: int,
) -> None:
    """Let `install` replace the attention of an encoder-decoder, for good. Unsupported unless attention and logits stay
    the same, for a prefill of an input with some of its output, and for decodes. Leaves a KV cache of these tokens.
    """
    draw, padding = torch.Generator().manual_seed(0), model.config.pad_token_id or 0
    tokens = torch.randint(input_vocab_size(model), (_NUM_TOKENS,), generator=draw)
    tokens[1] = padding  # the padding token may have no position
    output = torch.randint(model.get_output_embeddings().out_features, (_NUM_TOKENS,), generator=draw)
    output = output.where(output != padding, int(not padding))  # models need no padding there
    seq = dummy_sequence(tokens.tolist(), attention.cache.block_size, output=output.tolist())
    calls = _record_attention(model, attention)
    own_input, own_output = (ids[None].to(model.device) for ids in (tokens, pad(output, (1, 0), value=start_token)))
    masks = {"attention_mask": torch.ones_like(own_input), "decoder_attention_mask": torch.ones_like(own_output)}
    expected = model(input_ids=own_input, decoder_input_ids=own_output, **masks, use_cache=False).logits[0]
    model.set_attn_implementation(attention.name)
    install()
    attention.cache = PagedKVCache(len(seq.block_table), attention.cache.block_size)
    computed = step_logits(compute_logits, seq, (_NUM_TOKENS + _PREFILLED_OUTPUT, 1, 1))
    if any(window is not None and window < max_length for window in attention.encoder_windows):
        raise Unsupported("layers of the encoder see a window of the input")
    _compare_attention(attention, seq, build, calls, model.dtype)
    _compare_logits(computed, expected[_PREFILLED_OUTPUT : _PREFILLED_OUTPUT + len(computed)], model)
    _verify_windows(model, attention, max_length)


def step_logits(compute_logits: ComputeLogits, seq: Sequence, counts: Iterable[int]) -> Tensor:
    """The logits [steps, V] of the last token of each step of a sequence that computes so many tokens."""
    logits = []
    for count in counts:
        logits.append(compute_logits(StepPlan([seq], [count], [seq], has_prefill=count > 1))[0])
        seq.num_computed_tokens += count
    return torch.cat(logits)


def _compare_attention(
    attention: PagedAttention,
    seq: Sequence,
    build: Callable[[StepPlan], tuple[FlatBatch, dict[int, slice]]],
    calls: list[_AttentionCall],
    dtype: torch.dtype,
) -> None:
    """Unsupported unless each of these calls, repeated in one step of the sequence, gives its output."""
    seq.num_computed_tokens = 0
    batch, _ = build(StepPlan([seq], [len(seq.tokens)], [seq], has_prefill=True))
    assert batch.encoder
    assert batch.encoder.cross
    assert batch.cross
    batch.cross.slot_mapping = batch.encoder.cross.slot_mapping  # the calls have keys and queries
    for index, call in enumerate(calls):
        attention.batch = batch.encoder if call.module in attention.encoder_modules else batch
        failure = f"paged attention does not give the model's own attention in call {index}"
        _compare(call.repeat(slice(None)), call.output, dtype, failure)


def _compare_logits(logits: Tensor, expected: Tensor, model: PreTrainedModel) -> None:
    failure = "paged attention does not give the model's own logits"
    _compare(logits, expected, dtype_of_logits(model), failure, logits=True)


def verify_steps(kind: str, logits: Tensor, eager: Tensor, dtype: torch.dtype) -> None:
    """Raise Unsupported unless the logits of steps that are computed in another way agree with those of eager ones."""
    dtype = torch.float32 if dtype == torch.float64 else dtype  # parts of the models are computed in float32
    _compare(logits, eager, dtype, f"{kind} steps do not give the logits of eager ones", logits=True)


def on_all_ranks(run: Callable[[], _Result]) -> _Result:
    """What a run gives; Unsupported if it fails on this rank or another one. All ranks must call this."""
    results, reason = list[_Result](), "it fails on another rank"
    try:
        results.append(run())
    except Exception as error:  # noqa: BLE001 - the code is the model's
        reason = fallback_reason(error)
    if not least_of_ranks(len(results)):
        raise Unsupported(reason)
    return results[0]


def dummy_sequence(
    tokens: list[int], block_size: int, *, prompt_logprobs: bool = False, output: list[int] | None = None
) -> Sequence:
    """A sequence that belongs to no request. It has the first blocks, one more than its tokens fill, which input and
    output of an encoder-decoder need.
    """
    options = LogprobOptions(input_tokens=prompt_logprobs)
    seq = Sequence(Request(-1, tokens, 2, logprob_options=options), arrival_time=0.0)
    seq.tokens += output or []
    seq.state_slot = 0
    seq.block_table = list(range(-(-len(seq.tokens) // block_size) + 1))
    return seq


def dummy_adapter(targets: dict[str, tuple[int, int]], dtype: torch.dtype, device: torch.device) -> LoraAdapter:
    """A LoRA adapter of some of these layers, which changes logits."""
    generator = torch.Generator().manual_seed(0)

    def matrix(size: int) -> Tensor:
        return torch.randn(_ADAPTER_RANK, size, generator=generator).div_(size**0.5).to(device, dtype)

    some = islice(targets.items(), _NUM_ADAPTED_LAYERS)
    return LoraAdapter(-1, {name: LoraLayerWeights(*map(matrix, sizes)) for name, sizes in some})


def _own_logits(
    model: PreTrainedModel, tokens: list[int], attention: PagedAttention
) -> tuple[Tensor, list[_AttentionCall]]:
    """The logits with the model's own attention, and its calls where `attention` can replace it."""
    calls = _record_attention(model, attention)

    def record_module(module: nn.Module, args: tuple[Any, ...], arguments: dict[str, Any], _: object) -> None:
        """BLOOM adds what follows the hidden states to the output, beside which errors would look small."""
        args = *args[:1], *map(torch.zeros_like, args[1:])

        def repeat(chunk: slice) -> Tensor:
            def part(x: Tensor) -> Tensor:
                return x[:, chunk] if x.dim() > 1 and x.shape[1] == len(tokens) else x

            some, others = tree_map_only(Tensor, part, (args, arguments))
            return module(*some, **others)[0]

        calls.append(_AttentionCall(module, repeat, module.forward(*args, **arguments)[0]))

    hooks = [module.register_forward_hook(record_module, with_kwargs=True) for module in hooked_modules(model)]
    logits = model(input_ids=torch.tensor([tokens], device=model.device), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, calls


def _record_attention(model: PreTrainedModel, attention: PagedAttention) -> list[_AttentionCall]:
    """A list to which the model will add each call of its own attention function; `attention` repeats them."""
    calls: list[_AttentionCall] = []
    implementation = model.config.get_text_config(decoder=True)._attn_implementation

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, Tensor | None]:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        attend = AttentionInterface().get_interface(implementation, eager)
        output, weights = attend(module, query, key, value, attention_mask, **arguments)

        def repeat(chunk: slice) -> Tensor:
            q, k, v = (states[:, :, chunk] for states in (query, key, value))
            params = arguments | getattr(module, "attention_params", {})  # a hook may have been installed since
            return attention(module, q, k, v, None, **params)[0]

        calls.append(_AttentionCall(module, repeat, output))
        return output, weights

    AttentionInterface.register(_RECORDED, record)
    AttentionMaskInterface.register(_RECORDED, AttentionMaskInterface()[implementation])
    model.set_attn_implementation(_RECORDED)
    return calls


def _paged_logits(
    tokens: list[int], attention: PagedAttention, compute_logits: ComputeLogits, calls: list[_AttentionCall]
) -> tuple[Tensor, list[Tensor]]:
    """The logits with paged attention, and what it gives where each of these calls is repeated."""
    block_size = attention.cache.block_size
    seq = dummy_sequence(tokens, block_size, prompt_logprobs=True)
    attention.cache = PagedKVCache(len(seq.block_table), block_size)
    logits: list[Tensor] = []
    outputs: list[list[Tensor]] = [[] for _ in calls]
    for count in _CHUNKS:
        computed, prompt_slices = compute_logits(StepPlan([seq], [count], [], has_prefill=True))
        logits.append(computed[prompt_slices[seq.id]])
        chunk = slice(seq.num_computed_tokens, seq.num_computed_tokens + count)
        if attention.shares_modules:  # a call does not tell its layer
            calls.clear()
            outputs.clear()
        for call, output in zip(calls, outputs, strict=True):  # the batch that was just computed
            output.append(call.repeat(chunk))
        seq.num_computed_tokens += count
    return torch.cat(logits), [torch.cat(output, 1) for output in outputs]


def _compare(computed: Tensor, expected: Tensor, dtype: torch.dtype, failure: str, *, logits: bool = False) -> None:
    if not agrees(computed, expected, dtype, logits=logits):
        raise Unsupported(f"{failure} (off by {relative_error(computed, expected):.1e})")


def _verify_windows(model: PreTrainedModel, attention: PagedAttention, max_sequence_length: int) -> None:
    """A short prompt does not reveal that a layer sees only the last of many tokens: it must pass its window."""
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or _WINDOW_LAYER_TYPES.values()
    for name, layer_type in _WINDOW_LAYER_TYPES.items():
        window = getattr(config, name, None)
        is_local = window is not None and window < max_sequence_length and layer_type in layer_types
        if is_local and window not in attention.windows:
            raise Unsupported(f"layers with {name} {window} do not pass it to their attention function")
