"""Engine `tgis_native`: decoder-only models with a paged KV cache, no padding, and prompts computed in chunks.

The model code is transformers' own, its attention replaced by ours. Whether a model can do without its own is
tried out when it has loaded: both must give the same logits. Rows and blocks are the batcher's.
"""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from contextlib import nullcontext

import torch

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.base import StepResult
from tgis.engines.loading.loader import load_causal_lm, pick_device
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.lora.soft_prompts import embedded
from tgis.engines.memory.available import device_errors, memory_for_rows
from tgis.engines.memory.profiler import beside_blocks, measured_length
from tgis.engines.paged.async_decode import RunAhead
from tgis.engines.paged.attention import PagedAttention
from tgis.engines.paged.batch import FlatBatch, PagedCache, flat_batch, next_batch
from tgis.engines.paged.compile import CompiledDecoder, can_compile
from tgis.engines.paged.cuda_graphs import DecodeGraphs, recorder
from tgis.engines.paged.prompt_logprobs import Explainer
from tgis.engines.paged.underway import Underway
from tgis.engines.sampling.batch_sampler import Chooser
from tgis.errors import StartError, Unsupported
from tgis.ipc.messages import Details, EngineInfo, EngineOptions, Request, Sampling

log = logging.getLogger(__name__)

BLOCK_SIZE = 16  # tokens
_DEFAULT_BATCH = {"cpu": 64, "cuda": 256}
_STEP_TOKENS = {"cpu": 512, "cuda": 8192}  # of a step that computes prompts only: more brings no more speed
_STRETCH = {"cpu": 1.8, "cuda": 8.0}
_CPU_SHARE = 0.4  # of the free memory, for the KV cache, where no option says how much
_LONG_ROW = 4096  # tokens of the longest row by which memory is measured, or twice as many as a step takes
_TRIAL_TOKENS = 40
_WINDOWS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}  # and of which layers
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; half precision is coarser


class PagedEngine:
    """Keeps nothing of a row between steps but its unfinished facts about input tokens, and what it computed ahead."""

    def __init__(
        self, options: EngineOptions, smallest: Callable[[int], int] = int, *, ahead: bool | None = None
    ) -> None:
        """Unsupported if the model's attention cannot be replaced.

        `smallest` tells what all ranks that share the model agree on; there is only this one otherwise. `ahead` is
        whether steps are launched before they are planned; by default where it helps, if no other rank computes them.
        """
        torch.set_grad_enabled(False)
        self._options = options
        self._smallest = smallest
        self._device = pick_device(options)
        self._model, self._accepts = load_causal_lm(options, self._device)
        self._lora = LoraLayers(self._model)
        self._table = self._model.get_input_embeddings()
        self._vocab_size = int(self._model.get_output_embeddings().out_features)
        self._attention = PagedAttention(f"tgis_paged_{id(self)}")
        self._chooser = Chooser(self._vocab_size, options.eos_ids, self._device)
        self._next_chooser = Chooser(self._vocab_size, options.eos_ids, self._device)
        self._explainer = Explainer(self._vocab_size)
        self._ahead = self._device.type == "cuda" and options.shards == 1 if ahead is None else ahead
        launch_next = self._launch_next if self._ahead else None
        self._steps = RunAhead(self._launch, launch_next, self._next_chooser.forget, self._explainer, BLOCK_SIZE)
        self._blocks = 0
        self._compiled: CompiledDecoder | None = None
        self._graphs: DecodeGraphs | None = None
        self._try_out()

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
            weight_limit=self._blocks * BLOCK_SIZE,
            prefill_tokens=_STEP_TOKENS[kind],
            block_size=BLOCK_SIZE,
            ahead=int(self._ahead),
            stretch=_STRETCH[kind],
            largest=self._blocks * BLOCK_SIZE,
            embedding_size=self._table.embedding_dim if self._accepts.inputs_embeds else 0,
            linears=self._lora.linears,
        )

    def warm_up(self) -> None:
        """Size the KV cache by the memory that the largest step leaves, and run a real one."""
        bytes_per_block = self._attention.cache.bytes_per_block
        self._blocks = self._smallest(self._affordable(bytes_per_block))
        if self._blocks < 1:
            raise StartError("no memory is left for the KV cache: lower MAX_BATCH_SIZE or grant more memory")
        self._attention.cache = PagedCache(self._blocks + 1, BLOCK_SIZE)  # the last one is nobody's
        log.info(
            "KV cache: %d blocks of %d tokens, %.1f KiB a token, %.2f GiB in all",
            self._blocks,
            BLOCK_SIZE,
            bytes_per_block / BLOCK_SIZE / 1024,
            self._blocks * bytes_per_block / 2**30,
        )
        self._warm()
        if self._options.compile and self._options.shards == 1:
            self._compile()
        if self._device.type == "cuda" and self._options.shards == 1:
            self._record()

    def _warm(self) -> None:
        """A step of several tokens, and one of a single token."""
        started = time.monotonic()
        row = _row(list(range(1, 10)))
        for count in (8, 1):
            self.compute(Plan([row], [count], [row], prefill=count > 1))
            row.computed += count
        log.info("warm after %.1f s", time.monotonic() - started)

    def _compile(self) -> None:
        """Make the graphs that steps need; a model or a machine where that fails goes without."""
        if not can_compile(self._model):
            log.info("PT2_COMPILE is without effect: this model's operators are kernels of the CPU already")
            return
        started = time.monotonic()
        self._compiled = CompiledDecoder(self._model, self._attention)
        log.info("compiling the model's operators")
        self._compiled.start()
        try:
            self._warm()
        except RuntimeError as error:
            log.warning("PT2_COMPILE is without effect: %s", str(error).strip().splitlines()[0])
            self._compiled.undo()
            return
        self._compiled.finish()
        log.info("compiled in %.1f s", time.monotonic() - started)

    def _record(self) -> None:
        """Record decode steps; a model that cannot be recorded runs as it is."""
        width = -(-self._options.max_sequence_length // BLOCK_SIZE)
        graphs = DecodeGraphs(self._forward, self._max_batch_size, width, scratch=self._blocks * BLOCK_SIZE)
        try:
            with torch.inference_mode():
                graphs.record(recorder(), self._device)
        except RuntimeError as error:
            log.warning("decode steps cannot be recorded as CUDA graphs: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
            return
        self._graphs = graphs

    def step(self, plan: Plan) -> StepResult:
        """One pass over the counted tokens of all rows of the plan, or what is left of them to do."""
        what = f"a step of {len(plan.rows)} rows and {sum(plan.counts)} tokens"
        with device_errors(what), torch.inference_mode():
            return self._steps.step(plan)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def compute(self, plan: Plan) -> tuple[torch.Tensor, dict[int, slice]]:
        """The logits of a step, and where those of rows are, as `flat_batch` says."""
        batch, explained = flat_batch(plan, BLOCK_SIZE, self._device)
        return self._logits(batch), explained

    def release(self, rows: Rows[Sequence]) -> None:
        """Forget what was found out about their inputs, and what was computed ahead."""
        self._explainer.release(rows)
        self._steps.release(rows)

    def close(self) -> None:
        """Everything goes with the process."""

    @property
    def _max_batch_size(self) -> int:
        return self._options.max_batch_size or _DEFAULT_BATCH[self._device.type]

    def _launch(self, plan: Plan) -> Underway:
        """Tell the device of a step."""
        batch, explained = flat_batch(plan, BLOCK_SIZE, self._device, self._chooser.numbers(plan.sampled))
        logits = self._logits(batch)
        draft = self._chooser.draft(logits[: len(plan.sampled)], batch)
        return Underway(draft, self._explainer.begin(plan, explained, logits))

    def _launch_next(self, rows: list[Sequence], tokens: torch.Tensor, places: list[int]) -> Underway:
        """Tell the device of the step after one that nothing is known of yet."""
        numbers = self._next_chooser.numbers(rows, ahead=1)
        batch = next_batch(rows, tokens, places, BLOCK_SIZE, self._device, numbers)
        return Underway(self._next_chooser.draft(self._logits(batch), batch), [])

    def _logits(self, batch: FlatBatch) -> torch.Tensor:
        recorded = self._graphs.logits(batch) if self._graphs else None
        return self._forward(batch) if recorded is None else recorded

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        """Logits [kept, vocabulary] of the batch."""
        self._attention.batch = batch
        ids = batch.ids[None]
        inserted = embedded(self._table, ids, batch.spans)
        arguments = {"input_ids": ids} if inserted is None else {"inputs_embeds": inserted}
        if self._accepts.logits_to_keep:
            arguments["logits_to_keep"] = batch.kept
        plain = bool(batch.spans or batch.adapters)
        compiled = self._compiled.used(plain=plain) if self._compiled else nullcontext()
        # A view has its place in what was uploaded, and a compiled graph is for places like those that it has seen.
        positions = batch.positions.clone() if self._compiled else batch.positions
        with compiled, self._lora.applied(batch.adapters):
            output = self._model(position_ids=positions[None], use_cache=False, **arguments)
        logits: torch.Tensor = output.logits[0]
        return logits if self._accepts.logits_to_keep else logits[batch.kept]

    def _try_out(self) -> None:
        """Compare the model's own attention with ours, on a prompt in chunks and a last token alone."""
        self._attention.cache = PagedCache(_trial_blocks(), BLOCK_SIZE)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self._vocab_size, (_TRIAL_TOKENS,), generator=generator).tolist()
        row = _row(tokens, facts=True)
        row.blocks = list(range(_trial_blocks()))
        ids = torch.tensor([tokens], device=self._device)
        expected = self._model(input_ids=ids, use_cache=False).logits[0].double()
        self._model.set_attn_implementation(self._attention.name)
        found = []
        for count in (17, _TRIAL_TOKENS - 18, 1):
            batch, explained = flat_batch(Plan([row], [count], [], prefill=True), BLOCK_SIZE, self._device)
            found.append(self._forward(batch)[explained[row.id]])
            row.computed += count
        layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        if len(self._attention.cache) != layers:
            raise Unsupported(f"{len(self._attention.cache)} of {layers} layers use replaceable attention")
        difference = ((torch.cat(found).double() - expected).norm() / expected.norm()).item()
        if not difference <= _AGREEMENT.get(self._model.dtype, 0.03):
            raise Unsupported(f"paged attention does not give the model's own logits (off by {difference:.1e})")
        self._check_windows()

    def _check_windows(self) -> None:
        """A short trial does not show that a layer sees only the last of many tokens: it must name its window."""
        config = self._model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or _WINDOWS.values()
        for name, kind in _WINDOWS.items():
            window = getattr(config, name, None)
            local = window is not None and window < self._options.max_sequence_length and kind in kinds
            if local and window not in self._attention.windows:
                raise Unsupported(f"layers with {name} {window} do not tell of it when they attend")

    def _affordable(self, bytes_per_block: int) -> int:
        """Blocks that there is memory for, or fewer: what the largest batch can fill."""
        longest = -(-self._options.max_sequence_length // BLOCK_SIZE)
        useful = self._max_batch_size * longest
        if self._options.kv_cache_bytes is not None:
            return min(useful, self._options.kv_cache_bytes // self._options.shards // bytes_per_block)
        if self._options.estimate_memory == "manual":
            return max(longest, useful * (100 - self._options.batch_safety_margin) // 100)
        return min(useful, self._kv_bytes(bytes_per_block) // bytes_per_block)

    def _kv_bytes(self, bytes_per_block: int) -> int:
        """For this process; ranks share the machine's memory, but have a GPU each."""
        on_cpu = self._device.type == "cpu"
        free = memory_for_rows(self._options, self._device) // (self._options.shards if on_cpu else 1)
        share = int(free * _CPU_SHARE) if on_cpu else free
        if self._options.estimate_memory == "off":
            return share
        fitting = self._smallest(share // bytes_per_block * BLOCK_SIZE)
        longest = measured_length(self, self._options, _LONG_ROW, fitting)
        self._attention.cache = PagedCache(-(-longest // BLOCK_SIZE), BLOCK_SIZE)
        held = lambda: self._attention.cache.held_bytes  # noqa: E731 - it changes
        return min(share, free - beside_blocks(self, self._options, self._device, longest, held, self._smallest))


def _trial_blocks() -> int:
    return -(-_TRIAL_TOKENS // BLOCK_SIZE)


def _row(tokens: list[int], *, facts: bool = False) -> Sequence:
    """A request of nobody's, in the first blocks."""
    request = Request(-1, tokens, 2, capped=False, sampling=Sampling(), details=Details(inputs=facts))
    row = Sequence(request, queued_at=0.0)
    row.blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
    return row
