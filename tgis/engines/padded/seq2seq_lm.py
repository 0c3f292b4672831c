"""Encoder-decoder models in padded batches: each input is encoded once, when its sequence joins.

The self-attention cache is that of a decoder-only model whose prompt is the start token. The keys and values of the
encoder's output are in a second cache of the same kind, which changes only when sequences join or leave.

transformers counts one position of the decoder for the whole batch; here each row has its own. A model whose rows
depend on each other, or whose positions cannot be set, is refused at the start.
"""

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.positions import EncoderDecoderPositions
from tgis.engines.lora.layers import lora_of
from tgis.engines.lora.soft_prompts import (
    PromptSpan,
    decoder_prompt,
    encoder_input,
    encoder_prompt,
    model_inputs,
    padded_spans,
)
from tgis.engines.padded.model import (
    MAX_PREFILL_TOKENS,
    TransformersModel,
    left_aligned,
    right_aligned,
    right_aligned_states,
    token_positions,
)
from tgis.engines.sampling.encoder_decoder import EncoderDecoder
from tgis.errors import Unsupported
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs


class Seq2SeqLM(EncoderDecoder, TransformersModel):
    """An encoder, a decoder, and the decoder's two KV caches."""

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        TransformersModel.__init__(self, options, device)
        _check_row_independence(self.model)
        self._positions = EncoderDecoderPositions(self.model, options.max_sequence_length, "decoder")
        self._positions.install(self.model)
        EncoderDecoder.__init__(self, self.model.generation_config, self.info.vocab_size, device)
        self._encoder_embed_tokens = self.model.get_encoder().get_input_embeddings()
        self._decoder_embed_tokens = self.model.get_decoder().get_input_embeddings()
        self.info = msgspec.structs.replace(
            self.info,
            max_positions=self._positions.length,
            decoder_start_token_id=self.decoder_start_token_id,
            embedding_size=self._encoder_embed_tokens.embedding_dim,
        )
        self.clear()

    def clear(self) -> None:
        super().clear()
        self._self_attention_cache, self._cross_attention_cache = self._caches
        self._past_key_values = EncoderDecoderCache(*(cache.past_key_values for cache in self._caches))

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode the start tokens and any earlier outputs."""
        first_row = len(self._self_attention_cache.seq_lens) - len(seqs)
        encoded = self._encode(seqs)
        self._cross_attention_cache.view(first_row, 0, encoded.shape[1])
        self._past_key_values.is_updated.clear()  # so that the first pass fills the cross-attention cache
        outputs = [self.decoder_input(seq) for seq in seqs]
        prompts = [decoder_prompt(seq) for seq in seqs]
        lengths = [len(output) for output in outputs]
        width = max(lengths)
        ids = right_aligned(outputs)
        chunk_size = max(1, MAX_PREFILL_TOKENS["cpu"] // len(seqs))  # small, because every token gets logits
        for start in range(0, width, chunk_size):
            stop = min(start + chunk_size, width)
            self._self_attention_cache.view(first_row, start, stop)
            chunk, spans = ids[:, start:stop].to(self._device), padded_spans(prompts, lengths, start, stop)
            logits = self._forward(model_inputs(self._decoder_embed_tokens, chunk, spans), first_row, stop, encoded)
        return self.prefilled(seqs, logits[:, -1])

    def decode(self, last_tokens: Tensor) -> Tensor:
        self._self_attention_cache.view_decode()
        self._cross_attention_cache.read_all()
        shape = (len(last_tokens), self._cross_attention_cache.width, 1)
        unread = torch.zeros((1, 1, 1), dtype=self.model.dtype, device=self._device).expand(shape)
        inputs = {"input_ids": last_tokens[:, None]}
        logits = self._forward(inputs, 0, self._self_attention_cache.width, unread)[:, -1]
        self.constrain(logits, [])
        return logits

    def _encode(self, seqs: list[Sequence]) -> Tensor:
        """The encoder's output, [rows, columns, H], right-aligned, though the encoder's input is left-aligned."""
        # Sequences given as ids, which M2M100 needs for its positions.
        plain = [seq for seq in seqs if encoder_prompt(seq) is None]
        prompted = [seq for seq in seqs if encoder_prompt(seq) is not None]
        states = {seq.id: state for group in (plain, prompted) if group for seq, state in self._encode_batch(group)}
        return right_aligned_states([states[seq.id] for seq in seqs])

    def _encode_batch(self, seqs: list[Sequence]) -> Iterator[tuple[Sequence, Tensor]]:
        """The output for each sequence, [columns, H]."""
        tokens = [encoder_input(seq) for seq in seqs]
        ids, mask = (tensor.to(self._device) for tensor in left_aligned(tokens))
        spans = [
            PromptSpan(row, 0, prompt) for row, seq in enumerate(seqs) if (prompt := encoder_prompt(seq)) is not None
        ]
        inputs = model_inputs(self._encoder_embed_tokens, ids, spans)
        with self.lora.applied([lora_of(seq) for seq in seqs]):
            states = self.model.get_encoder()(**inputs, attention_mask=mask).last_hidden_state
        return ((seq, state[: len(ids)]) for seq, state, ids in zip(seqs, states, tokens, strict=True))

    def _forward(self, inputs: dict[str, Tensor], first_row: int, width: int, encoded: Tensor) -> Tensor:
        """The logits of one pass of the decoder for the rows from `first_row` on, `inputs` [rows, columns, ...] in the
        last of `width` columns.
        """
        mask = self._self_attention_cache.attention_mask(first_row, width)
        positions = token_positions(mask, *inputs.values()).to(self._device)
        arguments = self._positions.arguments("decoder", positions) | {"decoder_attention_mask": mask.to(self._device)}
        output = self.model(
            attention_mask=self._cross_attention_cache.attention_mask(first_row, encoded.shape[1]).to(self._device),
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            **{f"decoder_{name}": value for name, value in inputs.items()},
            **arguments,
            past_key_values=self._past_key_values,
            use_cache=True,
        )
        return output.logits


def _check_row_independence(model: PreTrainedModel) -> None:
    """Raise Unsupported if rows depend on each other, by experts of limited capacity or a decoder that sees padding.

    LED and FSMT, for example, ignore the mask when they decode a single token.
    """
    if getattr(model.config, "num_experts", 0):
        raise _unsupported(model, "shares experts among rows")
    ids = torch.arange(4, 7, device=model.device).expand(2, -1)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]], device=model.device)
    past = model(input_ids=ids, decoder_input_ids=ids[:, :2], use_cache=True).past_key_values
    output = model(
        input_ids=ids, decoder_input_ids=ids[:, 2:], decoder_attention_mask=mask, past_key_values=past, use_cache=True
    )
    if torch.allclose(output.logits[0], output.logits[1], rtol=1e-3):
        raise _unsupported(model, "sees padding")


def _unsupported(model: PreTrainedModel, reason: str) -> Unsupported:
    return Unsupported(f"models of type {model.config.model_type} are not supported: their decoder {reason}")
