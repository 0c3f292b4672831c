"""When prefills interrupt decodes, and how the budget of a step is split, in simulated time."""

from itertools import count
from statistics import median

import pytest
from batches import EOS, limits, next_plan, request
from hypothesis import given
from hypothesis import strategies as st

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.prefill_budget import DecodeTimes, split_budget
from tgis.batcher.sequence import Sequence
from tgis.bench.simulate import SimulatedEngine, Simulation, TraceRequest
from tgis.engines.fake import StepModel


def kinds(max_waiting: int, prefill_seconds: float, steps: int) -> str:
    """Each step as P or d while there is always one more request that could join; a decode takes 1 s."""
    batcher, now, seen = Batcher(limits(max_batch_size=99, max_waiting_tokens=max_waiting), {EOS}), 0.0, ""
    for n in range(steps):
        batcher.submit([request(n, 1, 99)], now)
        plan = batcher.plan(now)
        assert plan.seqs
        now += prefill_seconds if plan.has_prefill else 1.0
        seen += "P" if plan.has_prefill else "d"
        batcher.commit(plan, [[7]] * len(plan.sampled), now)
    return seen


@pytest.mark.parametrize(
    ("max_waiting", "prefill_seconds", "expected"),
    [
        (24, 0.1, "PdPdPdPd"),  # at least one decode
        (24, 6.0, "PdddPddd"),  # half as long as the prefill took
        (2, 6.0, "PddPddPd"),  # but at most this many decodes
        (0, 6.0, "PdPdPdPd"),
    ],
)
def test_running_sequences_get_their_share_of_the_time(max_waiting: int, prefill_seconds: float, expected: str) -> None:
    assert kinds(max_waiting, prefill_seconds, 8) == expected


WHOLE = StepModel(step_seconds=0.01, row_seconds=0.0002, prefill_token_seconds=0.0001)
CHUNKS = StepModel(block_size=16, step_seconds=0.01, row_seconds=0.0002, prefill_token_seconds=0.0001)
NORMAL_STEP = 0.01 + 32 * 0.0002
STREAMS = [TraceRequest(0.0, 20, 400)] * 31 + [TraceRequest(1.0, 8000, 10)]


def longest_gap(*, chunked: bool) -> float:
    bounds = BatchLimits(64, 1 << 30, 256 if chunked else 1 << 20, block_size=16 if chunked else 0)
    return max(Simulation(bounds, SimulatedEngine(CHUNKS if chunked else WHOLE), STREAMS).run().times("gap"))


def test_chunked_prefill_does_not_stall_streams() -> None:
    assert longest_gap(chunked=True) < 3 * NORMAL_STEP
    assert longest_gap(chunked=False) > 20 * NORMAL_STEP  # without chunking


def test_until_decodes_have_been_measured_prompts_fill_the_steps() -> None:
    batcher = Batcher(limits(1 << 30, padded=False, block_size=16, prefill_tokens=800, max_slowdown=2.0), {EOS})

    def prompt_tokens_of_step() -> int:
        plan = batcher.plan(0.0)
        tokens = sum(plan.num_prefill_tokens)
        batcher.commit(plan, [[7]] * len(plan.sampled), 0.1)
        return tokens

    batcher.submit([request(1, 5, max_new=99)], 0.0)
    assert prompt_tokens_of_step() == 5
    batcher.submit([request(2, 2000, max_new=99)], 0.0)
    assert [prompt_tokens_of_step() for _ in range(4)] == [799, 799, 402, 0]  # the last one is measured
    batcher.submit([request(3, 2000, max_new=99)], 0.0)
    assert prompt_tokens_of_step() == 100


def test_a_short_request_does_not_wait_for_a_long_chunked_prompt() -> None:
    bounds = BatchLimits(64, 1 << 30, 256, block_size=16)
    jobs = [TraceRequest(0.0, 100_000, 2), *[TraceRequest(0.5 + n / 10, 100, 5) for n in range(20)]]
    outcome = Simulation(bounds, SimulatedEngine(CHUNKS), jobs).run()
    assert len(outcome.times("ttft")) == 21
    assert sorted(outcome.times("ttft"))[-2] < 0.2  # the short ones
    alone = Simulation(bounds, SimulatedEngine(CHUNKS), jobs[:1]).run()
    assert max(outcome.times("ttft")) < 1.2 * alone.times("ttft")[0]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12), st.integers(1, 60))
def test_the_budget_is_split_without_waste(seqs: list[tuple[int, bool]], budget: int) -> None:
    sequences = [Sequence(request(n, length), 0.0) for n, (length, _) in enumerate(seqs)]
    for seq, (_, decoding) in zip(sequences, seqs, strict=True):
        if decoding:
            seq.num_computed_tokens = len(seq.tokens)
            seq.tokens.append(7)
    split = {seq.id: tokens for seq, tokens in split_budget(sequences, budget)}
    prefilling = [seq for seq in sequences if not seq.decoding]
    assert all(split[seq.id] == 1 for seq in sequences if seq.decoding)
    assert sum(split.get(seq.id, 0) for seq in prefilling) == min(
        budget, sum(seq.num_uncomputed_tokens for seq in prefilling)
    )
    assert all(1 <= split.get(seq.id, 1) <= seq.num_uncomputed_tokens for seq in prefilling)
    if prefilling:
        assert split[prefilling[0].id] >= min(prefilling[0].num_uncomputed_tokens, (budget + 1) // 2)


@pytest.mark.parametrize("before", [1, 8, 32])
def test_many_clients_get_their_first_tokens_soon_whatever_ran_before(before: int) -> None:
    """32 clients in a closed loop, after a time with another number of them."""
    model = StepModel(block_size=16, step_seconds=0.01, row_seconds=0.0004, prefill_token_seconds=0.0003)
    bounds = limits(10**6, max_batch_size=64, prefill_tokens=512, padded=False, block_size=16, max_slowdown=2.5)
    batcher, now, numbers = Batcher(bounds, ()), 0.0, count()
    for clients in (before, 32):
        sent: dict[int, float] = {}
        first: dict[int, float] = {}
        for _ in range(1000):
            for number, _ in zip(numbers, range(clients - len(batcher.running) - len(batcher.waiting)), strict=False):
                sent[number] = now
                batcher.submit([request(number, 130, 128)], now)
            plan = next_plan(batcher, now)
            now += model.seconds(plan)
            for seq in plan.sampled:
                first.setdefault(seq.id, now)
            batcher.commit(plan, [[7]] * len(plan.sampled), now)
    assert median(first[number] - sent[number] for number in sent.keys() & first.keys()) < 10 * (0.01 + 32 * 0.0004)


def test_unseen_batch_sizes_are_extrapolated() -> None:
    times = DecodeTimes()
    assert times.expected(5) is None
    times.add(20, 2.0)
    assert [times.expected(size) for size in (1, 16, 31, 32, 100)] == [2.0, 2.0, 2.0, 4.0, 8.0]
    times.add(1, 1.0)
    assert (times.expected(1), times.expected(2), times.expected(15), times.expected(16)) == (1.0, 2.0, 8.0, 2.0)
    times.add(17, 3.0)
    assert times.expected(20) == pytest.approx(2.1)
