"""Decoder-only models in padded batches: chunked prefill, then one token for every sequence."""

from inspect import signature

import msgspec
import torch
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import max_positions
from tgis.engines.lora.soft_prompts import decoder_prompt, model_inputs, padded_spans
from tgis.engines.padded.model import (
    MAX_LOGPROB_TOKENS,
    TransformersModel,
    chunked_prefill,
    right_aligned,
    token_positions,
)
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs


class CausalLM(TransformersModel):
    """A decoder, and the KV cache of its sequences."""

    chunked_prefill = True

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._arguments = signature(self.model.forward).parameters
        self._embed_tokens = self.model.get_input_embeddings()
        self.info = msgspec.structs.replace(
            self.info,
            max_positions=min(options.max_sequence_length, max_positions(self.model)),
            embedding_size=self._embed_tokens.embedding_dim if "inputs_embeds" in self._arguments else 0,
        )
        self.max_logprob_tokens = min(MAX_LOGPROB_TOKENS, self.info.max_prefill_tokens)
        self.clear()

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        cache, lengths = self._caches[0], [len(seq.tokens) for seq in seqs]
        first_row = len(cache.seq_lens) - len(seqs)
        prompts = [decoder_prompt(seq) for seq in seqs]
        ids = right_aligned([seq.tokens for seq in seqs])
        wanting = any(seq.wants_prompt_logprobs for seq in seqs)
        chunk_tokens = self.max_logprob_tokens if wanting else self.info.max_prefill_tokens

        def forward(start: int, stop: int) -> Tensor:
            cache.view(first_row, start, stop)
            chunk, spans = ids[:, start:stop].to(self._device), padded_spans(prompts, lengths, start, stop)
            return self._forward(model_inputs(self._embed_tokens, chunk, spans), first_row, stop, 0 if wanting else 1)

        return chunked_prefill(seqs, max(1, chunk_tokens // len(seqs)), forward)

    def decode(self, last_tokens: Tensor) -> Tensor:
        self._caches[0].view_decode()
        inputs = {"input_ids": last_tokens[:, None]}
        return self._forward(inputs, first_row=0, width=self._caches[0].width, logits_to_keep=1)[:, -1]

    def _forward(self, inputs: dict[str, Tensor], first_row: int, width: int, logits_to_keep: int) -> Tensor:
        """The logits of one pass for the rows from `first_row` on, `inputs` [rows, columns, ...] in the last of `width`
        columns.
        """
        mask = self._caches[0].attention_mask(first_row, width)
        positions = token_positions(mask, *inputs.values())
        arguments = {"position_ids": positions.to(self._device)} if "position_ids" in self._arguments else {}
        if "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = logits_to_keep
        output = self.model(
            **inputs,
            attention_mask=mask.to(self._device),
            past_key_values=self._caches[0].past_key_values,
            use_cache=True,
            **arguments,
        )
        return output.logits
