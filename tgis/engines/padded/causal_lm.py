"""Decoder-only models in padded batches: chunked prefill, then one token for every sequence."""

from inspect import signature

import msgspec
import torch
from torch import Tensor

from tgis.batcher.sequence import Sequence
from tgis.engines.base import warn
from tgis.engines.kernels.agreement import agrees, dtype_of_logits
from tgis.engines.loading.loader import NO_TABLE, input_vocab_size, max_positions
from tgis.engines.lora.soft_prompts import decoder_prompt, model_inputs, padded_spans
from tgis.engines.padded.model import (
    MAX_LOGPROB_TOKENS,
    TransformersModel,
    chunked_prefill,
    right_aligned,
    token_positions,
)
from tgis.errors import Unsupported
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import Request, TokenLogprobs

_CHECKED_TOKENS = 40


class CausalLM(TransformersModel):
    """A decoder, and the KV cache of its sequences."""

    chunked_prefill = True

    def __init__(self, options: EngineOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._arguments = frozenset(signature(self.model.forward).parameters)
        self._embed_tokens = self.model.get_input_embeddings()
        self.info = msgspec.structs.replace(
            self.info,
            max_positions=min(options.max_sequence_length, max_positions(self.model)),
            embedding_size=self._embed_tokens.embedding_dim if "inputs_embeds" in self._arguments else 0,
        )
        self.max_logprob_tokens = min(MAX_LOGPROB_TOKENS, self.info.max_prefill_tokens)
        self._check_padding(options)

    def _check_padding(self, options: EngineOptions) -> None:
        """Serve one sequence at a time, and let the model count its positions, where it would count padding, like the
        decoders of BART's family. Unsupported if a sequence alone does not get the model's own logits.
        """
        has_table = max_positions(self.model) < NO_TABLE  # errors may be as small as rounding in half precision
        if (has_table and "position_ids" not in self._arguments) or not self._is_right(padding=True):
            warn(options, f"MAX_BATCH_SIZE is 1: positions of {type(self.model).__name__} count padding")
            self.info = msgspec.structs.replace(self.info, max_batch_size=1)
            self._arguments = self._arguments - {"position_ids"}
            if not self._is_right(padding=False):
                raise Unsupported(f"a KV cache does not give the logits of {type(self.model).__name__}")
        self.clear()

    def _is_right(self, *, padding: bool) -> bool:
        """Whether a prompt and a token after it get the model's own logits, in a batch with `padding` or alone."""
        self.clear()
        width = min(_CHECKED_TOKENS, self.info.max_positions - 1)
        pad_token, generator = self.model.config.pad_token_id, torch.Generator().manual_seed(0)
        tokens = torch.randint(input_vocab_size(self.model), (width + 1,), generator=generator)
        tokens = tokens.where(tokens != (pad_token or 0), int(not pad_token))
        prompts = [tokens[:width], tokens[: width // 2 + 1]] if padding else [tokens[:width]]
        seqs = [Sequence(Request(-1, prompt.tolist(), 2), arrival_time=0.0) for prompt in prompts]
        self.append(seqs)
        last = tokens[[len(prompt) for prompt in prompts]].to(self._device)
        computed = torch.stack([self.prefill(seqs)[0][-1], self.decode(last)[-1]])
        ids = tokens[None, : len(prompts[-1]) + 1].to(self._device)
        own = self.model(input_ids=ids, use_cache=False).logits[0, -2:]
        return agrees(computed, own, dtype_of_logits(self.model), logits=True)

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
