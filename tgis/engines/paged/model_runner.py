"""Computes the logits of steps: eagerly, compiled, from captured graphs, or from recorded calls of kernels.

The model code is transformers' own, its attention replaced by ours, which is checked at load.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import signature

import torch

from tgis.batcher.sequence import StepPlan
from tgis.engines.base import warn
from tgis.engines.kernels.cpu.activations import InvariantFunctions
from tgis.engines.kernels.cpu.experts import PackedExperts
from tgis.engines.kernels.cpu.library import DTYPES
from tgis.engines.kernels.kv_codes import kv_dtype_of
from tgis.engines.loading.loader import (
    input_vocab_size,
    load_model,
    max_positions,
    select_device,
    select_kernels,
)
from tgis.engines.loading.rope import tabulate_angles
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import model_inputs
from tgis.engines.paged.attention import PagedAttention, PagedKVCache
from tgis.engines.paged.batch import BatchBuilder, FlatBatch, StaticInputs
from tgis.engines.paged.compile import CompiledLayers, can_compile
from tgis.engines.paged.cuda_graphs import Capture, DecodeGraphs, cuda_capture
from tgis.engines.paged.encoder_decoder import EXTRA_BLOCKS, EncoderDecoderBatches, PagedEncoder
from tgis.engines.paged.recorded_steps import RecordedSteps
from tgis.engines.paged.self_check import (
    dummy_adapter,
    dummy_sequence,
    on_all_ranks,
    step_logits,
    verify_attention,
    verify_encoder_decoder,
    verify_steps,
)
from tgis.engines.paged.states import install_states
from tgis.engines.sharding.collectives import least_of_ranks, reduces_in_kernels
from tgis.errors import Unsupported
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.prompts.lora import LoraAdapter

log = logging.getLogger(__name__)

# Minimum of columns in the bank of LoRA adapters; on CPUs each column costs time.
_MIN_LORA_COLUMNS = {"cpu": 0, "cuda": 64}
_CODED = torch.bfloat16  # whose tolerance logits from codes of 8 bits get: rounding to these is as coarse
_KEY_SCALE_TOKENS = 128  # tokens of a random prompt, and of its output: more change little


class ModelRunner:
    """A model with paged attention."""

    def __init__(self, options: EngineOptions, block_size: int) -> None:
        """Unsupported if the model's attention cannot be replaced."""
        self._options = options
        self._block_size = block_size
        self._max_blocks = -(-options.max_sequence_length // block_size)  # blocks of the longest sequence
        self.device = select_device(options)
        # Dtype of codes in the KV cache; None: the model's dtype.
        self.kv_dtype = kv_dtype_of(options.kv_cache_dtype, self.device)
        self.model = load_model(options, self.device)
        self.vocab_size: int = self.model.get_output_embeddings().out_features
        self.arguments = signature(self.model.forward).parameters
        self.kernels = select_kernels(options, self.device)
        self.lora = LoraLayers(self.model, self.kernels, _MIN_LORA_COLUMNS[self.device.type])
        self.attention = PagedAttention(f"tgis_paged_{id(self)}", block_size, self.kernels)
        self.states = self.attention.states = install_states(self.model, self.kernels)
        self._functions: AbstractContextManager[object] = nullcontext()
        has_experts = any(isinstance(module, PackedExperts) for module in self.model.modules())
        if self.kernels and self.model.dtype in DTYPES and (self.states or has_experts):
            self._functions = InvariantFunctions(self.kernels)
        self.batch_builder = BatchBuilder(block_size, self.device, self.lora, has_states=bool(self.states))
        self.encoder: PagedEncoder | None = None
        if self.model.config.is_encoder_decoder:
            self._max_blocks += EXTRA_BLOCKS
            self.encoder = PagedEncoder(self.model, self.attention, self.lora, options.max_sequence_length)
            self.batch_builder = EncoderDecoderBatches(block_size, self.device, self.lora, self.encoder)
        decoder = self.model.get_decoder() if self.encoder else self.model
        self.embed_tokens = decoder.get_input_embeddings()
        self.compiled: CompiledLayers | None = None
        self.graphs: DecodeGraphs | RecordedSteps | None = None
        self._verify_attention()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute_logits(self, plan: StepPlan) -> tuple[torch.Tensor, dict[int, slice]]:
        """The logits of a step, and the slices of them for prompt logprobs, in the order of `BatchBuilder.build`."""
        batch, prompt_slices = self.batch_builder.build(plan)
        return self.run(batch), prompt_slices

    def run(self, batch: FlatBatch) -> torch.Tensor:
        """The logits [len(logits_indices), V] of a batch."""
        if self.encoder and batch.encoder:
            self.encoder.encode(batch.encoder)
        replayed = self.graphs.run(batch) if self.graphs else None
        return self._forward(batch) if replayed is None else replayed

    def optimize(self, eager_logits: torch.Tensor, info: EngineInfo) -> None:
        """Compile, capture and record what can be; the KV cache has been allocated."""
        on_cuda = self.device.type == "cuda"
        asked = self._options.compile
        if asked and (self.encoder or self.kv_dtype):
            what = "encoder-decoders are" if self.encoder else f"KV_CACHE_DTYPE={self._options.kv_cache_dtype} is"
            warn(self._options, f"PT2_COMPILE has no effect: {what} not compiled")
        elif on_cuda if asked is None else asked:
            self._compile(eager_logits)
        if on_cuda:
            self.capture_graphs(cuda_capture(), eager_logits, info)
        if not self.compiled:
            self.record_steps(info)

    def dummy_logits(
        self, adapter: LoraAdapter | None = None, tokens: Iterable[int] = range(1, 14), output: Iterable[int] = (14,)
    ) -> torch.Tensor:
        """The logits of a prefill and of a decode, [2, V]. The prefill usually has 13 tokens: a compiler assumes that
        sizes which are equal now, such as the number of tokens and the size of a head, are always equal.
        """
        seq = dummy_sequence([*tokens], self._block_size, output=[*output])
        seq.adapter = adapter
        return step_logits(self.compute_logits, seq, (len(seq.tokens) - 1, 1))

    def record_steps(self, info: EngineInfo) -> None:
        """Record steps from now on, where C kernels compute them."""
        if self.kernels and self.attention.runs_cpu_kernel and reduces_in_kernels(self.model):
            tabulate_angles(self.model, self._max_blocks * self._block_size)
            inputs = self._static_inputs(max(info.max_batch_size, 1 + info.proposed_tokens))
            self.graphs = RecordedSteps(self._forward, self.kernels, inputs, info.max_prefill_tokens, self.states)
            for _ in ("recorded", "verified"):
                self.dummy_logits()

    def capture_graphs(self, capture: Capture, eager_logits: torch.Tensor, info: EngineInfo) -> None:
        """Capture decode steps; a model that cannot be captured runs without graphs."""
        inputs = self._static_inputs(info.max_batch_size)
        try:
            with torch.inference_mode():
                self.graphs = DecodeGraphs(self._forward, inputs, info.token_capacity, capture)
            on_all_ranks(lambda: verify_steps("captured", self.dummy_logits(), eager_logits, self.model.dtype))
        except Unsupported as error:
            log.warning("decode steps run without CUDA graphs: %s", error)
            self.graphs = None

    def _static_inputs(self, rows: int) -> StaticInputs:
        return StaticInputs(rows, self._max_blocks, self.device, cross_attention=self.encoder is not None)

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        """The logits [len(logits_indices), V] of a batch, computed by the model's operators."""
        self.attention.batch = batch
        arguments = model_inputs(self.embed_tokens, batch.input_ids[None], batch.spans)
        if self.encoder:
            arguments = self.encoder.decoder_arguments(batch, arguments)
        else:
            if not batch.all_logits:
                arguments["logits_to_keep"] = batch.logits_indices
            # Compiled graphs guard the storage offset of a view, which differs from step to step.
            arguments["position_ids"] = (batch.positions.clone() if self.compiled else batch.positions)[None]
        states_context = self.states.using(batch.state_slots, arguments) if self.states else nullcontext()

        def forward() -> torch.Tensor:
            return self.model(use_cache=False, **arguments).logits[0]

        with self.lora.using(batch.adapters), self._functions, states_context:
            return self.compiled.run(forward) if self.compiled else forward()

    def _verify_attention(self) -> None:
        """Replace the model's attention, for good; Unsupported if that changes what the model gives."""
        length = self._options.max_sequence_length
        if self.encoder:
            steps = self.batch_builder.build, self.compute_logits
            start, install = self.encoder.outputs.decoder_start_token_id, self.encoder.install
            verify = partial(verify_encoder_decoder, self.model, self.attention, *steps, start, install, length)
        else:
            verify = partial(verify_attention, self.model, self.attention, self.compute_logits, length)
        if self.model.sharding:
            on_all_ranks(verify)
        else:  # what drafts, too, which other ranks do not load
            verify()
        if self.kv_dtype:
            self._quantize_cache()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _quantize_cache(self) -> None:
        """Store keys and values as codes from now on, where the first pass fixes what keys are divided by. Unsupported
        if its logits are not those without codes. Leaves a KV cache of the tokens of this pass.
        """
        length = self._options.max_sequence_length
        positions = self.encoder.max_positions if self.encoder else max_positions(self.model)
        count = max(min(_KEY_SCALE_TOKENS, length // 2, positions // 2), 2)
        vocab_size = min(input_vocab_size(self.model), self.vocab_size)
        draw = torch.Generator().manual_seed(0)
        tokens, output = torch.randint(vocab_size, (2, count), generator=draw).tolist()
        expected, computed = (self._long_logits(tokens, output, dtype) for dtype in (None, self.kv_dtype))
        verify_steps(f"KV_CACHE_DTYPE={self._options.kv_cache_dtype}", computed, expected, _CODED)

    def _long_logits(self, tokens: list[int], output: list[int], kv_dtype: torch.dtype | None) -> torch.Tensor:
        blocks = -(-len(tokens + output) // self._block_size) + EXTRA_BLOCKS
        self.attention.cache = PagedKVCache(blocks, self._block_size, kv_dtype)
        return self.dummy_logits(tokens=tokens, output=output)

    def _compile(self, eager_logits: torch.Tensor) -> None:
        """Compile the model's layers; where that fails, steps run eagerly."""
        if not least_of_ranks(int(can_compile(self.model))):
            warn(self._options, "PT2_COMPILE has no effect: CPU kernels have replaced the model's operators already")
            return
        started = time.monotonic()
        log.info("compiling the model's layers")
        lora, passes = None, [(self.dummy_logits, eager_logits)]
        try:
            if self._options.adapter_store:
                lora, adapter = self.lora, dummy_adapter(self.lora.targets, self.model.dtype, self.device)
                adapted = partial(self.dummy_logits, adapter)
                passes.append((adapted, on_all_ranks(adapted)))
            self.compiled = CompiledLayers(self.model, self.attention, lora)
            on_all_ranks(self.compiled.enable)
            for run, logits in passes:
                self.compiled.make_graphs(run, logits)
        except Unsupported as error:
            text = f"PT2_COMPILE has no effect: {error}"
            if self.compiled:
                self.compiled.disable()
                self.compiled = None
            if self._options.compile:
                warn(self._options, text)
            else:
                log.warning("%s", text)
        else:
            self.compiled.freeze()
            log.info("compiled in %.1f s", time.monotonic() - started)
        if lora:
            lora.clear()
