"""ONNX graphs as models of the padded engine: decoder-only, and encoder-decoder.

Some graphs take no attention mask for the decoder, or count positions without it, such as the encoder-decoders that
Optimum exports: their passes can only hold sequences of equal length.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import LoadedModelInfo
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.memory.profiler import KVCacheCost
from tgis.engines.onnx.decoder import Decoder, EncoderOutputs, ignores_padding
from tgis.engines.onnx.files import find_graphs
from tgis.engines.onnx.kv_cache import PastKeyValues, SubBatch, SubBatches, group_by_length
from tgis.engines.onnx.session import Session
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, chunked_prefill
from tgis.engines.padded.seq2seq_lm import OutputConstraints
from tgis.engines.sampling.logprobs import first_prompt_logprobs
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs

_HIDDEN_STATES = "last_hidden_state"
_BUFFERS = 2  # a pass reads one KV cache and writes the next


class OnnxCausalLM:
    """A `PaddedModel`: a decoder, and the KV cache of its sequences."""

    embedding_size = 0  # graphs take ids only
    decoder_start_token_id = None

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=False)
        self._decoder = Decoder.load(files, device, options.num_threads)
        self._device = device
        self.lora = LoraLayers(None)
        self.info = _model_info(config, self._decoder)
        self.max_positions = options.max_sequence_length
        self.chunked_prefill = self._decoder.supports_chunked_prefill
        self.max_logprob_tokens = MAX_PREFILL_TOKENS[device.type] if self.chunked_prefill else self.max_positions
        self._mixed_lengths = ignores_padding(self._decoder, device, lambda _: None)
        self.clear()

    @property
    def kv_cache_cost(self) -> KVCacheCost:
        return KVCacheCost(_BUFFERS * self._decoder.bytes_per_token(self._decoder.self_attention_names), 0)

    @property
    def kv_cache_bytes(self) -> int:
        return self._sub_batches.allocated_bytes

    def token_history(self, seq: Sequence) -> list[int]:
        return seq.tokens

    def clear(self) -> None:
        self._sub_batches = SubBatches()

    def remove(self, row: int) -> None:
        self._sub_batches.remove(row)

    def append(self, seqs: list[Sequence]) -> None:
        """Count new sequences; the prefill allocates their KV cache."""
        self._sub_batches.num_rows += len(seqs)

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        first_row = self._sub_batches.num_rows - len(seqs)
        logits = self._decoder.empty_logits(len(seqs), self._device)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for group in group_by_length([seq.num_uncomputed_tokens for seq in seqs], self._mixed_lengths):
            logits[group], found = self._prefill(
                [seqs[index] for index in group], [first_row + index for index in group]
            )
            prompt_logprobs |= found
        return logits, prompt_logprobs

    def _prefill(self, seqs: list[Sequence], rows: list[int]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        lengths = [seq.num_uncomputed_tokens for seq in seqs]
        width = max(lengths)
        ids = torch.tensor([[0] * (width - len(seq.tokens)) + seq.tokens for seq in seqs], device=self._device)
        past = self._decoder.empty_past(self._decoder.self_attention_names, lengths, self._device, left_padded=True)
        chunk_size = max(1, MAX_PREFILL_TOKENS[self._device.type] // len(seqs)) if self.chunked_prefill else width
        output = chunked_prefill(seqs, chunk_size, lambda start, stop: self._decoder.run(past, ids[:, start:stop]))
        self._sub_batches.add(SubBatch(rows, past))
        return output

    def decode(self, last_tokens: Tensor) -> Tensor:
        logits = self._decoder.empty_logits(len(last_tokens), self._device)
        for sub_batch in self._sub_batches.regroup(self._mixed_lengths):
            logits[sub_batch.rows] = self._decoder.run(sub_batch.extend(), last_tokens[sub_batch.rows, None])[:, -1]
        return logits


class OnnxSeq2SeqLM:
    """A `PaddedModel`: an encoder, a decoder, and the decoder's KV caches."""

    embedding_size = 0
    chunked_prefill = False
    max_logprob_tokens = 0  # inputs have no logprobs

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=True)
        assert files.encoder is not None
        self._encoder = Session(files.encoder, device, options.num_threads)
        self._encoder.check_signature(inputs={"input_ids", "attention_mask"}, outputs={_HIDDEN_STATES: 3})
        self._decoder = Decoder.load(files, device, options.num_threads)
        self._device = device
        self.lora = LoraLayers(None)
        self._constraints = OutputConstraints(_generation_config(options, config), self._decoder.vocab_size, device)
        self.decoder_start_token_id = self._constraints.decoder_start_token_id
        self.info = _model_info(config, self._decoder)
        most = getattr(config, "max_position_embeddings", None)
        self.max_positions = min(options.max_sequence_length, most or options.max_sequence_length)
        self._mixed_lengths = ignores_padding(self._decoder, device, self._probe_outputs)
        self.clear()

    @property
    def kv_cache_cost(self) -> KVCacheCost:
        """The longest input and the longest output may be of different sequences."""
        decoder = self._decoder
        each = decoder.bytes_per_token(decoder.self_attention_names) + decoder.bytes_per_token(
            decoder.cross_attention_names
        )
        return KVCacheCost(_BUFFERS * each, 0)

    @property
    def kv_cache_bytes(self) -> int:
        return self._sub_batches.allocated_bytes

    def token_history(self, seq: Sequence) -> list[int]:
        """The start token and the output."""
        return [self.decoder_start_token_id, *seq.tokens[seq.prompt_length :]]

    def clear(self) -> None:
        self._sub_batches = SubBatches()

    def remove(self, row: int) -> None:
        self._sub_batches.remove(row)

    def append(self, seqs: list[Sequence]) -> None:
        """Count new sequences; the prefill allocates their KV cache."""
        self._sub_batches.num_rows += len(seqs)

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode what there is of outputs; prompt logprobs are empty."""
        first_row = self._sub_batches.num_rows - len(seqs)
        states, mask = self._encode(seqs)
        outputs = [self.token_history(seq) for seq in seqs]
        lengths = [len(output) for output in outputs]
        logits = self._decoder.empty_logits(len(seqs), self._device)
        for group in group_by_length(lengths, self._mixed_lengths):
            width = max(lengths[index] for index in group)
            ids = torch.tensor([[0] * (width - lengths[index]) + outputs[index] for index in group])
            past = self._empty_past([lengths[index] for index in group], self._decoder.self_attention_names, left=True)
            cross_past = self._empty_past(
                [seqs[index].prompt_length for index in group], self._decoder.cross_attention_names, left=False
            )
            encoder_outputs = EncoderOutputs(mask[group], states[group], cross_past)
            logits[group] = self._decoder.run(past, ids.to(self._device), encoder_outputs)[:, -1]
            self._sub_batches.add(SubBatch([first_row + index for index in group], past, cross_past))
        self._constraints.apply(logits, [row for row, seq in enumerate(seqs) if not seq.num_generated_tokens])
        return logits, {
            seq.id: [first_prompt_logprobs(seq.request.logprob_options)] * seq.prompt_length
            for seq in seqs
            if seq.wants_prompt_logprobs
        }

    def decode(self, last_tokens: Tensor) -> Tensor:
        logits = self._decoder.empty_logits(len(last_tokens), self._device)
        for sub_batch in self._sub_batches.regroup(self._mixed_lengths):
            past, encoder_outputs = sub_batch.extend(), self._encoder_outputs(sub_batch.cross_attention)
            logits[sub_batch.rows] = self._decoder.run(past, last_tokens[sub_batch.rows, None], encoder_outputs)[:, -1]
        self._constraints.apply(logits, [])
        return logits

    def _encode(self, seqs: list[Sequence]) -> tuple[Tensor, Tensor]:
        """The encoder's output, [rows, columns, H], left-aligned, and its mask."""
        lengths = [seq.prompt_length for seq in seqs]
        width = max(lengths)
        ids = [seq.tokens[:length] + [0] * (width - length) for seq, length in zip(seqs, lengths, strict=True)]
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        return self._run_encoder(torch.tensor(ids, device=self._device), mask.to(self._device))

    def _run_encoder(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self._empty_hidden_states(*ids.shape)
        self._encoder.run({"input_ids": ids, "attention_mask": mask}, {_HIDDEN_STATES: states})
        return states, mask

    def _probe_outputs(self, rows: int) -> EncoderOutputs:
        """For rows with the same input."""
        ids = torch.arange(4, 7, device=self._device).repeat(rows, 1)
        states, mask = self._run_encoder(ids, torch.ones_like(ids))
        return EncoderOutputs(
            mask, states, self._empty_past([3] * rows, self._decoder.cross_attention_names, left=False)
        )

    def _encoder_outputs(self, past: PastKeyValues | None) -> EncoderOutputs:
        """For rows whose cross-attention cache is filled."""
        assert past is not None
        mask = past.attention_mask(past.columns).long().to(self._device)
        return EncoderOutputs(mask, self._empty_hidden_states(len(mask), 1), past)

    def _empty_hidden_states(self, rows: int, columns: int) -> Tensor:
        node = self._encoder.outputs[_HIDDEN_STATES]
        return torch.zeros((rows, columns, node.dim(2)), dtype=node.dtype, device=self._device)

    def _empty_past(self, lengths: list[int], names: tuple[str, ...], *, left: bool) -> PastKeyValues:
        return self._decoder.empty_past(names, lengths, self._device, left_padded=left)


def _model_info(config: PreTrainedConfig, decoder: Decoder) -> LoadedModelInfo:
    name = (config.architectures or [type(config).__name__])[0]
    encoder_decoder = config.is_encoder_decoder
    input_vocab_size = config.vocab_size if encoder_decoder else decoder.vocab_size
    return LoadedModelInfo(
        f"{name} (ONNX)", decoder.dtype, decoder.vocab_size, input_vocab_size, encoder_decoder=encoder_decoder
    )


def _generation_config(options: EngineOptions, config: PreTrainedConfig) -> GenerationConfig:
    if (Path(options.model_path) / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(options.model_path, local_files_only=True)
    return GenerationConfig.from_model_config(config)
