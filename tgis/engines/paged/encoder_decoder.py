"""Encoder-decoders in pages.

An input is encoded once, in one pass with others and without padding. The first blocks of its sequence hold the keys
and values of cross-attention, the blocks that follow those of the decoder's self-attention. A step computes the
decoder's tokens as in a decoder-only model; each token is a separate query to the encoded input.
"""

import inspect
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.host_memory import Part, upload
from tgis.engines.kernels.attention_inputs import PrefillChunk
from tgis.engines.loading.positions import EncoderDecoderPositions
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import PromptSpan, encoder_input, encoder_prompt, model_inputs
from tgis.engines.paged.attention import PagedAttention, PagedKVCache
from tgis.engines.paged.attention_hooks import cross_attention_modules, install_hooks
from tgis.engines.paged.attention_metadata import AttentionMetadata
from tgis.engines.paged.batch import BatchBuilder, FlatBatch, Work, adapters_of, slots
from tgis.engines.paged.self_check import MIN_POSITIONS
from tgis.engines.sampling.encoder_decoder import EncoderDecoder
from tgis.errors import Unsupported

_ENCODER_STATES = ("encoder_hidden_states", "key_value_states")  # arguments of their forward
EXTRA_BLOCKS = 1  # input and output of a sequence may each end with a block that is not full


class PagedEncoder:
    """The encoder of a model, and the cross-attention of its decoder."""

    def __init__(self, model: PreTrainedModel, attention: PagedAttention, lora: LoraLayers, max_length: int) -> None:
        """Unsupported if the model attends or counts positions in an unknown way."""
        self._model, self._encoder = model, model.get_encoder()
        self._cross_attention = cross_attention_modules(model)
        vocab_size = model.get_output_embeddings().out_features
        self.outputs = EncoderDecoder(model.generation_config, vocab_size, model.device)
        self._attention, self._lora = attention, lora
        attention.cross_modules = frozenset(self._cross_attention)
        attention.encoder_modules = frozenset(self._encoder.modules())
        self.embed_tokens = self._encoder.get_input_embeddings()
        names = inspect.signature(self._cross_attention[0].forward).parameters
        (self._states_name,) = (name for name in _ENCODER_STATES if name in names)
        self._positions = EncoderDecoderPositions(model, max(max_length, MIN_POSITIONS), "encoder", "decoder")
        length = self._positions.length
        if length < MIN_POSITIONS:
            raise Unsupported(f"{type(model).__name__} has {length} positions, the check needs {MIN_POSITIONS}")
        self.max_positions = min(max_length, length)
        self._no_states = torch.empty((1, 0, self.embed_tokens.embedding_dim), dtype=model.dtype, device=model.device)

    def input_positions(self, seq: Sequence, tokens: list[int]) -> Iterable[int]:
        """The positions of the tokens of a sequence's input; with a soft prompt, padding counts."""
        return range(len(tokens)) if encoder_prompt(seq) is not None else self._positions.input_positions(tokens)

    def install(self) -> None:
        """Make the model attend to pages and use the positions of batches, for good."""
        install_hooks(self._model, self._attention, self._positions.length + 1)
        self._positions.install(self._model)
        head, bias = self._model.get_output_embeddings(), getattr(self._model, "final_logits_bias", None)
        head.register_forward_pre_hook(self._select_logits)
        rows = len(head.weight)  # fewer than the bias has where ranks share the vocabulary
        if bias is not None and rows == bias.shape[1] and head.bias is None and bias.dtype == head.weight.dtype:
            head.bias = nn.Parameter(bias[0], requires_grad=False)
            del self._model.final_logits_bias
            self._model.final_logits_bias = _NothingToAdd()

    def _select_logits(self, _head: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        """Compute only the logits that are sampled: of a requeued output, those of its last token."""
        batch = self._attention.batch
        assert batch is not None
        return args if batch.all_logits else (args[0][:, batch.logits_indices],)

    def encode(self, batch: FlatBatch) -> None:
        """Write the keys and values of the inputs for the decoder."""
        attention = self._attention
        num_blocks = sum(len(chunk.block_table) for chunk in batch.attention.chunks)
        if num_blocks > attention.encoder_cache.num_blocks:
            attention.encoder_cache = PagedKVCache(num_blocks, attention.cache.block_size)
        attention.batch = batch
        arguments = model_inputs(self.embed_tokens, batch.input_ids[None], batch.spans)
        arguments |= self._positions.arguments("encoder", batch.positions[None])
        with self._lora.using(batch.adapters):
            states = self._encoder(**arguments).last_hidden_state
            for module in self._cross_attention:
                module(states[:, :0], attention_mask=None, **{self._states_name: states})

    def decoder_arguments(self, batch: FlatBatch, arguments: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of a pass of the model, from those that its decoder takes as input."""
        arguments = {f"decoder_{name}": value for name, value in arguments.items()}
        arguments |= self._positions.arguments("decoder", batch.positions[None])
        return arguments | {"encoder_outputs": BaseModelOutput(last_hidden_state=self._no_states)}


class _NothingToAdd:
    """Replaces the bias of logits, which their layer has added already at less cost."""

    def to(self, _device: torch.device) -> "_NothingToAdd":
        return self

    def __radd__(self, logits: Tensor) -> Tensor:
        return logits


class EncoderDecoderBatches(BatchBuilder):
    """Builds the batches of decoder, encoder and cross-attention."""

    _has_prompt_logprobs = False

    def __init__(self, block_size: int, device: torch.device, lora: LoraLayers, encoder: PagedEncoder) -> None:
        super().__init__(block_size, device, lora)
        self._model = encoder

    def build(self, plan: StepPlan, *step_metadata: NDArray[np.int64]) -> tuple[FlatBatch, dict[int, slice]]:
        batch, prompt_slices = super().build(plan, *step_metadata)
        new = [seq for seq in plan.seqs if not seq.num_computed_tokens]
        batch.encoder = self._encoder(new) if new else None
        return batch, prompt_slices

    def _positions(self, seq: Sequence, start: int, count: int) -> range:
        return range(self._decoder_length(seq, start), self._decoder_length(seq, start + count))

    def _decoder_length(self, seq: Sequence, num_tokens: int) -> int:
        """The number of decoder positions of the first `num_tokens` tokens: a soft prompt and the start token belong to
        the input.
        """
        return num_tokens - _offset(seq) if num_tokens >= seq.prompt_length else 0

    def _tokens(self, seq: Sequence, positions: range) -> list[int]:
        start, stop = positions.start + _offset(seq), positions.stop + _offset(seq)
        if start >= seq.prompt_length:
            return seq.tokens[start:stop]
        return self._model.outputs.decoder_input(seq)[positions.start : positions.stop]

    def _block_table(self, seq: Sequence) -> list[int]:
        return seq.block_table[self._num_encoder_blocks(seq) :]

    def _num_encoder_blocks(self, seq: Sequence) -> int:
        return -(-seq.request.input_positions // self._block_size)

    def _build(self, work: Work, *arguments: Any) -> FlatBatch:
        batch = super()._build(work, *arguments)
        counts = [self._num_encoder_blocks(seq) for seq, _ in work]
        tables = np.zeros((len(work), max(counts)), np.int64)
        for row, count, (seq, _) in zip(tables, counts, work, strict=True):
            row[:count] = seq.block_table[:count]
        repeats = [len(positions) for _, positions in work]
        lengths = np.repeat([seq.request.input_positions for seq, _ in work], repeats)
        batch.cross = AttentionMetadata.decodes(*upload([tables.repeat(repeats, 0), lengths], self._device))
        return batch

    def _encoder(self, seqs: list[Sequence]) -> FlatBatch:
        """The inputs of these sequences, whose blocks are those of the encoder's cache."""
        size, inputs = self._block_size, [encoder_input(seq) for seq in seqs]
        blocks = [range(*ends) for ends in pairwise([0, *accumulate(map(self._num_encoder_blocks, seqs))])]
        starts = list(accumulate(map(len, inputs), initial=0))
        work: Work = [(seq, range(len(tokens))) for seq, tokens in zip(seqs, inputs, strict=True)]
        parts: list[Part] = [
            [token for tokens in inputs for token in tokens],
            [p for seq, tokens in zip(seqs, inputs, strict=True) for p in self._model.input_positions(seq, tokens)],
            [slot for table, (_, columns) in zip(blocks, work, strict=True) for slot in slots(table, columns, size)],
            [slot for seq, columns in work for slot in slots(seq.block_table, columns, size)],
            self._lora.columns(adapters_of(work)),
            *blocks,
        ]
        ids, positions, encoder_slots, cross_slots, adapters, *tables = upload(parts, self._device)
        prompts = zip(starts, map(encoder_prompt, seqs), strict=False)
        places = [slice(*ends) for ends in pairwise(starts)]
        nothing = ids[:0]
        chunks = [PrefillChunk(place, 0, table) for place, table in zip(places, tables, strict=True)]
        return FlatBatch(
            ids,
            positions,
            AttentionMetadata(encoder_slots, nothing[:, None], nothing, chunks),
            logits_indices=nothing,
            spans=[PromptSpan(0, start, prompt) for start, prompt in prompts if prompt is not None],
            adapters=self._lora.placed(adapters),
            cross=AttentionMetadata(cross_slots, nothing[:, None], nothing, []),
        )


def _offset(seq: Sequence) -> int:
    """A token's index in its sequence less its position in the decoder."""
    return seq.prompt_length - seq.request.decoder_length - 1
