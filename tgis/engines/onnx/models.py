"""ONNX graphs as models of the padded engine: decoder-only, and encoder-decoder.

Some graphs take no mask of what the decoder has seen, or count places without it, as those of encoder-decoders that
Optimum exports by itself: there only rows that are equally long can share a pass.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from tgis.batcher.sequence import Sequence
from tgis.engines.loading.loader import ModelInfo
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.memory.profiler import KvCacheCost
from tgis.engines.onnx.decoder import Decoder, EncoderOutputs, ignores_padding
from tgis.engines.onnx.files import find_graphs
from tgis.engines.onnx.kv_cache import PastKeyValues, SubBatch, SubBatches, group_by_length
from tgis.engines.onnx.session import Session
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, chunked_prefill, wanting_prompt_logprobs
from tgis.engines.padded.seq2seq_lm import OutputConstraints
from tgis.engines.sampling.logprobs import first_prompt_logprobs
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs

_HIDDEN_STATES = "last_hidden_state"
_BUFFERS = 2  # a pass reads the states of one and writes those of the next


class OnnxCausalLM:
    """A `PaddedModel`: a decoder, and the KV cache of its sequences."""

    embedding_size = 0  # graphs take ids only

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
    def kv_cache_cost(self) -> KvCacheCost:
        """Of all layers."""
        return KvCacheCost(_BUFFERS * self._decoder.bytes_per_token(self._decoder.self_attention_names), 0)

    @property
    def kv_cache_bytes(self) -> int:
        """Of all rows."""
        return self._sub_batches.allocated_bytes

    def token_history(self, row: Sequence) -> list[int]:
        """Prompt and generated tokens."""
        return row.tokens

    def clear(self) -> None:
        """Start again without rows."""
        self._sub_batches = SubBatches()

    def remove(self, index: int) -> None:
        """Forget a row."""
        self._sub_batches.remove(index)

    def append(self, rows: list[Sequence]) -> None:
        """Count new rows; their states come with the prefill."""
        self._sub_batches.num_rows += len(rows)

    def prefill(self, rows: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Compute prompts, in pieces where the graph can: the logits after each's last token, facts of input tokens."""
        first = self._sub_batches.num_rows - len(rows)
        logits = self._decoder.empty_logits(len(rows), self._device)
        inputs: dict[int, list[TokenLogprobs]] = {}
        for places in group_by_length([row.num_uncomputed_tokens for row in rows], self._mixed_lengths):
            group = [rows[place] for place in places]
            logits[places], facts = self._prefill(group, [first + place for place in places])
            inputs |= facts
        return logits, inputs

    def _prefill(self, rows: list[Sequence], numbers: list[int]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        lengths = [row.num_uncomputed_tokens for row in rows]
        width = max(lengths)
        ids = torch.tensor(
            [[0] * (width - row.num_uncomputed_tokens) + row.tokens for row in rows], device=self._device
        )
        block = self._decoder.empty_past(self._decoder.self_attention_names, lengths, self._device, left_padded=True)
        chunk_size = max(1, MAX_PREFILL_TOKENS[self._device.type] // len(rows)) if self.chunked_prefill else width
        found = chunked_prefill(rows, chunk_size, lambda start, stop: self._decoder.run(block, ids[:, start:stop]))
        self._sub_batches.add(SubBatch(numbers, block))
        return found

    def decode(self, last_tokens: Tensor) -> Tensor:
        """One more token of every row."""
        logits = self._decoder.empty_logits(len(last_tokens), self._device)
        for cohort in self._sub_batches.regroup(self._mixed_lengths):
            logits[cohort.rows] = self._decoder.run(cohort.extend(), last_tokens[cohort.rows, None])[:, -1]
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
        self._constraints = OutputConstraints.from_config(_generation_config(options, config), device)
        self.info = _model_info(config, self._decoder)
        most = getattr(config, "max_position_embeddings", None)
        self.max_positions = min(options.max_sequence_length, most or options.max_sequence_length)
        self._mixed_lengths = ignores_padding(self._decoder, device, self._probe_outputs)
        self.clear()

    @property
    def kv_cache_cost(self) -> KvCacheCost:
        """Of input and output: the longest ones may belong to different rows."""
        decoder = self._decoder
        each = decoder.bytes_per_token(decoder.self_attention_names) + decoder.bytes_per_token(
            decoder.cross_attention_names
        )
        return KvCacheCost(_BUFFERS * each, 0)

    @property
    def kv_cache_bytes(self) -> int:
        """Of all rows."""
        return self._sub_batches.allocated_bytes

    def token_history(self, row: Sequence) -> list[int]:
        """What the decoder has seen: the start token and the output."""
        return [self._constraints.decoder_start_token_id, *row.tokens[row.prompt_length :]]

    def clear(self) -> None:
        """Start again without rows."""
        self._sub_batches = SubBatches()

    def remove(self, index: int) -> None:
        """Forget a row."""
        self._sub_batches.remove(index)

    def append(self, rows: list[Sequence]) -> None:
        """Count new rows; their states come with the prefill."""
        self._sub_batches.num_rows += len(rows)

    def prefill(self, rows: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode what there is of outputs: the logits of the next tokens; empty facts."""
        first = self._sub_batches.num_rows - len(rows)
        states, mask = self._encode(rows)
        outputs = [self.token_history(row) for row in rows]
        lengths = [len(output) for output in outputs]
        logits = self._decoder.empty_logits(len(rows), self._device)
        for places in group_by_length(lengths, self._mixed_lengths):
            width = max(lengths[place] for place in places)
            ids = torch.tensor([[0] * (width - lengths[place]) + outputs[place] for place in places])
            decoded = self._empty_past(
                [lengths[place] for place in places], self._decoder.self_attention_names, left=True
            )
            encoded = self._empty_past(
                [rows[place].prompt_length for place in places], self._decoder.cross_attention_names, left=False
            )
            cross = EncoderOutputs(mask[places], states[places], encoded)
            logits[places] = self._decoder.run(decoded, ids.to(self._device), cross)[:, -1]
            self._sub_batches.add(SubBatch([first + place for place in places], decoded, encoded))
        self._constraints.apply(logits, [place for place, row in enumerate(rows) if not row.num_generated_tokens])
        return logits, {
            row.id: [first_prompt_logprobs(row.request.logprob_options)] * row.prompt_length
            for row in wanting_prompt_logprobs(rows)
        }

    def decode(self, last_tokens: Tensor) -> Tensor:
        """One more token of every row."""
        logits = self._decoder.empty_logits(len(last_tokens), self._device)
        for cohort in self._sub_batches.regroup(self._mixed_lengths):
            cross = self._encoder_outputs(cohort.cross_attention)
            logits[cohort.rows] = self._decoder.run(cohort.extend(), last_tokens[cohort.rows, None], cross)[:, -1]
        self._constraints.apply(logits, [])
        return logits

    def _encode(self, rows: list[Sequence]) -> tuple[Tensor, Tensor]:
        """The encoder's output, [rows, columns, hidden], padding on the right; its mask."""
        lengths = [row.prompt_length for row in rows]
        width = max(lengths)
        ids = [row.tokens[:length] + [0] * (width - length) for row, length in zip(rows, lengths, strict=True)]
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        return self._run_encoder(torch.tensor(ids, device=self._device), mask.to(self._device))

    def _run_encoder(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        states = self._empty_hidden_states(*ids.shape)
        self._encoder.run({"input_ids": ids, "attention_mask": mask}, {_HIDDEN_STATES: states})
        return states, mask

    def _probe_outputs(self, rows: int) -> EncoderOutputs:
        """Of rows that have the same input."""
        ids = torch.arange(4, 7, device=self._device).repeat(rows, 1)
        states, mask = self._run_encoder(ids, torch.ones_like(ids))
        return EncoderOutputs(
            mask, states, self._empty_past([3] * rows, self._decoder.cross_attention_names, left=False)
        )

    def _encoder_outputs(self, encoded: PastKeyValues | None) -> EncoderOutputs:
        """Of rows whose inputs have been read before."""
        assert encoded is not None
        mask = encoded.attention_mask(encoded.columns).long().to(self._device)
        return EncoderOutputs(mask, self._empty_hidden_states(len(mask), 1), encoded)

    def _empty_hidden_states(self, rows: int, columns: int) -> Tensor:
        """Room for so much of the encoder's output."""
        port = self._encoder.outputs[_HIDDEN_STATES]
        return torch.zeros((rows, columns, port.dim(2)), dtype=port.dtype, device=self._device)

    def _empty_past(self, lengths: list[int], names: tuple[str, ...], *, left: bool) -> PastKeyValues:
        return self._decoder.empty_past(names, lengths, self._device, left_padded=left)


def _model_info(config: PreTrainedConfig, decoder: Decoder) -> ModelInfo:
    name = (config.architectures or [type(config).__name__])[0]
    return ModelInfo(f"{name} (ONNX)", decoder.dtype, decoder.vocab_size, config.is_encoder_decoder)


def _generation_config(options: EngineOptions, config: PreTrainedConfig) -> GenerationConfig:
    if (Path(options.model_path) / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(options.model_path, local_files_only=True)
    return GenerationConfig.from_model_config(config)
