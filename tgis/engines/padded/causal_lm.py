"""Decoder-only models in padded batches: prompts in pieces of bounded size, then one token for every row."""

import torch

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import load_causal_lm, model_info
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import decoder_prompt, embed_with_prompts, padded_spans
from tgis.engines.padded.attention import use_gqa_attention
from tgis.engines.padded.kv_cache import KvCacheCost, PaddedCache
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, chunked_prefill, wanting_prompt_logprobs
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs


class CausalLM:
    """A `PaddedModel`: a decoder, and the keys and values of its rows."""

    def __init__(self, options: EngineOptions, device: torch.device, max_batch_size: int) -> None:
        self.model, self._signature = load_causal_lm(options, device)
        if device.type == "cpu":
            use_gqa_attention(self.model)
        self.info = model_info(self.model)
        self.max_positions = options.max_sequence_length
        self.lora = LoraLayers(self.model)
        self._embed_tokens = self.model.get_input_embeddings()
        self.embedding_size = self._embed_tokens.embedding_dim if self._signature.inputs_embeds else 0
        self._device = device
        self._max_batch_size = max_batch_size
        self._cache = PaddedCache(max_batch_size)

    @property
    def kv_cache_cost(self) -> KvCacheCost:
        """Of all layers."""
        return self._cache.cost

    @property
    def kv_cache_bytes(self) -> int:
        """Of all layers."""
        return self._cache.allocated_bytes

    def token_history(self, row: Sequence) -> list[int]:
        """Input and generated tokens, without the virtual ones."""
        return row.tokens[row.request.soft_prompt_length :]

    def clear(self) -> None:
        """Start again with an empty cache."""
        self._cache = PaddedCache(self._max_batch_size)

    def remove(self, index: int) -> None:
        """Forget a row."""
        self._cache.remove(index)

    def append(self, rows: list[Sequence]) -> None:
        """Make room for the keys and values of new rows."""
        self._cache.append([row.num_uncomputed_tokens for row in rows])

    def prefill(self, rows: list[Sequence]) -> tuple[torch.Tensor, dict[int, list[TokenLogprobs]]]:
        """Compute prompts in pieces of bounded size: the logits after each row's last token, facts of input tokens."""
        first = len(self._cache.seq_lens) - len(rows)
        lengths = [row.num_uncomputed_tokens for row in rows]
        prompts = [decoder_prompt(row) for row in rows]
        width = max(lengths)
        ids = torch.tensor(
            [[0] * (width - row.num_uncomputed_tokens) + row.tokens[row.num_computed_tokens :] for row in rows]
        )
        keep, sort = (0, "cpu") if wanting_prompt_logprobs(rows) else (1, self._device.type)

        def forward(start: int, stop: int) -> torch.Tensor:
            self._cache.view_prefill(first, start, stop)
            columns = ids[:, start:stop].to(self._device)
            inserted = embed_with_prompts(self._embed_tokens, columns, padded_spans(prompts, lengths, start, stop))
            return self._forward(columns, first, stop, keep, inserted)

        return chunked_prefill(rows, max(1, MAX_PREFILL_TOKENS[sort] // len(rows)), forward)

    def decode(self, last_tokens: torch.Tensor) -> torch.Tensor:
        """One more token of every row."""
        self._cache.view_decode()
        return self._forward(last_tokens[:, None], first_row=0, width=self._cache.width, logits_to_keep=1)[:, -1]

    def _forward(
        self,
        ids: torch.Tensor,
        first_row: int,
        width: int,
        logits_to_keep: int,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass for the rows from `first` on: ids [rows, columns], the newest of `width` columns; logits.

        Where there are soft prompts, `inserted` [rows, columns, H] stands for the ids.
        """
        mask = self._cache.attention_mask(first_row, width)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"position_ids": positions.to(self._device)} if self._signature.position_ids else {}
        if self._signature.logits_to_keep:
            arguments["logits_to_keep"] = logits_to_keep
        output = self.model(
            **({"input_ids": ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}),
            attention_mask=mask.to(self._device),
            past_key_values=self._cache.past_key_values,
            use_cache=True,
            **arguments,
        )
        return output.logits
