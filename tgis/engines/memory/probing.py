"""Runs the worst steps that requests can ask for, on an engine without rows, and measures their peaks of memory.

Drives any engine by plans. Lengths are bounded, so that it takes seconds; what grows with them is extrapolated.
"""

import logging
from collections.abc import Callable
from itertools import count as counter

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine
from tgis.engines.memory.available import format_bytes
from tgis.engines.memory.fitting import Sample, StepCosts
from tgis.engines.memory.peaks import PeakMeter
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

log = logging.getLogger(__name__)

_AREA = 4096  # tokens of context, by which the cost of one is found
_SHORT = 8  # tokens of each of many rows
_TOP_N = 10  # most candidates that a request may ask for
_COPIES = 3  # of the logits of tokens whose facts are told; on CPUs they are seen in some runs and not in others
_FLOAT_BYTES = 4

# The most that a row can ask for: a flat distribution, all of it sorted, with changed scores. And another way of
# choosing beside it, because each way takes a copy of its rows' scores.
_HUNGRY = SamplingParams(temperature=100.0, top_p=0.999, typical_p=0.999, repetition_penalty=1.1, min_new_tokens=1)
_FREE = SamplingParams(temperature=1.0)


class DummyRunner:
    """Runs steps one by one; the memory is that beyond what was in use before the first."""

    def __init__(self, engine: Engine, meter: PeakMeter, kv_cache_bytes: Callable[[], int], room: int) -> None:
        """`held` tells the bytes of the KV cache, `room` is how many bytes there are for everything."""
        self.engine = engine
        self.room = room
        self._meter = meter
        self._kv_cache_bytes = kv_cache_bytes
        self._ids = counter(-2, -1)
        self._baseline = meter.reset() - kv_cache_bytes()

    def profile_padded(self, longest: int, power: int) -> StepCosts:
        """Costs of a padded engine, by rows of up to `longest` tokens; `power` is that of `Costs.fitted`."""
        crowd = self._crowd()
        told = min(longest, self.engine.info.max_prefill_tokens)
        # Facts of a whole pass, be it over an input or, where inputs have none, over an output that came back.
        facts = self._batch(1, told) if power == 1 else self._batch(1, 1, generated=told - 1)
        half, whole = (self._one_and_some(length, longest) for length in (longest // 2, longest))
        return StepCosts.fitted(half, whole, crowd + facts, power)

    def profile_paged(self, measured: int, longest: int) -> float:
        """Bytes of the worst step of an engine that has blocks for one row of `measured` tokens, of up to `longest`."""
        first, half, whole = (self._mixed(max(2, measured // part)) for part in (8, 2, 1))  # some is taken only once
        growth = max(0.0, (whole - half) / max(1, measured - measured // 2))
        return max(first, half, whole) + growth * (longest - measured)

    def _crowd(self) -> list[Sample]:
        """As many rows as there may be, after fewer, which tell whether all will fit."""
        info = self.engine.info
        length = max(1, min(_SHORT, info.max_prefill_tokens // info.max_batch_size))
        one = self._batch(1, length)
        few = self._batch(-(-info.max_batch_size // 4), length)
        least, most = (max(sample.peak for sample in samples) for samples in (one, few))
        if most + 4 * (most - least) > self.room:
            raise self._refusal()
        return one + few + self._batch(info.max_batch_size, length)

    def _one_and_some(self, length: int, longest: int) -> list[Sample]:
        """A prefill of one row, and a decode of as many as tell more than noise, however short they are."""
        some = max(1, min(self.engine.info.max_batch_size, _AREA // longest))
        prefill, decode = self._batch(1, length, inputs=False)
        return [prefill, decode if some == 1 else self._batch(some, length, inputs=False)[-1]]

    def _batch(self, number: int, length: int, generated: int = 0, *, inputs: bool = True) -> list[Sample]:
        """Prefills of rows of an equal length until there are so many, and a decode of all, by a padded engine."""
        rows = [self._row(length, generated, number=n, inputs=inputs) for n in range(number)]
        width = length + generated
        together = max(1, self.engine.info.max_prefill_tokens // width)
        samples = []
        for start in range(0, number, together):
            joining = rows[start : start + together]
            samples.append(Sample(len(joining), width, prefill=True, peak=self._peak(StepPlan.compute_all(joining))))
            for row in joining:
                row.num_computed_tokens = len(row.tokens)
                row.tokens.append(0)
        samples.append(Sample(number, width + 1, prefill=False, peak=self._peak(StepPlan.compute_all(rows))))
        self.engine.release(rows)
        return samples

    def _mixed(self, width: int) -> int:
        """Peak of the fullest step of an engine that chunks: prompts with facts to the end of `width`, and decodes.

        Rows share the blocks: what is in them does not matter.
        """
        info = self.engine.info
        rows = [self._row(width, number=number, inputs=True) for number in range(info.max_batch_size)]
        left = info.max_prefill_tokens - info.max_batch_size
        counts = []
        for row in rows:
            row.block_table = [*range(-(-width // info.block_size)), 0]  # the last for an engine that runs ahead
            counts.append(max(1, min(left, len(row.tokens) - 1)))
            left -= counts[-1]
        self.engine.step(StepPlan(rows, [1] * len(rows), [], has_prefill=True))  # facts are told from the beginning on
        for row, count in zip(rows, counts, strict=True):
            row.num_computed_tokens = len(row.tokens) - count
        peak = self._peak(StepPlan(rows, counts, rows, has_prefill=True))
        self.engine.release(rows)
        return peak

    def _peak(self, plan: StepPlan) -> int:
        self._meter.reset()
        try:
            self.engine.step(plan)
        except OutOfMemory:
            raise self._refusal() from None
        peak = max(self._known(plan), self._meter.peak() - self._baseline - self._kv_cache_bytes())
        tokens = max(len(row.tokens) for row in plan.seqs)
        log.info("  %d rows of %d tokens: %s beside the KV cache", len(plan.seqs), tokens, format_bytes(peak))
        return peak

    def _known(self, plan: StepPlan) -> int:
        """Bytes that a step on a CPU may take, whatever is seen of it."""
        info = self.engine.info
        rows = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        told = sum(
            count for row, count in rows if row.request.logprob_options.input_tokens and not row.num_generated_tokens
        )
        return _COPIES * told * info.vocab_size * _FLOAT_BYTES if info.device == "cpu" else 0

    def _row(self, length: int, generated: int = 0, *, number: int, inputs: bool) -> Sequence:
        """Every other row is a token shorter, so that there is padding; one chooses in another way."""
        length = max(1, length - number % 2) if number else length
        tokens = [(number + 7 * place) % self.engine.info.vocab_size for place in range(length + generated)]
        details = LogprobOptions(
            generated_tokens=True, input_tokens=inputs, logprobs=True, ranks=True, top_n_tokens=_TOP_N
        )
        sampling = _FREE if number == 1 else _HUNGRY
        row = Sequence(Request(next(self._ids), tokens[:length], generated + 2, False, sampling, details), 0.0)
        row.tokens = tokens
        return row

    def _refusal(self) -> StartError:
        return StartError(
            f"{format_bytes(self.room)} of memory may not do for a step of "
            f"MAX_BATCH_SIZE={self.engine.info.max_batch_size} rows: lower it, "
            "choose a smaller DTYPE or grant more memory"
        )
