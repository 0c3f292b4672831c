"""Engine `hf_optimum_ort`: graphs exported by Optimum, run by onnxruntime in the padded batches of hf_transformers.

The dtype is that of the graphs; soft prompts and LoRA adapters are not supported. Some graphs take no attention mask
for the decoder, or count positions without it, such as the encoder-decoders that Optimum exports: they serve one
sequence at a time.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tgis.batcher.sequence import Sequence
from tgis.engines.base import warn
from tgis.engines.loading.arithmetic import with_arithmetic
from tgis.engines.loading.loader import DEFAULT_MAX_BATCH_SIZE, load_config, load_generation_config
from tgis.engines.loading.memory_estimate import unknown_memory
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import encoder_input
from tgis.engines.memory.capacity import KVCacheCost
from tgis.engines.onnx.decoder import Decoder, EncoderOutputs, GraphFiles, find_graphs, ignores_padding
from tgis.engines.onnx.session import Session
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.padded.kv_cache import padding_mask
from tgis.engines.padded.model import (
    MAX_PREFILL_TOKENS,
    PaddedModel,
    chunked_prefill,
    left_aligned,
    right_aligned,
    right_aligned_states,
)
from tgis.engines.sampling.encoder_decoder import EncoderDecoder
from tgis.errors import StartError
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import TokenLogprobs

_HIDDEN_STATES = "last_hidden_state"
_BUFFERS = 2  # a pass reads one KV cache and writes the next


def load_engine(options: EngineOptions) -> PaddedEngine:
    return PaddedEngine(options, _load_model)


def describe_memory(options: EngineOptions) -> list[str]:
    """The memory that a start will need, from the sizes of the graphs."""
    find_graphs(Path(options.model_path), encoder_decoder=load_config(options).is_encoder_decoder)
    return unknown_memory("hf_optimum_ort", options, "**/*.onnx*")


def _load_model(options: EngineOptions, device: torch.device) -> PaddedModel:
    if options.quantize != "none":
        raise StartError(
            f"QUANTIZE={options.quantize} does not work with hf_optimum_ort, which runs graphs as they are"
        )
    config = load_config(options)
    model = (OnnxSeq2SeqLM if config.is_encoder_decoder else OnnxCausalLM)(options, config, device)
    if options.dtype not in (None, model.info.dtype):
        warn(options, f"DTYPE={options.dtype} has no effect: the graphs were exported in {model.info.dtype}")
    return model


class _OnnxModel(PaddedModel):
    """A decoder and the KV caches of its sequences. Graphs take ids only."""

    def __init__(
        self, options: EngineOptions, config: PreTrainedConfig, device: torch.device, files: GraphFiles
    ) -> None:
        self._decoder = Decoder(files, device, options.num_threads)
        self._device = device
        self.lora = LoraLayers(None)
        self.info = with_arithmetic(_engine_info(options, config, self._decoder), options)
        self.clear()

    @property
    def kv_cache_cost(self) -> KVCacheCost:
        return KVCacheCost(_BUFFERS * sum(cache.bytes_per_token for cache in self._caches), 0)

    def decode(self, last_tokens: Tensor) -> Tensor:
        cache = self._caches[0]
        past = cache.contiguous()
        mask = padding_mask(cache.seq_lens, cache.width + 1)
        logits = self._decoder.run(past, last_tokens[:, None], mask, self._encoder_outputs())
        cache.replace(past)
        return logits[:, -1]

    def _decoder_inputs(self, seqs: list[Sequence]) -> tuple[list[Tensor], Tensor, Tensor]:
        """An empty past, the ids and the mask, [rows, columns], of new sequences."""
        tokens = [self.decoder_input(seq) for seq in seqs]
        ids = right_aligned(tokens).to(self._device)
        past = self._decoder.new_past(self._decoder.self_attention_names, len(seqs))
        return past, ids, padding_mask([len(row) for row in tokens], ids.shape[1])

    def _encoder_outputs(self) -> EncoderOutputs | None:
        """The encoder's outputs for a decode, if there is an encoder."""
        return None

    def _fill_caches(self, num_rows: int, *pasts: list[Tensor]) -> None:
        """Store the keys and values of the last rows."""
        for cache, past in zip(self._caches, pasts, strict=True):
            cache.write(len(cache.seq_lens) - num_rows, past)

    def _check_padding(self, options: EngineOptions, probe_outputs: Callable[[int], EncoderOutputs | None]) -> None:
        """Serve one sequence at a time if padding would change the results."""
        if not ignores_padding(self._decoder, probe_outputs):
            warn(options, "MAX_BATCH_SIZE is 1: the graphs see padding (see tgis convert-to-onnx)")
            self.info = msgspec.structs.replace(self.info, max_batch_size=1)


class OnnxCausalLM(_OnnxModel):
    """A decoder-only model."""

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=False)
        super().__init__(options, config, device, files)
        self.chunked_prefill = self._decoder.supports_chunked_prefill
        self.max_logprob_tokens = self.info.max_prefill_tokens if self.chunked_prefill else self.info.max_positions
        self._check_padding(options, lambda _: None)

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        past, ids, mask = self._decoder_inputs(seqs)
        chunk_size = max(1, self.info.max_prefill_tokens // len(seqs)) if self.chunked_prefill else ids.shape[1]

        def forward(start: int, stop: int) -> Tensor:
            return self._decoder.run(past, ids[:, start:stop], mask[:, :stop])

        output = chunked_prefill(seqs, chunk_size, forward)
        self._fill_caches(len(seqs), past)
        return output


class OnnxSeq2SeqLM(EncoderDecoder, _OnnxModel):
    """An encoder-decoder model."""

    def __init__(self, options: EngineOptions, config: PreTrainedConfig, device: torch.device) -> None:
        files = find_graphs(Path(options.model_path), encoder_decoder=True)
        assert files.encoder is not None
        self._encoder = Session(files.encoder, device, options.num_threads)
        self._encoder.check_signature(inputs={"input_ids", "attention_mask"}, outputs={_HIDDEN_STATES: 3})
        _OnnxModel.__init__(self, options, config, device, files)
        EncoderDecoder.__init__(self, load_generation_config(options, config), self._decoder.vocab_size, device)
        most = getattr(config, "max_position_embeddings", None) or options.max_sequence_length
        self.info = msgspec.structs.replace(
            self.info,
            max_positions=min(options.max_sequence_length, most),
            decoder_start_token_id=self.decoder_start_token_id,
            forced_bos_token_id=self.forced_bos_token_id,
        )
        self._check_padding(options, self._probe_outputs)

    def prefill(self, seqs: list[Sequence]) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Encode the inputs, then decode the start tokens and any earlier outputs."""
        encoder = self._encode([encoder_input(seq) for seq in seqs])
        past, ids, mask = self._decoder_inputs(seqs)
        logits = self._decoder.run(past, ids, mask, encoder)[:, -1]
        self._fill_caches(len(seqs), past, encoder.past)
        return self.prefilled(seqs, logits)

    def decode(self, last_tokens: Tensor) -> Tensor:
        logits = super().decode(last_tokens)
        self.constrain(logits, [])
        return logits

    def _encode(self, inputs: list[list[int]]) -> EncoderOutputs:
        """The encoder's output, right-aligned, though its input is left-aligned."""
        ids, mask = (tensor.to(self._device) for tensor in left_aligned(inputs))
        states = self._empty_hidden_states(*ids.shape)
        self._encoder.run({"input_ids": ids, "attention_mask": mask}, {_HIDDEN_STATES: states})
        states = right_aligned_states([row[: len(tokens)] for row, tokens in zip(states, inputs, strict=True)])
        past = self._decoder.new_past(self._decoder.cross_attention_names, len(inputs))
        return EncoderOutputs(mask.flip(-1), states, past)

    def _probe_outputs(self, rows: int) -> EncoderOutputs:
        """The encoder's outputs for rows with the same input."""
        return self._encode([[4, 5, 6]] * rows)

    def _encoder_outputs(self) -> EncoderOutputs:
        cache = self._caches[1]
        mask = cache.attention_mask(0, cache.width)
        return EncoderOutputs(mask, self._empty_hidden_states(len(mask), 1), cache.contiguous())

    def _empty_hidden_states(self, rows: int, columns: int) -> Tensor:
        node = self._encoder.outputs[_HIDDEN_STATES]
        return torch.zeros((rows, columns, node.dim(2)), dtype=node.dtype, device=self._device)


def _engine_info(options: EngineOptions, config: PreTrainedConfig, decoder: Decoder) -> EngineInfo:
    name, device = (config.architectures or [type(config).__name__])[0], decoder.device
    return EngineInfo(
        engine="hf_optimum_ort",
        model_class=f"{name} (ONNX)",
        device=str(device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        vocab_size=decoder.vocab_size,
        input_vocab_size=config.vocab_size if config.is_encoder_decoder else decoder.vocab_size,
        encoder_decoder=config.is_encoder_decoder,
        padded=True,
        max_batch_size=options.max_batch_size or DEFAULT_MAX_BATCH_SIZE[device.type],
        max_prefill_tokens=MAX_PREFILL_TOKENS[device.type],
        max_positions=options.max_sequence_length,
        token_capacity=0,
    )
