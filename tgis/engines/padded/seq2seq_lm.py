"""Encoder-decoder models in padded batches: each input is encoded once, when its row joins.

The decoder's cache is that of a decoder-only model whose prompt is the start token. What it computes of the encoder's
output stands in a second cache of the same kind, where only rows that join or leave change anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import EncoderDecoderCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import facts_of, load_seq2seq_lm
from tgis.engines.lora.layers import LoraLayers, lora_of
from tgis.engines.lora.soft_prompts import Span, decoder_prompt, embedded, encoder_prompt, padded_spans
from tgis.engines.padded.attention import use_packed_attention
from tgis.engines.padded.kv_cache import KvCost, PaddedCache
from tgis.engines.padded.model import PREFILL_TOKENS, asking
from tgis.engines.padded.positions import check_rows, find_places
from tgis.engines.sampling.logprobs import first_input_fact
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions, TokenFacts


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What the model's generation config fixes about outputs, whoever asks: those parts of it that are no wishes."""

    start: int  # what the decoder begins with
    first: int | None  # the first token of every output: a target language, say
    never: Tensor  # ids that no output may hold, such as Marian's padding

    @classmethod
    def of(cls, config: GenerationConfig, device: torch.device) -> Self:
        """Those of a model's generation config; StartError unless it says where to start."""
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if not isinstance(start, int):
            raise StartError(f"decoder_start_token_id of an encoder-decoder must be one token, not {start!r:.40}")
        words = [word[0] for word in config.bad_words_ids or [] if len(word) == 1]
        never = torch.tensor([*words, *(config.suppress_tokens or [])], dtype=torch.int64, device=device)
        return cls(start, config.forced_bos_token_id, never)

    def apply(self, logits: Tensor, beginning: list[int]) -> None:
        """Change logits [rows, V] in place; `beginning` are the rows that have no token yet."""
        logits.index_fill_(-1, self.never, -torch.inf)
        if self.first is not None and beginning:
            logits[beginning] = -torch.inf
            logits[beginning, self.first] = 0


class Seq2SeqModel:
    """A `PaddedModel`: an encoder, a decoder, and what the decoder keeps of its rows."""

    def __init__(self, options: EngineOptions, device: torch.device, max_rows: int) -> None:
        self.network = load_seq2seq_lm(options, device)
        if device.type == "cpu":
            use_packed_attention(self.network)
        check_rows(self.network)
        self.facts = facts_of(self.network)
        self._places = find_places(self.network, options.max_sequence_length)
        self._rules = OutputRules.of(self.network.generation_config, device)
        self.lora = LoraLayers(self.network)
        self._device = device
        self._max_rows = max_rows
        self.positions = self._places.most
        self._encoder_table = self.network.get_encoder().get_input_embeddings()
        self._decoder_table = self.network.get_decoder().get_input_embeddings()
        self.embedding_size = self._encoder_table.embedding_dim
        self.clear()

    @property
    def kv_cost(self) -> KvCost:
        """Of both caches: the longest input and the longest output may belong to different rows."""
        return self._encoded.cost + self._decoded.cost

    @property
    def held_bytes(self) -> int:
        """Of both caches."""
        return self._encoded.held_bytes + self._decoded.held_bytes

    def context(self, row: Sequence) -> list[int]:
        """What the decoder has seen: the start token and the output."""
        return [self._rules.start, *row.tokens[row.prompt_length :]]

    def _output(self, row: Sequence) -> list[int]:
        """All that the decoder sees of a row; virtual tokens are 0."""
        virtual = 0 if row.prefix is None else row.prefix.decoder_length
        return [0] * virtual + self.context(row)

    def clear(self) -> None:
        """Start again with empty caches."""
        self._encoded, self._decoded = PaddedCache(self._max_rows), PaddedCache(self._max_rows)
        self._states = EncoderDecoderCache(self._decoded.states, self._encoded.states)

    def leave(self, index: int) -> None:
        """Forget a row."""
        self._encoded.leave(index)
        self._decoded.leave(index)

    def join(self, rows: list[Sequence]) -> None:
        """Make room in both caches."""
        self._encoded.join([len(_input(row)) for row in rows])
        self._decoded.join([len(self._output(row)) for row in rows])

    def prefill(self, rows: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenFacts]]]:
        """Encode the inputs, then decode what there is of outputs: the logits of the next tokens; empty facts."""
        first = len(self._decoded.lengths) - len(rows)
        encoded = self._encode(rows)
        self._encoded.prefill(first, 0, encoded.shape[1])
        self._states.is_updated.clear()  # so that the first pass fills the second cache
        outputs = [self._output(row) for row in rows]
        prompts = [decoder_prompt(row) for row in rows]
        lengths = [len(output) for output in outputs]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(output)) + output for output in outputs])
        piece = max(1, PREFILL_TOKENS["cpu"] // len(rows))  # each of its tokens gets logits
        for start in range(0, width, piece):
            stop = min(start + piece, width)
            self._decoded.prefill(first, start, stop)
            columns = ids[:, start:stop].to(self._device)
            inserted = embedded(self._decoder_table, columns, padded_spans(prompts, lengths, start, stop))
            logits = self._forward(columns, first, stop, encoded, inserted)
        self._rules.apply(logits[:, -1], [index for index, row in enumerate(rows) if not row.generated])
        told = {row.id: [first_input_fact(row.request.details)] * len(_input(row)) for row in asking(rows)}
        return logits[:, -1], told

    def decode(self, newest: Tensor) -> Tensor:
        """One more token of every row."""
        self._decoded.decode()
        self._encoded.show()
        shape = (len(newest), self._encoded.width, 1)
        unread = torch.zeros((1, 1, 1), dtype=self.network.dtype, device=self._device).expand(shape)
        logits = self._forward(newest[:, None], 0, self._decoded.width, unread)[:, -1]
        self._rules.apply(logits, [])
        return logits

    def _encode(self, rows: list[Sequence]) -> Tensor:
        """The encoder's output, [rows, columns, hidden], right-aligned: padding is right of an input only before."""
        bare = [row for row in rows if encoder_prompt(row) is None]  # keep their ids, which M2M100 counts places by
        soft = [row for row in rows if encoder_prompt(row) is not None]
        states = {row.id: state for group in (bare, soft) if group for row, state in self._encode_alike(group)}
        width = max(len(state) for state in states.values())
        return torch.stack([pad(states[row.id], (0, 0, width - len(states[row.id]), 0)) for row in rows])

    def _encode_alike(self, rows: list[Sequence]) -> Iterator[tuple[Sequence, Tensor]]:
        """The output for the input of each row, [columns, hidden]."""
        inputs = [_input(row) for row in rows]
        lengths = torch.tensor([len(some) for some in inputs])
        width = int(lengths.max())
        ids = torch.tensor([some + [0] * (width - len(some)) for some in inputs], device=self._device)
        mask = (torch.arange(width) < lengths[:, None]).to(self._device)
        prompts = enumerate(map(encoder_prompt, rows))
        inserted = embedded(self._encoder_table, ids, (Span(at, 0, one) for at, one in prompts if one is not None))
        given = {"input_ids": ids} if inserted is None else {"inputs_embeds": inserted}
        with self.lora.applied([lora_of(row) for row in rows]):
            states = self.network.get_encoder()(**given, attention_mask=mask).last_hidden_state
        return ((row, state[: len(some)]) for row, state, some in zip(rows, states, inputs, strict=True))

    def _forward(self, ids: Tensor, first: int, width: int, encoded: Tensor, inserted: Tensor | None = None) -> Tensor:
        """One pass of the decoder for the rows from `first` on: ids [rows, columns], the newest of `width`; logits.

        Where there are soft prompts, `inserted` [rows, columns, H] stands for the ids.
        """
        mask = self._decoded.mask(first, width)
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.network(
            attention_mask=self._encoded.mask(first, encoded.shape[1]).to(self._device),
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            **({"decoder_input_ids": ids} if inserted is None else {"decoder_inputs_embeds": inserted}),
            decoder_attention_mask=mask.to(self._device),
            past_key_values=self._states,
            use_cache=True,
            **self._places.arguments(places.to(self._device)),
        )
        return output.logits


def _input(row: Sequence) -> list[int]:
    """What is to be encoded of a row: placeholders of the encoder's part of its soft prompt, then the input."""
    prompt = encoder_prompt(row)
    virtual = 0 if prompt is None else len(prompt)
    return row.tokens[row.request.prefix_length - virtual : row.prompt_length]
