"""Encoder-decoder models in padded batches: each input is encoded once, when its sequence joins.

The self-attention cache is that of a decoder-only model whose prompt is the start token. The keys and values of the
encoder's output are in a second cache of the same kind, which changes only when sequences join or leave.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import EncoderDecoderCache, GenerationConfig
from transformers.modeling_outputs import BaseModelOutput

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import load_model, model_info, select_kernels
from tgis.engines.lora.layers import LoraLayers, lora_of
from tgis.engines.lora.soft_prompts import PromptSpan, decoder_prompt, embed_with_prompts, encoder_prompt, padded_spans
from tgis.engines.memory.profiler import KVCacheCost
from tgis.engines.padded.attention import use_gqa_attention
from tgis.engines.padded.kv_cache import PaddedKVCache
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, left_aligned, right_aligned, token_positions
from tgis.engines.padded.positions import check_row_independence, find_positions
from tgis.engines.sampling.logprobs import first_prompt_logprobs
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs


class EncoderDecoder:
    """What `PaddedModel`s with an encoder share: their outputs start with a token of the model's and follow the
    constraints of its generation config, whose defaults for sampling are ignored; their inputs have no logprobs.
    """

    chunked_prefill = False  # the encoder needs whole inputs
    max_logprob_tokens = 0

    def __init__(self, config: GenerationConfig, vocab_size: int, device: torch.device) -> None:
        """StartError unless the config has one start token of the decoder, and this and the forced token are in the
        vocabulary.
        """
        start = config.bos_token_id if config.decoder_start_token_id is None else config.decoder_start_token_id
        if not isinstance(start, int):
            raise StartError(f"decoder_start_token_id of an encoder-decoder must be one token, not {start!r:.40}")
        for name, token in {"decoder_start_token_id": start, "forced_bos_token_id": config.forced_bos_token_id}.items():
            if token is not None and not 0 <= token < vocab_size:
                raise StartError(f"{name} {token} is not in the model's vocabulary of {vocab_size}")
        words = [word[0] for word in config.bad_words_ids or [] if len(word) == 1]
        suppressed = [*words, *(config.suppress_tokens or [])]  # such as Marian's padding
        self.decoder_start_token_id = start
        self._forced_bos_token_id = config.forced_bos_token_id  # starts every output: a target language
        known = [token for token in suppressed if 0 <= token < vocab_size]
        self._suppressed_token_ids = torch.tensor(known, dtype=torch.int64, device=device)

    def token_history(self, seq: Sequence) -> list[int]:
        """The start token and the output."""
        return [self.decoder_start_token_id, *seq.tokens[seq.prompt_length :]]

    def _constrain(self, logits: Tensor, first_step_rows: list[int]) -> None:
        """Change logits [rows, V] in place; `first_step_rows` have no token yet."""
        logits.index_fill_(-1, self._suppressed_token_ids, -torch.inf)
        if self._forced_bos_token_id is not None and first_step_rows:
            logits[first_step_rows] = -torch.inf
            logits[first_step_rows, self._forced_bos_token_id] = 0

    def _prefilled(self, seqs: list[Sequence], logits: Tensor) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """The result of a prefill from the decoder's last logits [rows, V]."""
        self._constrain(logits, [row for row, seq in enumerate(seqs) if not seq.num_generated_tokens])
        return logits, {
            seq.id: [first_prompt_logprobs(seq.request.logprob_options)] * len(encoder_input(seq))
            for seq in seqs
            if seq.wants_prompt_logprobs
        }


def encoder_input(seq: Sequence) -> list[int]:
    """Placeholders of the encoder's soft prompt, then the input."""
    prompt = encoder_prompt(seq)
    virtual = 0 if prompt is None else len(prompt)
    return seq.tokens[seq.request.soft_prompt_length - virtual : seq.prompt_length]


class Seq2SeqLM(EncoderDecoder):
    """A `PaddedModel`: an encoder, a decoder, and the decoder's two KV caches."""

    def __init__(self, options: EngineOptions, device: torch.device, max_batch_size: int) -> None:
        self.model = load_model(options, device)
        if device.type == "cpu":
            use_gqa_attention(self.model)
        check_row_independence(self.model)
        self.info = model_info(self.model)
        self._positions = find_positions(self.model, options.max_sequence_length)
        super().__init__(self.model.generation_config, self.info.vocab_size, device)
        self.lora = LoraLayers(self.model, select_kernels(options, device))
        self._device = device
        self._max_batch_size = max_batch_size
        self.max_positions = self._positions.max_positions
        self._encoder_embed_tokens = self.model.get_encoder().get_input_embeddings()
        self._decoder_embed_tokens = self.model.get_decoder().get_input_embeddings()
        self.embedding_size = self._encoder_embed_tokens.embedding_dim
        self.clear()

    @property
    def kv_cache_cost(self) -> KVCacheCost:
        """The longest input and the longest output may be of different sequences."""
        return self._cross_attention_cache.cost + self._self_attention_cache.cost

    @property
    def kv_cache_bytes(self) -> int:
        return self._cross_attention_cache.allocated_bytes + self._self_attention_cache.allocated_bytes

    def _decoder_input(self, seq: Sequence) -> list[int]:
        """The decoder's soft prompt as zeros, the start token and the output."""
        virtual = 0 if seq.adapter is None else seq.adapter.decoder_length
        return [0] * virtual + self.token_history(seq)

    def clear(self) -> None:
        self._cross_attention_cache = PaddedKVCache(self._max_batch_size)
        self._self_attention_cache = PaddedKVCache(self._max_batch_size)
        self._past_key_values = EncoderDecoderCache(
            self._self_attention_cache.past_key_values, self._cross_attention_cache.past_key_values
        )

    def remove(self, row: int) -> None:
        self._cross_attention_cache.remove(row)
        self._self_attention_cache.remove(row)

    def append(self, seqs: list[Sequence]) -> None:
        self._cross_attention_cache.append([len(encoder_input(seq)) for seq in seqs])
        self._self_attention_cache.append([len(self._decoder_input(seq)) for seq in seqs])

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode what there is of outputs."""
        first_row = len(self._self_attention_cache.seq_lens) - len(seqs)
        encoded = self._encode(seqs)
        self._cross_attention_cache.view_prefill(first_row, 0, encoded.shape[1])
        self._past_key_values.is_updated.clear()  # so that the first pass fills the cross-attention cache
        outputs = [self._decoder_input(seq) for seq in seqs]
        prompts = [decoder_prompt(seq) for seq in seqs]
        lengths = [len(output) for output in outputs]
        width = max(lengths)
        ids = right_aligned(outputs)
        chunk_size = max(1, MAX_PREFILL_TOKENS["cpu"] // len(seqs))  # small, because every token gets logits
        for start in range(0, width, chunk_size):
            stop = min(start + chunk_size, width)
            self._self_attention_cache.view_prefill(first_row, start, stop)
            chunk = ids[:, start:stop].to(self._device)
            embeds = embed_with_prompts(self._decoder_embed_tokens, chunk, padded_spans(prompts, lengths, start, stop))
            logits = self._forward(chunk, first_row, stop, encoded, embeds)
        return self._prefilled(seqs, logits[:, -1])

    def decode(self, last_tokens: Tensor) -> Tensor:
        self._self_attention_cache.view_decode()
        self._cross_attention_cache.read_all()
        shape = (len(last_tokens), self._cross_attention_cache.width, 1)
        unread = torch.zeros((1, 1, 1), dtype=self.model.dtype, device=self._device).expand(shape)
        logits = self._forward(last_tokens[:, None], 0, self._self_attention_cache.width, unread)[:, -1]
        self._constrain(logits, [])
        return logits

    def _encode(self, seqs: list[Sequence]) -> Tensor:
        """The encoder's output, [rows, columns, H], right-aligned, though the encoder's input is left-aligned."""
        plain = [seq for seq in seqs if encoder_prompt(seq) is None]  # by ids, which M2M100 needs for its positions
        prompted = [seq for seq in seqs if encoder_prompt(seq) is not None]
        states = {seq.id: state for group in (plain, prompted) if group for seq, state in self._encode_batch(group)}
        width = max(len(state) for state in states.values())
        return torch.stack([pad(states[seq.id], (0, 0, width - len(states[seq.id]), 0)) for seq in seqs])

    def _encode_batch(self, seqs: list[Sequence]) -> Iterator[tuple[Sequence, Tensor]]:
        """The output for each sequence, [columns, H]."""
        inputs = [encoder_input(seq) for seq in seqs]
        ids, mask = (each.to(self._device) for each in left_aligned(inputs))
        spans = [
            PromptSpan(row, 0, prompt) for row, seq in enumerate(seqs) if (prompt := encoder_prompt(seq)) is not None
        ]
        embeds = embed_with_prompts(self._encoder_embed_tokens, ids, spans)
        arguments = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        with self.lora.applied([lora_of(seq) for seq in seqs]):
            states = self.model.get_encoder()(**arguments, attention_mask=mask).last_hidden_state
        return ((seq, state[: len(tokens)]) for seq, state, tokens in zip(seqs, states, inputs, strict=True))

    def _forward(
        self, ids: Tensor, first_row: int, width: int, encoded: Tensor, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """The logits of one pass of the decoder for the rows from `first_row` on, ids [rows, columns], the last of
        `width`.

        `inputs_embeds` [rows, columns, H] replaces the ids where there are soft prompts.
        """
        mask = self._self_attention_cache.attention_mask(first_row, width)
        positions = token_positions(mask, ids.shape[1])
        output = self.model(
            attention_mask=self._cross_attention_cache.attention_mask(first_row, encoded.shape[1]).to(self._device),
            encoder_outputs=BaseModelOutput(last_hidden_state=encoded),
            **({"decoder_input_ids": ids} if inputs_embeds is None else {"decoder_inputs_embeds": inputs_embeds}),
            decoder_attention_mask=mask.to(self._device),
            past_key_values=self._past_key_values,
            use_cache=True,
            **self._positions.forward_arguments(positions.to(self._device)),
        )
        return output.logits
