"""Engine `tgis_native`: decoder-only models with a paged KV cache, no padding, and prompts computed in chunks.

The model code is transformers' own, its attention replaced by ours. Whether a model can do without its own is
tried out when it has loaded: both must give the same logits. Rows and blocks are the batcher's.
"""

import logging
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext

import torch

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.loading.loader import load_causal_lm, select_device, select_kernels
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import embed_with_prompts
from tgis.engines.memory.available import device_errors, memory_for_batches
from tgis.engines.memory.profiler import profile
from tgis.engines.paged.async_decode import AsyncDecoder, InFlightStep
from tgis.engines.paged.attention import PagedAttention
from tgis.engines.paged.batch import FlatBatch, prepare_inputs, prepare_next_inputs
from tgis.engines.paged.compile import CompiledDecoder, can_compile
from tgis.engines.paged.cuda_graphs import DecodeGraphs, cuda_capture
from tgis.engines.paged.kv_cache import PagedKVCache
from tgis.engines.paged.prompt_logprobs import PromptLogprobs
from tgis.engines.sampling.batch_sampler import BatchSampler
from tgis.engines.sampling.sampler import SampledTokens
from tgis.errors import StartError, Unsupported
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

log = logging.getLogger(__name__)

BLOCK_SIZE = 16  # tokens
_DEFAULT_MAX_BATCH_SIZE = {"cpu": 64, "cuda": 256}
_PREFILL_TOKENS = {"cpu": 512, "cuda": 8192}  # of a step that computes prompts only: more brings no more speed
_MAX_SLOWDOWN = {"cpu": 1.8, "cuda": 8.0}
_CPU_KV_FRACTION = 0.4  # of the free memory, for the KV cache, where no option says how much
_CHECK_TOKENS = 40
_WINDOW_LAYER_TYPES = {
    "sliding_window": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
}  # and of which layers
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; half precision is coarser


class PagedEngine:
    """Keeps nothing of a row between steps but its unfinished facts about input tokens, and what it computed ahead."""

    def __init__(
        self, options: EngineOptions, all_reduce_min: Callable[[int], int] = int, *, async_decode: bool | None = None
    ) -> None:
        """Unsupported if the model's attention cannot be replaced.

        `smallest` tells what all ranks that share the model agree on; there is only this one otherwise. `ahead` is
        whether steps are launched before they are planned; by default where it helps, if no other rank computes them.
        """
        torch.set_grad_enabled(False)
        self._options = options
        self._all_reduce_min = all_reduce_min
        self._device = select_device(options)
        self._model, self._accepts = load_causal_lm(options, self._device)
        kernels = select_kernels(options, self._device)
        self._lora = LoraLayers(self._model, kernels)
        self._embedding = self._model.get_input_embeddings()
        self._vocab_size = int(self._model.get_output_embeddings().out_features)
        self._attention = PagedAttention(f"tgis_paged_{id(self)}", kernels)
        self._sampler = BatchSampler(self._vocab_size, options.eos_ids, self._device, _token_history)
        self._prompt_logprobs = PromptLogprobs(self._vocab_size)
        self._async_decode = (
            self._device.type == "cuda" and options.num_shards == 1 if async_decode is None else async_decode
        )
        launch_next = self._launch_next if self._async_decode else None
        self._decoder = AsyncDecoder(self._launch, launch_next, self._sampler, self._prompt_logprobs, BLOCK_SIZE)
        self._num_blocks = 0
        self._compiled: CompiledDecoder | None = None
        self._graphs: DecodeGraphs | None = None
        self._verify_attention()

    @property
    def info(self) -> EngineInfo:
        """Facts of the loaded model."""
        kind = self._device.type
        return EngineInfo(
            model_class=type(self._model).__name__,
            device=str(self._device),
            dtype=str(self._model.dtype).removeprefix("torch."),
            vocab_size=self._vocab_size,
            encoder_decoder=False,
            padded=False,
            max_batch_size=self._max_batch_size,
            token_capacity=self._num_blocks * BLOCK_SIZE,
            max_prefill_tokens=_PREFILL_TOKENS[kind],
            block_size=BLOCK_SIZE,
            lookahead=int(self._async_decode),
            max_slowdown=_MAX_SLOWDOWN[kind],
            max_request_tokens=self._num_blocks * BLOCK_SIZE,
            embedding_size=self._embedding.embedding_dim if self._accepts.inputs_embeds else 0,
            lora_targets=self._lora.targets,
        )

    def warm_up(self) -> None:
        """Size the KV cache by the memory that the largest step leaves, and run a real one."""
        bytes_per_block = self._attention.cache.bytes_per_block
        self._num_blocks = self._all_reduce_min(self._num_available_blocks(bytes_per_block))
        if self._num_blocks < 1:
            raise StartError("no memory is left for the KV cache: lower MAX_BATCH_SIZE or grant more memory")
        self._attention.cache = PagedKVCache(self._num_blocks + 1, BLOCK_SIZE)  # the last one is nobody's
        log.info(
            "KV cache: %d blocks of %d tokens, %.1f KiB a token, %.2f GiB in all",
            self._num_blocks,
            BLOCK_SIZE,
            bytes_per_block / BLOCK_SIZE / 1024,
            self._num_blocks * bytes_per_block / 2**30,
        )
        self._run_dummy_steps()
        if self._options.compile and self._options.num_shards == 1:
            self._compile()
        if self._device.type == "cuda" and self._options.num_shards == 1:
            self._capture_graphs()

    def _run_dummy_steps(self) -> None:
        """A step of several tokens, and one of a single token."""
        started = time.monotonic()
        row = _dummy_sequence(list(range(1, 10)))
        for count in (8, 1):
            self.compute_logits(StepPlan([row], [count], [row], has_prefill=count > 1))
            row.num_computed_tokens += count
        log.info("warm after %.1f s", time.monotonic() - started)

    def _compile(self) -> None:
        """Make the graphs that steps need; a model or a machine where that fails goes without."""
        if not can_compile(self._model):
            log.info("PT2_COMPILE is without effect: this model's operators are kernels of the CPU already")
            return
        started = time.monotonic()
        self._compiled = CompiledDecoder(self._model, self._attention)
        log.info("compiling the model's operators")
        self._compiled.enable()
        try:
            self._run_dummy_steps()
        except RuntimeError as error:
            log.warning("PT2_COMPILE is without effect: %s", str(error).strip().splitlines()[0])
            self._compiled.disable()
            return
        self._compiled.freeze()
        log.info("compiled in %.1f s", time.monotonic() - started)

    def _capture_graphs(self) -> None:
        """Record decode steps; a model that cannot be recorded runs as it is."""
        width = -(-self._options.max_sequence_length // BLOCK_SIZE)
        graphs = DecodeGraphs(self._forward, self._max_batch_size, width, scratch_slot=self._num_blocks * BLOCK_SIZE)
        try:
            with torch.inference_mode():
                graphs.capture(cuda_capture(), self._device)
        except RuntimeError as error:
            log.warning("decode steps cannot be recorded as CUDA graphs: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return
        self._graphs = graphs

    def step(self, plan: StepPlan) -> StepResult:
        """One pass over the counted tokens of all rows of the plan, or what is left of them to do."""
        what = f"a step of {len(plan.seqs)} rows and {sum(plan.num_scheduled_tokens)} tokens"
        with device_errors(what), torch.inference_mode():
            return self._decoder.step(plan)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute_logits(self, plan: StepPlan) -> tuple[torch.Tensor, dict[int, slice]]:
        """The logits of a step, and where those of rows are, as `flat_batch` says."""
        batch, explained = prepare_inputs(plan, BLOCK_SIZE, self._device)
        return self._run_model(batch), explained

    def release(self, seqs: Collection[Sequence]) -> None:
        """Forget what was found out about their inputs, and what was computed ahead."""
        self._prompt_logprobs.release(seqs)
        self._decoder.release(seqs)

    def close(self) -> None:
        """Everything goes with the process."""

    @property
    def _max_batch_size(self) -> int:
        return self._options.max_batch_size or _DEFAULT_MAX_BATCH_SIZE[self._device.type]

    def _launch(self, plan: StepPlan) -> InFlightStep:
        """Queue a step on the device."""
        step_metadata = self._sampler.prepare(plan.sampled)
        batch, prompt_slices = prepare_inputs(plan, BLOCK_SIZE, self._device, step_metadata)
        logits = self._run_model(batch)
        prompt_chunks = self._prompt_logprobs.start(plan, prompt_slices, logits)
        return InFlightStep(self._sample(batch, logits[: len(plan.sampled)]), prompt_chunks)

    def _launch_next(self, seqs: list[Sequence], tokens: torch.Tensor, token_indices: list[int]) -> InFlightStep:
        """Queue the step after one whose tokens are still on the device."""
        step_metadata = self._sampler.prepare(seqs, lookahead=1)
        batch = prepare_next_inputs(seqs, tokens, token_indices, BLOCK_SIZE, self._device, step_metadata)
        return InFlightStep(self._sample(batch, self._run_model(batch)), [])

    def _sample(self, batch: FlatBatch, logits: torch.Tensor) -> SampledTokens:
        """`logits` are those of the first of `batch.logits_indices`."""
        newest = batch.input_ids[batch.logits_indices[: len(logits)]]
        return self._sampler.sample(logits, newest, batch.step_metadata)

    def _run_model(self, batch: FlatBatch) -> torch.Tensor:
        recorded = self._graphs.run(batch) if self._graphs else None
        return self._forward(batch) if recorded is None else recorded

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [kept, vocabulary] of the batch."""
        self._attention.batch = batch
        ids = batch.input_ids[None]
        inserted = embed_with_prompts(self._embedding, ids, batch.spans)
        arguments = {"input_ids": ids} if inserted is None else {"inputs_embeds": inserted}
        if self._accepts.logits_to_keep:
            arguments["logits_to_keep"] = batch.logits_indices
        plain = bool(batch.spans or batch.adapters)
        compiled = self._compiled.stance(eager=plain) if self._compiled else nullcontext()
        # A view has its place in what was uploaded, and a compiled graph is for places like those that it has seen.
        positions = batch.positions.clone() if self._compiled else batch.positions
        with compiled, self._lora.applied(batch.adapters):
            output = self._model(position_ids=positions[None], use_cache=False, **arguments)
        logits: torch.Tensor = output.logits[0]
        return logits if self._accepts.logits_to_keep else logits[batch.logits_indices]

    def _verify_attention(self) -> None:
        """Compare the model's own attention with ours, on a prompt in chunks and a last token alone."""
        self._attention.cache = PagedKVCache(_num_check_blocks(), BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self._vocab_size, (_CHECK_TOKENS,), generator=generator).tolist()
        row = _dummy_sequence(tokens, prompt_logprobs=True)
        row.block_table = list(range(_num_check_blocks()))
        ids = torch.tensor([tokens], device=self._device)
        expected = self._model(input_ids=ids, use_cache=False).logits[0].double()
        self._model.set_attn_implementation(self._attention.name)
        found = []
        for count in (17, _CHECK_TOKENS - 18, 1):
            batch, explained = prepare_inputs(StepPlan([row], [count], [], has_prefill=True), BLOCK_SIZE, self._device)
            found.append(self._forward(batch)[explained[row.id]])
            row.num_computed_tokens += count
        layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        if len(self._attention.cache) != layers:
            raise Unsupported(f"{len(self._attention.cache)} of {layers} layers use replaceable attention")
        difference = ((torch.cat(found).double() - expected).norm() / expected.norm()).item()
        if not difference <= _TOLERANCE.get(self._model.dtype, 0.03):
            raise Unsupported(f"paged attention does not give the model's own logits (off by {difference:.1e})")
        self._verify_windows()

    def _verify_windows(self) -> None:
        """A short trial does not show that a layer sees only the last of many tokens: it must name its window."""
        config = self._model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or _WINDOW_LAYER_TYPES.values()
        for name, kind in _WINDOW_LAYER_TYPES.items():
            window = getattr(config, name, None)
            local = window is not None and window < self._options.max_sequence_length and kind in kinds
            if local and window not in self._attention.windows:
                raise Unsupported(f"layers with {name} {window} do not tell of it when they attend")

    def _num_available_blocks(self, bytes_per_block: int) -> int:
        """Blocks that there is memory for, or fewer: what the largest batch can fill."""
        longest = -(-self._options.max_sequence_length // BLOCK_SIZE)
        useful = self._max_batch_size * longest
        if self._options.kv_cache_bytes is not None:
            return min(useful, self._options.kv_cache_bytes // self._options.num_shards // bytes_per_block)
        if self._options.estimate_memory == "manual":
            return max(longest, useful * (100 - self._options.batch_safety_margin) // 100)
        return min(useful, self._available_kv_bytes() // bytes_per_block)

    def _available_kv_bytes(self) -> int:
        """For this process; ranks share the machine's memory, but have a GPU each."""
        on_cpu = self._device.type == "cpu"
        free = memory_for_batches(self._options, self._device) // (self._options.num_shards if on_cpu else 1)
        share = int(free * _CPU_KV_FRACTION) if on_cpu else free
        if self._options.estimate_memory == "off":
            return share
        length, cache = self._options.max_sequence_length, self._attention.cache
        peak = profile(
            self,
            self._options,
            self._device,
            lambda: cache.nbytes,
            lambda runner: runner.paged_peak(length, _num_check_blocks()),
        )
        return min(share, free - peak)


def _num_check_blocks() -> int:
    return -(-_CHECK_TOKENS // BLOCK_SIZE)


def _dummy_sequence(tokens: list[int], *, prompt_logprobs: bool = False) -> Sequence:
    """A request of nobody's, in the first blocks."""
    request = Request(
        -1,
        tokens,
        2,
        limited_by_context=False,
        sampling_params=SamplingParams(),
        logprob_options=LogprobOptions(input_tokens=prompt_logprobs),
    )
    row = Sequence(request, arrival_time=0.0)
    row.block_table = list(range(-(-len(tokens) // BLOCK_SIZE)))
    return row


def _token_history(seq: Sequence) -> list[int]:
    """Prompt and generated tokens, without those of a soft prompt."""
    return seq.tokens[seq.request.soft_prompt_length :]
