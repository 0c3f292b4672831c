"""An engine that computes nothing and reports the memory of a formula; it is its own meter."""

from collections.abc import Collection
from dataclasses import dataclass, field

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult
from tgis.engines.memory.profiler import DummyRunner
from tgis.errors import OutOfMemory
from tgis.ipc.messages import EngineInfo

MiB = 1 << 20
MODEL_BYTES = 500 * MiB  # bytes of the model
KV_BYTES = 40_000  # of a token in the KV cache
PASS_TOKENS = 512  # of one forward pass of a decoder-only model


@dataclass(frozen=True)
class MemoryFormula:
    """Bytes of a step besides the KV cache; sequences of a padded engine are as long as the longest."""

    step: int = 30 * MiB
    row: int = MiB
    width: int = 0  # per token of the longest sequence
    computed: int = 0  # per token of a forward pass
    told: int = 0  # per token of a forward pass that computes logprobs of the input
    square: float = 0.0  # per token and token of its sequence

    def bytes(self, rows: int, width: int, computed: int, *, told: int = 0) -> int:
        tokens = computed * self.computed + told * self.told + int(computed * width * self.square)
        return self.step + rows * self.row + width * self.width + tokens


@dataclass
class SyntheticEngine(Engine):
    """Holds the sequences of its batch."""

    formula: MemoryFormula
    capacity: int = 1 << 60
    max_batch_size: int = 64
    encoder_decoder: bool = False
    block_size: int = 0
    device: str = "none"
    vocab_size: int = 100
    steps: int = 0
    rows: dict[int, Sequence] = field(default_factory=dict)
    peak_bytes: int = 0
    longest_output: int = 0

    def __post_init__(self) -> None:
        kind = self.encoder_decoder, not self.block_size, self.max_batch_size
        sizes = 0, PASS_TOKENS, self.block_size  # the first: of the KV cache
        self.info = EngineInfo("synthetic", "Synthetic", self.device, "none", self.vocab_size, *kind, *sizes)

    def step(self, plan: StepPlan) -> StepResult:
        """Account for the memory of the step."""
        self.steps += 1
        self.rows |= {seq.id: seq for seq in plan.seqs}
        self.longest_output = max(
            self.longest_output, *(len(seq.tokens) - len(seq.request.tokens) for seq in plan.seqs)
        )
        assert all(max(seq.tokens) < min(self.info.vocab_size, self.info.input_vocab_size) for seq in plan.seqs)
        assert len(self.rows) <= self.max_batch_size
        ends = [seq.num_computed_tokens + n for seq, n in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)]
        assert all(len(seq.tokens) >= end for seq, end in zip(plan.seqs, ends, strict=True))
        rows, computed = len(plan.seqs), sum(plan.num_scheduled_tokens)
        if self.block_size:
            assert computed <= max(PASS_TOKENS, rows)
            assert all(len(seq.block_table) * self.block_size >= end for seq, end in zip(plan.seqs, ends, strict=True))
        else:
            computed = rows * max(plan.num_scheduled_tokens)
            computed = computed if self.encoder_decoder else min(computed, PASS_TOKENS)
        told = computed * (plan.has_prefill and plan.seqs[0].request.logprob_options.input_tokens)
        needed = self.formula.bytes(rows, max(ends), computed, told=told)
        self.peak_bytes = max(self.peak_bytes, MODEL_BYTES + self.kv_cache_bytes + needed)
        if self.kv_cache_bytes + needed > self.capacity:
            raise OutOfMemory("no room")
        return StepResult([[0]] * len(plan.sampled), [])

    def release(self, rows: Collection[Sequence]) -> None:
        for row in rows:
            del self.rows[row.id]

    @property
    def kv_cache_bytes(self) -> int:
        return KV_BYTES * sum(len(row.tokens) for row in self.rows.values())

    def find_peak(self, runner: DummyRunner) -> int:
        return runner.padded_peak(2046, PASS_TOKENS, chunked=True)

    def reset(self) -> int:
        """Begin to measure at what is used now; as `PeakMeter`."""
        self.peak_bytes = MODEL_BYTES + self.kv_cache_bytes
        return self.peak_bytes

    def peak(self) -> int:
        """The bytes at most since `reset`."""
        return self.peak_bytes
