"""Engine `hf_optimum_ort`: graphs exported by Optimum, run by onnxruntime in the padded batches of hf_transformers.

The dtype is that of the graphs; soft prompts and LoRA adapters are not supported. Some graphs take no attention mask
for the decoder, or count positions without it, such as the encoder-decoders that Optimum exports: their passes can only
hold sequences of equal length.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from tgis.batcher.sequence import Sequence
from tgis.engines.base import warn
from tgis.engines.loading.loader import LoadedModelInfo, load_config
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.memory.profiler import KVCacheCost
from tgis.engines.onnx.decoder import Decoder, EncoderOutputs, GraphFiles, find_graphs, ignores_padding
from tgis.engines.onnx.kv_cache import PastKeyValues, SubBatch, SubBatches, group_by_length
from tgis.engines.onnx.session import Session, cuda_available
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, PaddedModel, chunked_prefill, left_aligned, right_aligned
from tgis.engines.padded.seq2seq_lm import EncoderDecoder
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import TokenLogprobs

_HIDDEN_STATES = "last_hidden_state"
_BUFFERS = 2  # a pass reads one KV cache and writes the next


def load_engine(options: EngineOptions) -> PaddedEngine:
    return PaddedEngine(options, _load_model, "hf_optimum_ort")


def _load_model(options: EngineOptions, device: torch.device, _max_batch_size: int) -> PaddedModel:
    if device.type == "cuda" and not cuda_available():
        raise StartError("the onnxruntime installed has no CUDA: install onnxruntime-gpu, or set CUDA_VISIBLE_DEVICES=")
    config = load_config(options)
    model = (OnnxSeq2SeqLM if config.is_encoder_decoder else OnnxCausalLM)(options, config, device)
    dtype = str(model.info.dtype).removeprefix("torch.")
    if options.dtype not in (None, dtype):
        warn(options, f"DTYPE={options.dtype} has no effect: the graphs were exported in {dtype}")
    return model


class _OnnxModel:
    """What both kinds of `PaddedModel` share: a decoder, and the KV cache of its sequences."""

    embedding_size = 0  # graphs take ids only

    def __init__(
        self, options: EngineOptions, config: PreTrainedConfig, device: torch.device, files: GraphFiles
    ) -> None:
        self._decoder = Decoder.load(files, device, options.num_threads)
        self._device = device
        self._any_length = False  # whether sequences of different lengths can share a pass
        self.lora = LoraLayers(None)
        self.info = _model_info(config, self._decoder)
        self.clear()

    @property
    def kv_cache_cost(self) -> KVCacheCost:
        """The longest input and the longest output of an encoder-decoder may be of different sequences."""
        return KVCacheCost(_BUFFERS * self._decoder.bytes_per_token, 0)

    @property
    def kv_cache_bytes(self) -> int:
        return self._batch.allocated_bytes

    def clear(self) -> None:
        self._batch = SubBatches()

    def remove(self, row: int) -> None:
        self._batch.remove(row)

    def append(self, seqs: list[Sequence]) -> None:
        """Count new sequences; the prefill allocates their KV cache."""
        self._batch.num_rows += len(seqs)

    def decode(self, last_tokens: Tensor) -> Tensor:
        logits = self._decoder.empty_logits(len(last_tokens))
        for sub_batch in self._batch.regroup(self._any_length):
            past, encoder_outputs = sub_batch.extend(), self._encoder_outputs(sub_batch.cross_attention)
            logits[sub_batch.rows] = self._decoder.run(past, last_tokens[sub_batch.rows, None], encoder_outputs)[:, -1]
        return logits

    def _encoder_outputs(self, past: PastKeyValues | None) -> EncoderOutputs | None:
        """The encoder's outputs for sequences with this cross-attention cache, if there is an encoder."""
        assert past is None
        return None

    def _groups(self, lengths: list[int]) -> list[tuple[list[int], list[int]]]:
        """The indices and the rows of new sequences that can share a pass, whose decoder inputs have these lengths."""
        first_row = self._batch.num_rows - len(lengths)
        groups = group_by_length(lengths, self._any_length)
        return [(group, [first_row + index for index in group]) for group in groups]


class OnnxCausalLM(_OnnxModel):
    """A decoder-only model."""

    decoder_start_token_id = None

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=False)
        super().__init__(options, config, device, files)
        self.max_positions = options.max_sequence_length
        self.chunked_prefill = self._decoder.supports_chunked_prefill
        self.max_logprob_tokens = MAX_PREFILL_TOKENS[device.type] if self.chunked_prefill else self.max_positions
        self._any_length = ignores_padding(self._decoder, lambda _: None)

    def token_history(self, seq: Sequence) -> list[int]:
        return seq.tokens

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        logits = self._decoder.empty_logits(len(seqs))
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for group, rows in self._groups([seq.num_uncomputed_tokens for seq in seqs]):
            logits[group], found = self._prefill([seqs[index] for index in group], rows)
            prompt_logprobs |= found
        return logits, prompt_logprobs

    def _prefill(self, seqs: list[Sequence], rows: list[int]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        ids = right_aligned([seq.tokens for seq in seqs]).to(self._device)
        past = self._decoder.empty_past([len(seq.tokens) for seq in seqs])
        width = ids.shape[1]
        chunk_size = max(1, MAX_PREFILL_TOKENS[self._device.type] // len(seqs)) if self.chunked_prefill else width
        output = chunked_prefill(seqs, chunk_size, lambda start, stop: self._decoder.run(past, ids[:, start:stop]))
        self._batch.sub_batches.append(SubBatch(rows, past))
        return output


class OnnxSeq2SeqLM(EncoderDecoder, _OnnxModel):
    """An encoder-decoder model."""

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=True)
        assert files.encoder is not None
        self._encoder = Session(files.encoder, device, options.num_threads)
        self._encoder.check_signature(inputs={"input_ids", "attention_mask"}, outputs={_HIDDEN_STATES: 3})
        _OnnxModel.__init__(self, options, config, device, files)
        EncoderDecoder.__init__(self, _generation_config(options, config), self._decoder.vocab_size, device)
        most = getattr(config, "max_position_embeddings", None)
        self.max_positions = min(options.max_sequence_length, most or options.max_sequence_length)
        self._any_length = ignores_padding(self._decoder, self._probe_outputs)

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode what there is of outputs."""
        inputs = [seq.tokens[: seq.prompt_length] for seq in seqs]
        states, mask = self._encode(*left_aligned(inputs))
        outputs = [self.token_history(seq) for seq in seqs]
        logits = self._decoder.empty_logits(len(seqs))
        for group, rows in self._groups([len(output) for output in outputs]):
            ids = right_aligned([outputs[index] for index in group]).to(self._device)
            past = self._decoder.empty_past([len(outputs[index]) for index in group])
            cross_past = self._decoder.empty_cross_past([len(inputs[index]) for index in group])
            encoder_outputs = EncoderOutputs(mask[group], states[group], cross_past)
            logits[group] = self._decoder.run(past, ids, encoder_outputs)[:, -1]
            self._batch.sub_batches.append(SubBatch(rows, past, cross_past))
        return self._prefilled(seqs, logits)

    def decode(self, last_tokens: Tensor) -> Tensor:
        logits = super().decode(last_tokens)
        self._constrain(logits, [])
        return logits

    def _encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output, [rows, columns, H], left-aligned, and its mask as the graphs take it."""
        ids, mask = ids.to(self._device), mask.long().to(self._device)
        states = self._empty_hidden_states(*ids.shape)
        self._encoder.run({"input_ids": ids, "attention_mask": mask}, {_HIDDEN_STATES: states})
        return states, mask

    def _probe_outputs(self, rows: int) -> EncoderOutputs:
        """The encoder's outputs for rows with the same input."""
        states, mask = self._encode(*left_aligned([[4, 5, 6]] * rows))
        return EncoderOutputs(mask, states, self._decoder.empty_cross_past([3] * rows))

    def _encoder_outputs(self, past: PastKeyValues | None) -> EncoderOutputs:
        assert past is not None
        mask = past.attention_mask(past.columns).long().to(self._device)
        return EncoderOutputs(mask, self._empty_hidden_states(len(mask), 1), past)

    def _empty_hidden_states(self, rows: int, columns: int) -> Tensor:
        node = self._encoder.outputs[_HIDDEN_STATES]
        return torch.zeros((rows, columns, node.dim(2)), dtype=node.dtype, device=self._device)


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
