"""Engine `tgis_native`: decoder-only models with a paged KV cache, without padding, with chunked prefill.

The model code is transformers' own, its attention replaced by ours, which is checked at load. Which sequences run, and
which blocks they have, is decided by the batcher.
"""

import itertools
import logging
import time
from collections.abc import Collection, Iterable
from functools import partial

import msgspec
import torch
from transformers import PreTrainedModel

from tgis.batcher.capacity import encoder_decoder_room
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult, warn
from tgis.engines.kernels.kv_codes import codes_of
from tgis.engines.loading.loader import (
    input_vocab_size,
    load_causal_lm,
    load_config,
    load_model,
    max_positions,
    model_info,
    select_device,
    select_kernels,
)
from tgis.engines.loading.rope import compute_angles, tabulate_angles
from tgis.engines.loading.sharding import least_of_ranks, reduces_in_kernels, sum_of_ranks
from tgis.engines.loading.unloaded import UnloadedModel, unknown_memory
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import embed_with_prompts
from tgis.engines.memory.available import (
    device_errors,
    warm_up_errors,
)
from tgis.engines.memory.profiler import DummyRunner, profile
from tgis.engines.paged.async_decode import AsyncDecoder, InFlightStep
from tgis.engines.paged.attention import PagedAttention, PagedKVCache
from tgis.engines.paged.attention_hooks import cross_attention_modules, repeats_of_keys
from tgis.engines.paged.batch import BatchBuilder, FlatBatch
from tgis.engines.paged.capacity import BLOCK_SIZE, KVBudget
from tgis.engines.paged.compile import CompiledLayers, can_compile
from tgis.engines.paged.cuda_graphs import Capture, DecodeGraphs, cuda_capture
from tgis.engines.paged.drafts import load_drafter, unloaded_drafter
from tgis.engines.paged.encoder_decoder import EXTRA_BLOCKS, EncoderDecoderBatches, PagedEncoder
from tgis.engines.paged.proposals import Drafter, keep_what_follows, with_proposals
from tgis.engines.paged.recorded_steps import RecordedSteps
from tgis.engines.paged.self_check import (
    dummy_adapter,
    dummy_sequence,
    on_all_ranks,
    verify_attention,
    verify_encoder_decoder,
    verify_steps,
)
from tgis.engines.sampling.draws import select_ops
from tgis.engines.sampling.grammar_masks import append_forced_tokens
from tgis.engines.sampling.logprobs import PromptLogprobs
from tgis.engines.sampling.sampler import BatchSampler, SampledTokens
from tgis.errors import Unsupported
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import Request, SamplingParams
from tgis.prompts.lora import LoraAdapter

log = logging.getLogger(__name__)

_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}  # in a step without decodes; more do not raise throughput
_MAX_PREFILL_GAP_MS = {"cpu": 250, "cuda": 150}  # less costs throughput
_MIN_LORA_COLUMNS = {"cpu": 0, "cuda": 64}  # in the bank of LoRA adapters; on CPUs each column costs time
_CODED = torch.bfloat16  # whose tolerance logits from codes of 8 bits get: rounding to these is as coarse
_KEY_SCALE_TOKENS = 128  # of a random prompt, and of its output: more change little
_WARM_SAMPLER_ROWS = 8, 1  # batch sizes; kernels are self-tested with the first


def describe_memory(options: EngineOptions) -> list[str]:
    """What a start will need. StartError if it would find no room, Unsupported for an encoder-decoder without hooks."""
    unloaded = UnloadedModel(options)
    if unloaded.config.is_encoder_decoder and unloaded.model is not None:
        cross_attention_modules(unloaded.model)
    if not unloaded.caches:
        return unknown_memory("tgis_native", options)
    device, rows = unloaded.device, unloaded.max_batch_size
    tokens = min(_PREFILL_TOKENS[device.type], rows * options.max_sequence_length)
    encodes = len(unloaded.caches) > 1
    if encodes:  # inputs are whole
        step = unloaded.step_bytes(max(tokens, options.max_sequence_length), logits=rows, logprobs=0, pairs=False)
    else:
        step = unloaded.step_bytes(tokens, logits=tokens, logprobs=tokens)
    drafter, drafting = unloaded_drafter(options, unloaded.model) if _drafts(options, device) else (0, [])
    each = 0
    for model in (unloaded, *drafting):
        if not model.caches:
            return unknown_memory("tgis_native", options)
        each += sum(model.caches[0]) // model.kv_shards // repeats_of_keys(model.config)
    extra = EXTRA_BLOCKS if encodes else 0
    budget = KVBudget(options, device, rows, to_load=unloaded.weights + drafter, extra_blocks=extra)
    room = BLOCK_SIZE * budget.num_blocks(each * BLOCK_SIZE, lambda: step)
    longest = encoder_decoder_room(room, BLOCK_SIZE) if encodes else room
    return unloaded.table("tgis_native", longest, (room, each, 0), step, drafter)


class PagedEngine:
    """The engine; of a sequence it keeps the KV cache, the logprobs of an unfinished prompt, and a step in flight."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        async_decode: bool | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Unsupported if the model's attention cannot be replaced.

        With `async_decode`, by default on CUDA, steps are launched before they are planned.
        """
        torch.set_grad_enabled(False)
        self._options = options
        self._block_size = block_size
        self._max_blocks = -(-options.max_sequence_length // block_size)  # of a sequence
        self._device = select_device(options)
        self._codes = codes_of(options.kv_cache_dtype, self._device)  # of the KV cache
        self._model, self._arguments = _load(options, self._device)
        self._kernels = select_kernels(options, self._device)
        self._lora = LoraLayers(self._model, self._kernels, _MIN_LORA_COLUMNS[self._device.type])
        self._attention = PagedAttention(f"tgis_paged_{id(self)}", block_size, self._kernels)
        vocab_size = model_info(self._model).vocab_size
        self._batch_builder = BatchBuilder(block_size, self._device, self._lora)
        self._encoder: PagedEncoder | None = None
        history = _token_history
        if self._model.config.is_encoder_decoder:
            self._max_blocks += EXTRA_BLOCKS
            self._encoder = PagedEncoder(self._model, self._attention, self._lora, options.max_sequence_length)
            self._batch_builder = EncoderDecoderBatches(block_size, self._device, self._lora, self._encoder)
            history = self._encoder.outputs.token_history
        decoder = self._model.get_decoder() if self._encoder else self._model
        self._embed_tokens = decoder.get_input_embeddings()
        ops = select_ops(self._device, self._kernels)
        self._sampler = BatchSampler(vocab_size, options.eos_ids, self._device, history, ops)
        self._prompt_logprobs = PromptLogprobs()
        if async_decode is None:
            async_decode = self._device.type == "cuda" and not self._encoder
        launch_next = self._launch_next if async_decode else None
        self._decoder = AsyncDecoder(self._launch, launch_next, self._sampler, self._prompt_logprobs, block_size)
        self._compiled: CompiledLayers | None = None
        self._graphs: DecodeGraphs | RecordedSteps | None = None
        self._drafter = Drafter()
        self._verify_attention()
        self._drafter = self._load_drafter()
        self.info = self._describe(lookahead=int(async_decode))

    def _verify_attention(self) -> None:
        """Replace the model's attention, for good; Unsupported if that changes what the model gives."""
        length = self._options.max_sequence_length
        if self._encoder:
            steps = self._batch_builder.build, self.compute_logits
            start, install = self._encoder.outputs.decoder_start_token_id, self._encoder.install
            verify_encoder_decoder(self._model, self._attention, *steps, start, install, length)
        else:
            verify_attention(self._model, self._attention, self.compute_logits, length)
        if self._codes:
            self._quantize_cache(self._codes)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _quantize_cache(self, codes: torch.dtype) -> None:
        """Store keys and values as codes from now on, where the first pass fixes what keys are divided by. Unsupported
        if its logits are not those without codes. Leaves a KV cache of the tokens of this pass.
        """
        length = self._options.max_sequence_length
        positions = self._encoder.max_positions if self._encoder else max_positions(self._model)
        count = max(min(_KEY_SCALE_TOKENS, length // 2, positions // 2), 2)
        vocab_size = min(input_vocab_size(self._model), model_info(self._model).vocab_size)
        draw = torch.Generator().manual_seed(0)
        tokens, output = torch.randint(vocab_size, (2, count), generator=draw).tolist()
        plain, found = (self._long_logits(tokens, output, each) for each in (None, codes))
        verify_steps(f"KV_CACHE_DTYPE={self._options.kv_cache_dtype}", found, plain, _CODED)

    def _long_logits(self, tokens: list[int], output: list[int], codes: torch.dtype | None) -> torch.Tensor:
        blocks = -(-len(tokens + output) // self._block_size) + EXTRA_BLOCKS
        self._attention.cache = PagedKVCache(blocks, self._block_size, codes)
        return self._dummy_logits(tokens=tokens, output=output)

    def _describe(self, lookahead: int) -> EngineInfo:
        embed_tokens = self._encoder.embed_tokens if self._encoder else self._embed_tokens
        has_embeds = self._encoder or "inputs_embeds" in self._arguments
        return model_info(self._model).engine_info(
            "tgis_native",
            self._options,
            self._device,
            padded=False,
            max_prefill_tokens=_PREFILL_TOKENS[self._device.type],
            block_size=self._block_size,
            lookahead=lookahead,
            max_prefill_gap_ms=_MAX_PREFILL_GAP_MS[self._device.type],
            proposed_tokens=0 if lookahead else _proposed_tokens(self._options, self._device),
            drafted_tokens=self._drafter.max_tokens,
            max_positions=self._encoder.max_positions if self._encoder else max_positions(self._model),
            decoder_start_token_id=self._encoder.outputs.decoder_start_token_id if self._encoder else None,
            embedding_size=embed_tokens.embedding_dim if has_embeds else 0,
            lora_targets=self._lora.targets,
            kv_cache_dtype=self._options.kv_cache_dtype if self._attention.cache.codes else "auto",
        )

    def _load_drafter(self) -> Drafter:
        """The model that drafts tokens for this one, if there is to be one: whole, on the first rank."""
        if not _drafts(self._options, self._device):
            return Drafter()
        load = partial(PagedEngine, async_decode=False, block_size=self._block_size)
        return load_drafter(self._options, self._model, "logits_to_keep" in self._arguments, load)

    @warm_up_errors()
    def warm_up(self) -> None:
        """Allocate the KV cache; compile and capture what can be."""
        self._allocate_cache()
        self._decoder.reset()
        started = time.monotonic()
        eager_logits = self._dummy_logits()
        self._warm_sampler(eager_logits)
        log.info("warm after %.1f s", time.monotonic() - started)
        on_cuda = self._device.type == "cuda"
        wanted = self._options.compile
        if wanted and (self._encoder or self._codes):
            what = "encoder-decoders are" if self._encoder else f"KV_CACHE_DTYPE={self._options.kv_cache_dtype} is"
            warn(self._options, f"PT2_COMPILE has no effect: {what} not compiled")
        elif on_cuda if wanted is None else wanted:
            self._compile(eager_logits)
        if on_cuda:
            self._capture_graphs(cuda_capture(), eager_logits)
        if not self._compiled:
            self._record_steps(eager_logits)
        self._drafter.warm_up(self._attention.cache.num_blocks)
        self.clear_cache()

    def warm_up_with(self, num_blocks: int) -> None:
        """Warm up with the blocks of another engine, which is all that uses this one."""
        self._attention.cache = PagedKVCache(num_blocks, self._block_size)
        self._record_steps(self._dummy_logits())

    def _record_steps(self, eager_logits: torch.Tensor) -> None:
        """Record steps from now on, where C kernels compute them."""
        if self._kernels and self._attention.runs_cpu_kernel and reduces_in_kernels(self._model):
            self._tabulate_angles(eager_logits)
            rows = max(self.info.max_batch_size, 1 + self.info.proposed_tokens)
            sizes = rows, self._max_blocks, self.info.max_prefill_tokens
            self._graphs = RecordedSteps(self._forward, self._kernels, *sizes, cross_attention=bool(self._encoder))
            for _ in ("recorded", "verified"):
                self._dummy_logits()

    def _allocate_cache(self) -> None:
        """Take the memory that the largest step leaves."""
        bytes_per_block = sum(cache.bytes_per_block for cache in self.caches)
        measure = partial(profile, self, self._options, self._device)
        extra = EXTRA_BLOCKS if self._encoder else 0
        budget = KVBudget(self._options, self._device, self.info.max_batch_size, self._block_size, extra_blocks=extra)
        num_blocks = least_of_ranks(budget.num_blocks(bytes_per_block, measure))
        scratch_blocks = 1  # the last one: padding of CUDA graphs writes there
        self._attention.cache = PagedKVCache(num_blocks + scratch_blocks, self._block_size, self._codes)
        log.info(
            "KV cache: %d blocks of %d tokens, %.1f KiB a token, %.2f GiB in all%s",
            num_blocks,
            self._block_size,
            bytes_per_block / self._block_size / 1024,
            num_blocks * bytes_per_block / 2**30,
            f", in {self._options.kv_cache_dtype}" if self._codes else "",
        )
        capacity = num_blocks * self._block_size
        self.info = msgspec.structs.replace(
            self.info,
            token_capacity=capacity,
            max_request_tokens=encoder_decoder_room(capacity, self._block_size) if self._encoder else capacity,
            kv_cache_bytes=sum_of_ranks(num_blocks * bytes_per_block),
        )

    def _warm_sampler(self, logits: torch.Tensor) -> None:
        """Sample in every way once, since kernels compile at their first use."""
        drawn = SamplingParams(temperature=1.0)
        filtered = ({"top_k": 4}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.9})
        kinds = SamplingParams(), drawn, *(msgspec.structs.replace(drawn, **each) for each in filtered)
        for kind, count in itertools.product(kinds, _WARM_SAMPLER_ROWS):
            params = [msgspec.structs.replace(kind, seed=seed) for seed in range(count)]
            seqs = [Sequence(Request(-1 - n, [1], 2, sampling_params=each), 0.0) for n, each in enumerate(params)]
            self._sampler.sample_and_wait(seqs, logits[:1].repeat(count, 1))

    def _tabulate_angles(self, eager_logits: torch.Tensor) -> None:
        """Look rotary angles up in tables, unless steps with the tables differ from eager ones."""
        if not tabulate_angles(self._model, self._max_blocks * self._block_size):
            return
        try:
            dtype = _CODED if self.info.kv_cache_dtype != "auto" else self._model.dtype
            verify_steps("tabulated", self._dummy_logits(), eager_logits, dtype)
        except Unsupported as error:
            compute_angles(self._model)
            log.warning("the model computes its rotary embeddings in every step: %s", error)

    def _dummy_logits(
        self, adapter: LoraAdapter | None = None, tokens: Iterable[int] = range(1, 14), output: Iterable[int] = (14,)
    ) -> torch.Tensor:
        """The logits of a prefill and of a decode, [2, V]. The prefill usually has 13 tokens: a compiler assumes that
        sizes which are equal now, such as the number of tokens and the size of a head, are always equal.
        """
        extra = EXTRA_BLOCKS if self._encoder else 0
        seq = dummy_sequence([*tokens], self._block_size, output=[*output], extra_blocks=extra)
        seq.adapter = adapter
        logits = []
        for count in (len(seq.tokens) - 1, 1):
            logits.append(self.compute_logits(StepPlan([seq], [count], [seq], has_prefill=count > 1))[0])
            seq.num_computed_tokens += count
        return torch.cat(logits)

    def _compile(self, eager_logits: torch.Tensor) -> None:
        """Compile the model's layers; where that fails, steps run eagerly."""
        if not least_of_ranks(int(can_compile(self._model))):
            warn(self._options, "PT2_COMPILE has no effect: CPU kernels have replaced the model's operators already")
            return
        started = time.monotonic()
        log.info("compiling the model's layers")
        adapter = None
        if self._options.adapter_store:
            adapter = dummy_adapter(self._lora.targets, self._model.dtype, self._device)
        try:
            changed_logits = on_all_ranks(partial(self._dummy_logits, adapter))
            lora = self._lora if adapter else None
            self._compiled = on_all_ranks(lambda: CompiledLayers(self._model, self._attention, lora))
            on_all_ranks(self._compiled.enable)
            self._compile_graphs(self._compiled, eager_logits)
        except Unsupported as error:
            text = f"PT2_COMPILE has no effect: {error}"
            if self._compiled:
                self._compiled.disable()
            if self._options.compile:
                warn(self._options, text)
            else:
                log.warning("%s", text)
        else:
            if adapter:
                self._compile_lora(self._compiled, adapter, changed_logits)
            self._compiled.freeze()
            log.info("compiled in %.1f s", time.monotonic() - started)
        if adapter:
            self._lora.clear()

    def _compile_lora(self, compiled: CompiledLayers, adapter: LoraAdapter, eager_logits: torch.Tensor) -> None:
        """Compile the graphs of passes with LoRA adapters."""
        try:
            self._compile_graphs(compiled, eager_logits, adapter)
        except Unsupported as error:
            log.warning("passes with LoRA adapters are not compiled: %s", error)
            compiled.lora_is_eager = True

    def _compile_graphs(
        self, compiled: CompiledLayers, eager_logits: torch.Tensor, adapter: LoraAdapter | None = None
    ) -> None:
        """Compile the graphs of passes with an adapter, or without; Unsupported unless they give these logits."""
        with compiled.without_communication():  # a rank whose compiler fails leaves no other one waiting
            on_all_ranks(partial(self._dummy_logits, adapter))
        on_all_ranks(lambda: verify_steps("compiled", self._dummy_logits(adapter), eager_logits, self._model.dtype))

    def _capture_graphs(self, capture: Capture, eager_logits: torch.Tensor) -> None:
        """Capture decode steps; a model that cannot be captured runs without graphs."""
        info = self.info
        graphs = DecodeGraphs(
            *(self._forward, info.max_batch_size, self._max_blocks),
            scratch_slot=info.token_capacity,
            cross_attention=bool(self._encoder),
        )
        self._graphs = graphs
        try:
            with torch.inference_mode():
                graphs.capture(capture, self._device)
            on_all_ranks(lambda: verify_steps("captured", self._dummy_logits(), eager_logits, self._model.dtype))
        except Unsupported as error:
            log.warning("decode steps run without CUDA graphs: %s", error)
            self._graphs = None

    def draft(self, plan: StepPlan) -> None:
        """Draft what the plan asks for, before a step that other ranks compute as well: they get the drafts with it."""
        with device_errors("drafting"), torch.inference_mode():
            self._drafter.draft(plan)

    def step(self, plan: StepPlan) -> StepResult:
        """Compute the scheduled tokens, except those that a step in flight computes already."""
        if plan.drafts and self._options.num_shards == 1:
            self.draft(plan)
        what = f"a step of {len(plan.seqs)} rows and {sum(plan.num_scheduled_tokens)} tokens"
        with device_errors(what), torch.inference_mode():
            if plan.proposals:
                rows = with_proposals(plan)
                result = keep_what_follows(plan, rows, self._decoder.step(rows))
            else:
                result = self._decoder.step(plan)
            self._drafter.note(plan, result)
            append_forced_tokens(plan.sampled, result)
        if self._encoder:
            result.prompt_logprobs |= self._encoder.outputs.prompt_logprobs(plan.sampled)
        return result

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute_logits(self, plan: StepPlan) -> tuple[torch.Tensor, dict[int, slice]]:
        """The logits of a step, and the slices of them for prompt logprobs, in the order of `BatchBuilder.build`."""
        batch, prompt_slices = self._batch_builder.build(plan)
        return self._run_model(batch), prompt_slices

    def release(self, seqs: Collection[Sequence]) -> None:
        self._prompt_logprobs.release(seqs)
        self._decoder.release(seq.id for seq in seqs)
        self._drafter.release(seqs)

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        return self._attention.cache, *self._drafter.caches

    def clear_cache(self) -> bool:
        return all(cache.clear() for cache in self.caches)

    @property
    def resident_cache_bytes(self) -> int:
        return sum(cache.resident_bytes for cache in self.caches)

    @property
    def kv_cache_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def find_peak(self, runner: DummyRunner) -> int:
        blocks, longest = self._attention.cache.num_blocks, self._options.max_sequence_length
        if self._encoder:
            return runner.encoder_peak(min(longest, self._encoder.max_positions), blocks)
        return runner.paged_peak(longest, blocks)

    def close(self) -> None:
        """Do nothing: the process ends next."""

    def _launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step on the device."""
        step_metadata = self._sampler.prepare(plan.sampled)
        batch, prompt_slices = self._batch_builder.build(plan, step_metadata)
        logits = self._run_model(batch)
        prompt_chunks = self._prompt_logprobs.start(plan, prompt_slices, logits)
        logits = logits[: len(plan.sampled)]
        if self._encoder:
            first_steps = [row for row, seq in enumerate(plan.sampled) if not seq.num_generated_tokens]
            self._encoder.outputs.constrain(logits, first_steps)
        return InFlightStep(self._sample(batch, logits), prompt_chunks)

    def _launch_next(self, seqs: list[Sequence], tokens: torch.Tensor, token_indices: list[int]) -> InFlightStep:
        """Queue the step after one whose tokens are still on the device."""
        step_metadata = self._sampler.prepare(seqs, lookahead=1)
        batch = self._batch_builder.build_next(seqs, tokens, token_indices, step_metadata)
        return InFlightStep(self._sample(batch, self._run_model(batch)), [])

    def _sample(self, batch: FlatBatch, logits: torch.Tensor) -> SampledTokens:
        """Sample from `logits`, which are those of the first `batch.logits_indices`."""
        count = len(logits)
        newest = batch.input_ids[:count] if batch.all_logits else batch.input_ids[batch.logits_indices[:count]]
        return self._sampler.sample(logits, newest, batch.step_metadata)

    def _run_model(self, batch: FlatBatch) -> torch.Tensor:
        if self._encoder and batch.encoder:
            self._encoder.encode(batch.encoder)
        replayed = self._graphs.run(batch) if self._graphs else None
        self._drafter.computed(None if replayed is None or batch.chunks else batch.logits_indices)
        return self._forward(batch) if replayed is None else replayed

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        """The logits [len(logits_indices), V] of a batch."""
        self._attention.batch = batch
        input_ids = batch.input_ids[None]
        embeds = embed_with_prompts(self._embed_tokens, input_ids, batch.spans)
        arguments = {"input_ids": input_ids} if embeds is None else {"inputs_embeds": embeds}
        selects = self._encoder is not None or "logits_to_keep" in self._arguments
        if self._encoder:
            arguments = self._encoder.decoder_arguments(batch, arguments)
        else:
            if selects and not batch.all_logits:
                arguments["logits_to_keep"] = batch.logits_indices
            # Compiled graphs guard the storage offset of a view, which differs from step to step.
            arguments["position_ids"] = (batch.positions.clone() if self._compiled else batch.positions)[None]

        def forward() -> torch.Tensor:
            logits: torch.Tensor = self._model(use_cache=False, **arguments).logits[0]
            return logits

        with self._lora.using(batch.adapters):
            logits = self._compiled.run(forward) if self._compiled else forward()
        return logits if selects or batch.all_logits else logits[batch.logits_indices]


def _load(options: EngineOptions, device: torch.device) -> tuple[PreTrainedModel, frozenset[str]]:
    """The model, and the names of the arguments that the forward of a decoder-only one takes."""
    if load_config(options).is_encoder_decoder:
        return load_model(options, device), frozenset()
    return load_causal_lm(options, device)


def _proposed_tokens(options: EngineOptions, device: torch.device) -> int:
    """The tokens that are verified for a sequence in one step."""
    return options.speculation_max_tokens if device.type == "cpu" and options.speculation != "off" else 0


def _drafts(options: EngineOptions, device: torch.device) -> bool:
    """Whether a model drafts tokens on this rank."""
    return bool(options.speculator_path and not options.rank and _proposed_tokens(options, device))


def _token_history(seq: Sequence) -> list[int]:
    """Prompt and generated tokens; placeholders of a soft prompt are left out."""
    return seq.tokens[seq.request.soft_prompt_length :]
