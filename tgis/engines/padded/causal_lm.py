"""Decoder-only models in padded batches: prompts in pieces of bounded size, then one token for every row."""

import torch

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import facts_of, load_causal_lm
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import decoder_prompt, embedded, padded_spans
from tgis.engines.padded.attention import use_packed_attention
from tgis.engines.padded.kv_cache import KvCost, PaddedCache
from tgis.engines.padded.model import PREFILL_TOKENS, asking, in_pieces
from tgis.ipc.messages import EngineOptions, TokenFacts


class CausalModel:
    """A `PaddedModel`: a decoder, and the keys and values of its rows."""

    def __init__(self, options: EngineOptions, device: torch.device, max_rows: int) -> None:
        self.network, self._accepts = load_causal_lm(options, device)
        if device.type == "cpu":
            use_packed_attention(self.network)
        self.facts = facts_of(self.network)
        self.positions = options.max_sequence_length
        self.lora = LoraLayers(self.network)
        self._table = self.network.get_input_embeddings()
        self.embedding_size = self._table.embedding_dim if self._accepts.inputs_embeds else 0
        self._device = device
        self._max_rows = max_rows
        self._cache = PaddedCache(max_rows)

    @property
    def kv_cost(self) -> KvCost:
        """Of all layers."""
        return self._cache.cost

    @property
    def held_bytes(self) -> int:
        """Of all layers."""
        return self._cache.held_bytes

    def context(self, row: Sequence) -> list[int]:
        """Input and generated tokens, without the virtual ones."""
        return row.tokens[row.request.prefix_length :]

    def clear(self) -> None:
        """Start again with an empty cache."""
        self._cache = PaddedCache(self._max_rows)

    def leave(self, index: int) -> None:
        """Forget a row."""
        self._cache.leave(index)

    def join(self, rows: list[Sequence]) -> None:
        """Make room for the keys and values of new rows."""
        self._cache.join([row.pending for row in rows])

    def prefill(self, rows: list[Sequence]) -> tuple[torch.Tensor, dict[int, list[TokenFacts]]]:
        """Compute prompts in pieces of bounded size: the logits after each row's last token, facts of input tokens."""
        first = len(self._cache.lengths) - len(rows)
        lengths = [row.pending for row in rows]
        prompts = [decoder_prompt(row) for row in rows]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - row.pending) + row.tokens[row.computed :] for row in rows])
        keep, sort = (0, "cpu") if asking(rows) else (1, self._device.type)

        def forward(start: int, stop: int) -> torch.Tensor:
            self._cache.prefill(first, start, stop)
            columns = ids[:, start:stop].to(self._device)
            inserted = embedded(self._table, columns, padded_spans(prompts, lengths, start, stop))
            return self._forward(columns, first, stop, keep, inserted)

        return in_pieces(rows, max(1, PREFILL_TOKENS[sort] // len(rows)), forward)

    def decode(self, newest: torch.Tensor) -> torch.Tensor:
        """One more token of every row."""
        self._cache.decode()
        return self._forward(newest[:, None], first=0, width=self._cache.width, keep=1)[:, -1]

    def _forward(
        self, ids: torch.Tensor, first: int, width: int, keep: int, inserted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One pass for the rows from `first` on: ids [rows, columns], the newest of `width` columns; logits.

        Where there are soft prompts, `inserted` [rows, columns, H] stands for the ids.
        """
        mask = self._cache.mask(first, width)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        arguments = {"position_ids": positions.to(self._device)} if self._accepts.position_ids else {}
        if self._accepts.logits_to_keep:
            arguments["logits_to_keep"] = keep
        output = self.network(
            **({"input_ids": ids} if inserted is None else {"inputs_embeds": inserted}),
            attention_mask=mask.to(self._device),
            past_key_values=self._cache.states,
            use_cache=True,
            **arguments,
        )
        return output.logits
