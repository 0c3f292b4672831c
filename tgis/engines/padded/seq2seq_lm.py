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
from tgis.engines.loading.loader import load_seq2seq_lm, model_info
from tgis.engines.lora.layers import LoraLayers, lora_of
from tgis.engines.lora.soft_prompts import PromptSpan, decoder_prompt, embed_with_prompts, encoder_prompt, padded_spans
from tgis.engines.padded.attention import use_gqa_attention
from tgis.engines.padded.kv_cache import KvCacheCost, PaddedCache
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, wanting_prompt_logprobs
from tgis.engines.padded.positions import check_row_independence, find_positions
from tgis.engines.sampling.logprobs import first_prompt_logprobs
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """What the model's generation config fixes about outputs, whoever asks: those parts of it that are no wishes."""

    decoder_start_token_id: int  # what the decoder begins with
    forced_bos_token_id: int | None  # the first token of every output: a target language, say
    suppressed_token_ids: Tensor  # ids that no output may hold, such as Marian's padding

    @classmethod
    def from_config(cls, config: GenerationConfig, device: torch.device) -> Self:
        """Those of a model's generation config; StartError unless it says where to start."""
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if not isinstance(start, int):
            raise StartError(f"decoder_start_token_id of an encoder-decoder must be one token, not {start!r:.40}")
        words = [word[0] for word in config.bad_words_ids or [] if len(word) == 1]
        never = torch.tensor([*words, *(config.suppress_tokens or [])], dtype=torch.int64, device=device)
        return cls(start, config.forced_bos_token_id, never)

    def apply(self, logits: Tensor, first_step_rows: list[int]) -> None:
        """Change logits [rows, V] in place; `beginning` are the rows that have no token yet."""
        logits.index_fill_(-1, self.suppressed_token_ids, -torch.inf)
        if self.forced_bos_token_id is not None and first_step_rows:
            logits[first_step_rows] = -torch.inf
            logits[first_step_rows, self.forced_bos_token_id] = 0


class Seq2SeqLM:
    """A `PaddedModel`: an encoder, a decoder, and what the decoder keeps of its rows."""

    def __init__(self, options: EngineOptions, device: torch.device, max_batch_size: int) -> None:
        self.model = load_seq2seq_lm(options, device)
        if device.type == "cpu":
            use_gqa_attention(self.model)
        check_row_independence(self.model)
        self.info = model_info(self.model)
        self._positions = find_positions(self.model, options.max_sequence_length)
        self._constraints = OutputConstraints.from_config(self.model.generation_config, device)
        self.lora = LoraLayers(self.model)
        self._device = device
        self._max_batch_size = max_batch_size
        self.max_positions = self._positions.max_positions
        self._encoder_embed_tokens = self.model.get_encoder().get_input_embeddings()
        self._decoder_embed_tokens = self.model.get_decoder().get_input_embeddings()
        self.embedding_size = self._encoder_embed_tokens.embedding_dim
        self.clear()

    @property
    def kv_cache_cost(self) -> KvCacheCost:
        """Of both caches: the longest input and the longest output may belong to different rows."""
        return self._cross_attention_cache.cost + self._self_attention_cache.cost

    @property
    def kv_cache_bytes(self) -> int:
        """Of both caches."""
        return self._cross_attention_cache.allocated_bytes + self._self_attention_cache.allocated_bytes

    def token_history(self, row: Sequence) -> list[int]:
        """What the decoder has seen: the start token and the output."""
        return [self._constraints.decoder_start_token_id, *row.tokens[row.prompt_length :]]

    def _decoder_input(self, row: Sequence) -> list[int]:
        """All that the decoder sees of a row; virtual tokens are 0."""
        virtual = 0 if row.adapter is None else row.adapter.decoder_length
        return [0] * virtual + self.token_history(row)

    def clear(self) -> None:
        """Start again with empty caches."""
        self._cross_attention_cache, self._self_attention_cache = (
            PaddedCache(self._max_batch_size),
            PaddedCache(self._max_batch_size),
        )
        self._past_key_values = EncoderDecoderCache(
            self._self_attention_cache.past_key_values, self._cross_attention_cache.past_key_values
        )

    def remove(self, index: int) -> None:
        """Forget a row."""
        self._cross_attention_cache.remove(index)
        self._self_attention_cache.remove(index)

    def append(self, rows: list[Sequence]) -> None:
        """Make room in both caches."""
        self._cross_attention_cache.append([len(_encoder_input(row)) for row in rows])
        self._self_attention_cache.append([len(self._decoder_input(row)) for row in rows])

    def prefill(self, rows: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode what there is of outputs: the logits of the next tokens; empty facts."""
        first = len(self._self_attention_cache.seq_lens) - len(rows)
        encoded = self._encode(rows)
        self._cross_attention_cache.view_prefill(first, 0, encoded.shape[1])
        self._past_key_values.is_updated.clear()  # so that the first pass fills the second cache
        outputs = [self._decoder_input(row) for row in rows]
        prompts = [decoder_prompt(row) for row in rows]
        lengths = [len(output) for output in outputs]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(output)) + output for output in outputs])
        piece = max(1, MAX_PREFILL_TOKENS["cpu"] // len(rows))  # each of its tokens gets logits
        for start in range(0, width, piece):
            stop = min(start + piece, width)
            self._self_attention_cache.view_prefill(first, start, stop)
            columns = ids[:, start:stop].to(self._device)
            inserted = embed_with_prompts(
                self._decoder_embed_tokens, columns, padded_spans(prompts, lengths, start, stop)
            )
            logits = self._forward(columns, first, stop, encoded, inserted)
        self._constraints.apply(
            logits[:, -1], [index for index, row in enumerate(rows) if not row.num_generated_tokens]
        )
        told = {
            row.id: [first_prompt_logprobs(row.request.logprob_options)] * len(_encoder_input(row))
            for row in wanting_prompt_logprobs(rows)
        }
        return logits[:, -1], told

    def decode(self, last_tokens: Tensor) -> Tensor:
        """One more token of every row."""
        self._self_attention_cache.view_decode()
        self._cross_attention_cache.view_all()
        shape = (len(last_tokens), self._cross_attention_cache.width, 1)
        unread = torch.zeros((1, 1, 1), dtype=self.model.dtype, device=self._device).expand(shape)
        logits = self._forward(last_tokens[:, None], 0, self._self_attention_cache.width, unread)[:, -1]
        self._constraints.apply(logits, [])
        return logits

    def _encode(self, rows: list[Sequence]) -> Tensor:
        """The encoder's output, [rows, columns, hidden], right-aligned: padding is right of an input only before."""
        bare = [row for row in rows if encoder_prompt(row) is None]  # keep their ids, which M2M100 counts places by
        soft = [row for row in rows if encoder_prompt(row) is not None]
        states = {row.id: state for group in (bare, soft) if group for row, state in self._encode_batch(group)}
        width = max(len(state) for state in states.values())
        return torch.stack([pad(states[row.id], (0, 0, width - len(states[row.id]), 0)) for row in rows])

    def _encode_batch(self, rows: list[Sequence]) -> Iterator[tuple[Sequence, Tensor]]:
        """The output for the input of each row, [columns, hidden]."""
        inputs = [_encoder_input(row) for row in rows]
        lengths = torch.tensor([len(some) for some in inputs])
        width = int(lengths.max())
        ids = torch.tensor([some + [0] * (width - len(some)) for some in inputs], device=self._device)
        mask = (torch.arange(width) < lengths[:, None]).to(self._device)
        prompts = enumerate(map(encoder_prompt, rows))
        inserted = embed_with_prompts(
            self._encoder_embed_tokens, ids, (PromptSpan(at, 0, one) for at, one in prompts if one is not None)
        )
        given = {"input_ids": ids} if inserted is None else {"inputs_embeds": inserted}
        with self.lora.applied([lora_of(row) for row in rows]):
            states = self.model.get_encoder()(**given, attention_mask=mask).last_hidden_state
        return ((row, state[: len(some)]) for row, state, some in zip(rows, states, inputs, strict=True))

    def _forward(
        self, ids: Tensor, first_row: int, width: int, encoded: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """One pass of the decoder for the rows from `first` on: ids [rows, columns], the newest of `width`; logits.

        Where there are soft prompts, `inserted` [rows, columns, H] stands for the ids.
        """
        mask = self._self_attention_cache.attention_mask(first_row, width)
        places = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            attention_mask=self._cross_attention_cache.attention_mask(first_row, encoded.shape[1]).to(self._device),
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            **({"decoder_input_ids": ids} if inputs_embeds is None else {"decoder_inputs_embeds": inputs_embeds}),
            decoder_attention_mask=mask.to(self._device),
            past_key_values=self._past_key_values,
            use_cache=True,
            **self._positions.forward_arguments(places.to(self._device)),
        )
        return output.logits


def _encoder_input(row: Sequence) -> list[int]:
    """What is to be encoded of a row: placeholders of the encoder's part of its soft prompt, then the input."""
    prompt = encoder_prompt(row)
    virtual = 0 if prompt is None else len(prompt)
    return row.tokens[row.request.soft_prompt_length - virtual : row.prompt_length]
