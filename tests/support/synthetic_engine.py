"""An engine that computes nothing and reports the memory of a formula; it is its own meter."""

from collections.abc import Collection
from dataclasses import dataclass, field

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import NoReservedCache, StepResult
from tgis.engines.memory.profiler import DummyRunner
from tgis.errors import OutOfMemory
from tgis.ipc.messages import EngineInfo

MiB = 1 << 20
MODEL_BYTES = 500 * MiB  # bytes of the model


@dataclass(frozen=True)
class MemoryFormula:
    """Bytes of a step; sequences are padded to the longest."""

    kv_token: int = 40_000  # of KV cache
    step: int = 30 * MiB
    row: int = MiB
    token: int = 0  # of context in a decode
    pass_token: int = 0  # of a prefill, at most those of one forward pass
    prefill_token: int = 0  # of a whole prefill
    square: float = 0.0  # per token and token of its sequence
    input_logprobs_token: int = 0  # of a forward pass that computes logprobs of the input

    def decode(self, rows: int, width: int) -> int:
        """Bytes of a decode besides the KV cache."""
        return self.step + rows * (self.row + width * self.token)

    def prefill(self, rows: int, width: int, facts: bool, pass_tokens: int) -> int:
        """Bytes of a prefill besides the KV cache."""
        tokens = rows * width
        together = min(tokens, pass_tokens) * (self.pass_token + self.input_logprobs_token * facts)
        return self.step + rows * self.row + together + int(tokens * (self.prefill_token + width * self.square))


@dataclass
class SyntheticEngine(NoReservedCache):
    """Keeps the KV cache of its batch like a padded engine, or nothing if it has blocks."""

    formula: MemoryFormula
    capacity: int = 1 << 60
    max_batch_size: int = 64
    encoder_decoder: bool = False
    block_size: int = 0
    dtype: str = "none"
    device: str = "none"
    vocab_size: int = 100
    steps: int = 0
    rows: list[Sequence] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            engine="synthetic",
            model_class="Synthetic",
            device=self.device,
            dtype=self.dtype,
            vocab_size=self.vocab_size,
            encoder_decoder=self.encoder_decoder,
            padded=not self.block_size,
            max_batch_size=self.max_batch_size,
            token_capacity=0,
            max_prefill_tokens=512,
            block_size=self.block_size,
        )

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def close(self) -> None:
        """Nothing to free."""

    def step(self, plan: StepPlan) -> StepResult:
        """Account for the memory of the step."""
        self.steps += 1
        beside = self._chunked(plan) if self.block_size else self._padded(plan)
        self.peak_bytes = max(self.peak_bytes, MODEL_BYTES + self.kv_cache_bytes + beside)
        if self.kv_cache_bytes + beside > self.capacity:
            raise OutOfMemory("no room")
        return StepResult([[0]] * len(plan.sampled), [])

    def release(self, rows: Collection[Sequence]) -> None:
        gone = {row.id for row in rows}
        self.rows = [row for row in self.rows if row.id not in gone]

    @property
    def kv_cache_bytes(self) -> int:
        """The bytes of the KV cache, spare columns not counted."""
        return len(self.rows) * _width(self.rows) * self.formula.kv_token

    def find_peak(self, runner: DummyRunner) -> int:
        return runner.padded_peak(2046, 512, chunked=True)

    def reset(self) -> int:
        """Begin to measure at what is used now; as `PeakMeter`."""
        self.peak_bytes = MODEL_BYTES + self.kv_cache_bytes
        return self.peak_bytes

    def peak(self) -> int:
        """The bytes at most since `reset`."""
        return self.peak_bytes

    def _padded(self, plan: StepPlan) -> int:
        new = [row for row in plan.seqs if row not in self.rows]
        assert plan.has_prefill == bool(new), "a prefill is of new rows only, a decode of all that are held"
        assert new in ([], plan.seqs)
        assert new or {row.id for row in self.rows} == {row.id for row in plan.seqs}
        self.rows += new
        assert len(self.rows) <= self.max_batch_size
        if not new:
            return self.formula.decode(len(self.rows), _width(self.rows))
        facts = any(row.request.logprob_options.input_tokens for row in new)
        return self.formula.prefill(len(new), _width(new), facts, self.info.max_prefill_tokens)

    def _chunked(self, plan: StepPlan) -> int:
        assert len(plan.seqs) <= self.max_batch_size
        assert sum(plan.num_scheduled_tokens) <= max(self.info.max_prefill_tokens, len(plan.seqs))
        for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            assert 0 < count <= row.num_uncomputed_tokens
            assert len(row.block_table) * self.block_size >= row.num_computed_tokens + count
        told = sum(
            count
            for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
            if row.request.logprob_options.input_tokens
        )
        width = max(
            row.num_computed_tokens + count for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        )
        computed = sum(plan.num_scheduled_tokens) * self.formula.pass_token + told * self.formula.input_logprobs_token
        return self.formula.step + len(plan.sampled) * self.formula.row + computed + width * self.formula.token


def _width(rows: list[Sequence]) -> int:
    return max((len(row.tokens) for row in rows), default=0)
