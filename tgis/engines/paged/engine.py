"""Engine `tgis_native`: decoder-only models with a paged KV cache, without padding, with chunked prefill.

Which sequences run, and which blocks they have, is decided by the batcher; a ModelRunner computes their logits.
"""

import itertools
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import msgspec
import torch

from tgis.batcher.capacity import encoder_decoder_room
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult, warn
from tgis.engines.host_memory import upload
from tgis.engines.loading.arithmetic import is_invariant, with_arithmetic
from tgis.engines.loading.loader import engine_info, max_positions
from tgis.engines.loading.memory_estimate import UnloadedModel, unknown_memory
from tgis.engines.memory.available import device_errors, warm_up_errors
from tgis.engines.memory.capacity import KVBudget
from tgis.engines.memory.largest_step import step_bytes
from tgis.engines.memory.profiler import DummyRunner, profile
from tgis.engines.paged.async_decode import AsyncDecoder, InFlightStep, LogitsById
from tgis.engines.paged.attention import PagedKVCache
from tgis.engines.paged.attention_hooks import cross_attention_modules, repeats_of_keys
from tgis.engines.paged.encoder_decoder import EXTRA_BLOCKS
from tgis.engines.paged.model_runner import ModelRunner
from tgis.engines.paged.states import RecurrentStates, unloaded_slot_bytes
from tgis.engines.sampling.draws import select_ops
from tgis.engines.sampling.grammar_masks import append_forced_tokens
from tgis.engines.sampling.logprobs import PromptLogprobs
from tgis.engines.sampling.sampler import BatchSampler
from tgis.engines.sharding.collectives import least_of_ranks, sum_of_ranks
from tgis.engines.speculation.draft_model import load_drafter, unloaded_drafter
from tgis.engines.speculation.proposals import Drafter, keep_what_follows, with_proposals
from tgis.errors import Unsupported, library_errors
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import Request, SamplingParams
from tgis.utils.logs import format_bytes

log = logging.getLogger(__name__)

BLOCK_SIZE = 16  # tokens
_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}  # tokens of a step without decodes; more do not raise throughput
_MAX_PREFILL_GAP_MS = {"cpu": 250, "cuda": 150}  # less costs throughput
_WARM_SAMPLER_ROWS = 8, 1  # batch sizes; kernels are self-tested with the first


def describe_memory(options: EngineOptions) -> list[str]:
    """What a start will need. StartError if it would find no room, Unsupported for an encoder-decoder without hooks."""
    unloaded = UnloadedModel(options)
    if unloaded.config.is_encoder_decoder:
        cross_attention_modules(unloaded.model)
    device, rows = unloaded.device, unloaded.max_batch_size
    encodes = len(unloaded.caches) > 1
    step = _largest_step(partial(step_bytes, unloaded.model), options, device, rows, encodes=encodes)
    drafter, drafting = unloaded_drafter(options, unloaded.model) if _drafts(options, device) else (0, [])
    models = unloaded, *drafting
    if not all(model.caches for model in models):
        return unknown_memory("tgis_native", options)
    token_bytes = sum(sum(model.caches[0]) // model.kv_shards // repeats_of_keys(model.config) for model in models)
    extra = EXTRA_BLOCKS if encodes else 0
    to_load = unloaded.weights + drafter // options.ranks_per_node  # only the first rank drafts
    with library_errors("tgis_native cannot run it", Unsupported):
        slot_bytes = unloaded_slot_bytes(unloaded.model)
    budget = KVBudget(options, device, rows, BLOCK_SIZE, to_load, extra)
    num_slots, proposed = 0, _proposed_tokens(options, device)
    if slot_bytes:
        num_slots, budget = budget.with_states(slot_bytes, proposed, lambda: step)
    room = BLOCK_SIZE * budget.num_blocks(token_bytes * BLOCK_SIZE, lambda: step)
    longest = encoder_decoder_room(room, BLOCK_SIZE) if encodes else room
    states = f"states of recurrent layers: {num_slots} slots of {format_bytes(slot_bytes)}"
    others = {"weights of SPECULATOR_NAME": drafter, states: num_slots * slot_bytes}
    return unloaded.table("tgis_native", longest, (room, token_bytes, 0), step, others)


class PagedEngine(Engine):
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
        with library_errors("tgis_native cannot run it", Unsupported):
            self.runner = runner = ModelRunner(options, block_size)
        history = runner.encoder.outputs.token_history if runner.encoder else _token_history
        vocab_size, ops = runner.vocab_size, select_ops(runner.device, runner.kernels)
        ends, forced = options.config_eos_ids, runner.encoder and runner.encoder.outputs.forced_bos_token_id
        num_forced = int(forced is not None)
        sampling = vocab_size, options.eos_ids, runner.device, history, ops, ends, num_forced
        self._sampler = BatchSampler(*sampling)
        # For grammars: their logits of a step that is launched ahead are sampled with the next plan.
        self._late_sampler = BatchSampler(*sampling)
        self._prompt_logprobs = PromptLogprobs()
        if async_decode is None:
            async_decode = runner.device.type == "cuda" and not runner.encoder
        launch_next = self._launch_next if async_decode else None
        launches = self._launch, launch_next, self._launch_sampling
        self._decoder = AsyncDecoder(*launches, self._prompt_logprobs, block_size)
        self._drafter = self._load_drafter()
        self.info = self._describe(lookahead=int(async_decode))

    def _describe(self, lookahead: int) -> EngineInfo:
        runner, encoder, device = self.runner, self.runner.encoder, self.runner.device
        embed_tokens = encoder.embed_tokens if encoder else runner.embed_tokens
        has_embeds = encoder or "inputs_embeds" in runner.arguments
        info = engine_info(
            "tgis_native",
            runner.model,
            self._options,
            device,
            padded=False,
            max_prefill_tokens=_PREFILL_TOKENS[device.type],
            block_size=self._block_size,
            lookahead=lookahead,
            max_prefill_gap_ms=_MAX_PREFILL_GAP_MS[device.type],
            proposed_tokens=0 if lookahead else _proposed_tokens(self._options, device),
            drafted_tokens=self._drafter.max_tokens,
            max_positions=encoder.max_positions if encoder else max_positions(runner.model),
            decoder_start_token_id=encoder.outputs.decoder_start_token_id if encoder else None,
            embedding_size=embed_tokens.embedding_dim if has_embeds else 0,
            lora_targets=runner.lora.targets,
            kv_cache_dtype=self._options.kv_cache_dtype if runner.kv_dtype else "auto",
        )
        invariant = runner.attention.runs_cpu_kernel and is_invariant(runner.model, runner.kernels)
        return with_arithmetic(info, self._options, *((runner.model, runner.kernels) if invariant else ()))

    def _load_drafter(self) -> Drafter:
        """The model that drafts tokens for this one, if there is to be one: whole, on the first rank."""
        if not _drafts(self._options, self.runner.device):
            return Drafter()
        load = partial(PagedEngine, async_decode=False, block_size=self._block_size)
        return load_drafter(self._options, self.runner.model, load)

    @warm_up_errors()
    def warm_up(self) -> None:
        """Allocate the KV cache; compile and capture what can be."""
        self._allocate_cache()
        eager_logits = self.runner.dummy_logits()
        self._warm_sampler(eager_logits)
        self.runner.optimize(eager_logits, self.info)
        self._drafter.warm_up(self.runner.attention.cache.num_blocks)
        self.clear_cache()

    def warm_up_with(self, num_blocks: int) -> None:
        """Warm up with the blocks of another engine, which is all that uses this one."""
        self.runner.attention.cache = PagedKVCache(num_blocks, self._block_size)
        self.runner.record_steps(self.info)

    def _allocate_cache(self) -> None:
        """Take the memory that the largest step leaves."""
        bytes_per_block = sum(cache.bytes_per_block for cache in self.caches)
        extra = EXTRA_BLOCKS if self.runner.encoder else 0
        rows, device = self.info.max_batch_size, self.runner.device
        budget = KVBudget(self._options, device, rows, self._block_size, extra_blocks=extra)
        if self.runner.states:
            budget = self._allocate_states(self.runner.states, budget)
        num_blocks = least_of_ranks(budget.num_blocks(bytes_per_block, self._step_bytes))
        scratch_blocks = 1  # the last one: padding of CUDA graphs writes there
        self.runner.attention.cache = PagedKVCache(num_blocks + scratch_blocks, self._block_size, self.runner.kv_dtype)
        log.info(
            "KV cache: %d blocks of %d tokens, %.1f KiB a token, %.2f GiB in all%s",
            num_blocks,
            self._block_size,
            bytes_per_block / self._block_size / 1024,
            num_blocks * bytes_per_block / 2**30,
            f", in {self._options.kv_cache_dtype}" if self.runner.kv_dtype else "",
        )
        capacity = num_blocks * self._block_size
        self.info = msgspec.structs.replace(
            self.info,
            token_capacity=capacity,
            max_request_tokens=encoder_decoder_room(capacity, self._block_size) if self.runner.encoder else capacity,
            kv_cache_bytes=sum_of_ranks(num_blocks * bytes_per_block),
        )

    def _allocate_states(self, states: RecurrentStates, budget: KVBudget) -> KVBudget:
        """Take memory for states, snapshots and proposals; what is left for the KV cache and the rows."""
        slot_bytes = states.bytes_per_slot
        num_slots, budget = budget.with_states(slot_bytes, self.info.proposed_tokens, self._step_bytes)
        rows = budget.max_batch_size
        if rows < self.info.max_batch_size:
            warn(self._options, f"MAX_BATCH_SIZE is {rows}: each sequence has {format_bytes(slot_bytes)} of states")
        log.info("states of recurrent layers: %d slots of %s", num_slots, format_bytes(slot_bytes))
        states.allocate(num_slots)
        self.info = msgspec.structs.replace(self.info, max_batch_size=rows, state_slots=num_slots)
        return budget

    def _step_bytes(self) -> int:
        """Bytes that the largest step takes beside the KV cache. An estimate is good enough on CPUs, where the cache
        takes a part of the memory only, and for encoder-decoders, which leave a larger margin.
        """
        device, estimate, encodes = self.runner.device, self.runner.model.step_bytes, self.runner.encoder is not None
        if device.type == "cpu" or encodes:
            return _largest_step(estimate, self._options, device, self.info.max_batch_size, encodes=encodes)
        return profile(self, self._options, device)

    def _warm_sampler(self, logits: torch.Tensor) -> None:
        """Sample in every way once, since kernels compile at their first use."""
        drawn = SamplingParams(temperature=1.0)
        filtered = ({"top_k": 4}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.9})
        kinds = SamplingParams(), drawn, *(msgspec.structs.replace(drawn, **each) for each in filtered)
        for kind, count in itertools.product(kinds, _WARM_SAMPLER_ROWS):
            params = [msgspec.structs.replace(kind, seed=seed) for seed in range(count)]
            seqs = [Sequence(Request(-1 - n, [1], 2, sampling_params=each), 0.0) for n, each in enumerate(params)]
            self._sampler.sample_and_wait(seqs, logits[:1].repeat(count, 1))

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        if not plan.drafts:
            return plan
        with device_errors("drafting"), torch.inference_mode():
            drafts = self._drafter.draft(plan)
        return replace(plan, proposals={**plan.proposals, **drafts}, drafts={})

    def step(self, plan: StepPlan) -> StepResult:
        """Compute the scheduled tokens, except those that a step in flight computes already."""
        plan = self.with_drafts(plan)
        what = f"a step of {len(plan.seqs)} rows and {sum(plan.num_scheduled_tokens)} tokens"
        with device_errors(what), torch.inference_mode():
            if plan.proposals:
                rows = with_proposals(plan)
                result = keep_what_follows(plan, rows, self._decoder.step(rows))
            else:
                result = self._decoder.step(plan)
            result.verified = plan.proposals
            self._drafter.note(plan, result)
            if not self.info.lookahead:  # a step in flight computes one token of each sequence
                append_forced_tokens(plan.sampled, result)
        if self.runner.encoder:
            result.prompt_logprobs |= self.runner.encoder.outputs.prompt_logprobs(plan.sampled)
        return result

    def release(self, seqs: Collection[Sequence]) -> None:
        self._prompt_logprobs.release(seqs)
        self._decoder.release(seq.id for seq in seqs)
        for sampler in (self._sampler, self._late_sampler):
            sampler.release(seq.id for seq in seqs)
        self._drafter.release(seqs)

    def discard_step(self) -> None:
        self._decoder.discard()

    @property
    def caches(self) -> tuple[PagedKVCache, ...]:
        return self.runner.attention.cache, *self._drafter.caches

    def clear_cache(self) -> bool:
        if self.runner.states:
            self.runner.states.clear()
        return all(cache.clear() for cache in self.caches)

    @property
    def kv_cache_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def find_peak(self, runner: DummyRunner) -> int:
        return runner.paged_peak(self._options.max_sequence_length, self.runner.attention.cache.num_blocks)

    def _launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step on the device."""
        step_metadata = self._sampler.prepare(plan.sampled)
        batch, prompt_slices = self.runner.batch_builder.build(plan, step_metadata)
        logits = self.runner.run(batch)
        prompt_chunks = self._prompt_logprobs.start(plan, prompt_slices, logits)
        logits = logits[: len(plan.sampled)]
        if self.runner.encoder:
            first_steps = [row for row, seq in enumerate(plan.sampled) if not seq.num_generated_tokens]
            self.runner.encoder.outputs.constrain(logits, first_steps)
        return InFlightStep(self._sampler.sample(logits, batch.step_metadata), prompt_chunks)

    def _launch_next(
        self, seqs: list[Sequence], tokens: torch.Tensor, token_indices: dict[int, int]
    ) -> tuple[InFlightStep, LogitsById]:
        """Queue the step after one whose tokens are still on the device, up to the logits of sequences with a grammar,
        which are returned.
        """
        sampled = [seq for seq in seqs if seq.request.grammar is None]
        unsampled = [seq for seq in seqs if seq.request.grammar is not None]
        seqs, count = sampled + unsampled, len(sampled)
        step_metadata = self._sampler.prepare(sampled, lookahead=1)
        indices = [token_indices[seq.id] for seq in seqs]
        batch = self.runner.batch_builder.build_next(seqs, tokens, indices, step_metadata)
        logits = self.runner.run(batch)
        step = InFlightStep(self._sampler.sample(logits[:count], batch.step_metadata, batch.input_ids[:count]), [])
        return step, {seq.id: row for seq, row in zip(unsampled, logits[count:], strict=True)}

    def _launch_sampling(self, seqs: list[Sequence], logits: torch.Tensor) -> InFlightStep:
        """Queue the sampling of logits that `_launch_next` has returned."""
        (step_metadata,) = upload([self._late_sampler.prepare(seqs)], self.runner.device)
        return InFlightStep(self._late_sampler.sample(logits, step_metadata), [])


def _largest_step(
    estimate: Callable[..., int], options: EngineOptions, device: torch.device, rows: int, *, encodes: bool
) -> int:
    """Bytes that the largest step takes beside the KV cache, estimated."""
    longest = options.max_sequence_length
    tokens = min(_PREFILL_TOKENS[device.type], rows * longest)
    if encodes:  # inputs are whole
        return estimate(device.type, rows, max(tokens, longest), logits=rows, pairs=False)
    return estimate(device.type, rows, tokens, logits=tokens, logprobs=tokens)


def _proposed_tokens(options: EngineOptions, device: torch.device) -> int:
    """The tokens that are verified for a sequence in one step."""
    return options.speculation_max_tokens if device.type == "cpu" and options.speculation != "off" else 0


def _drafts(options: EngineOptions, device: torch.device) -> bool:
    """Whether a model drafts tokens on this rank."""
    return bool(options.speculator_path and not options.rank and _proposed_tokens(options, device))


def _token_history(seq: Sequence) -> list[int]:
    """Prompt and generated tokens; placeholders of a soft prompt are left out."""
    return seq.tokens[seq.request.soft_prompt_length :]
