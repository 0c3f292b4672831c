"""What the engine process reports about steps, batch and queue, on small loads counted by hand."""

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from batches import EOS, engine_options, limits, request
from msgspec.structs import replace
from scripted_channel import ScriptedChannel, run_core

from demo.fake_model import make_fake_model
from tgis.batcher.batcher import Batcher
from tgis.engines.fake import FakeEngine
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import Cancel, Shutdown, Step, StepStats, Submit
from tgis.ipc.request import Request

Turn = list[Submit | Cancel]


def run(directory: Path, turns: list[Turn], memory_tokens: int | None = None, **kind: Any) -> list[StepStats]:
    """The statistics of an engine core with the fake engine that gets these turns."""
    channel = ScriptedChannel(*turns, [Shutdown()])
    steps = {name: kind[name] for name in ("padded", "block_size") if name in kind}
    model = make_fake_model(directory, memory_tokens=memory_tokens, poison_token=77, **steps)
    run_core(channel, FakeEngine(engine_options(model, 4)), limits(**kind), mock.Mock())
    return [message.stats for message in channel.messages if isinstance(message, Step) and message.stats]


def after(stats: StepStats) -> tuple[int, ...]:
    """Running sequences, their context and remaining tokens; prefills, decodes, prefill tokens; joined, scheduled."""
    running = stats.num_running, stats.context_tokens, stats.remaining_tokens
    step = stats.num_prefills, stats.num_decodes, stats.prefill_tokens, int(stats.concatenated)
    return *running, *step, len(stats.first_scheduled)


def submit(*requests: Request) -> Submit:
    return Submit(list(requests), time.monotonic())


TWO_THEN_ONE: list[Turn] = [[submit(request(1, 3, 4), request(2, 5, 2))], [submit(request(3, 2, 9))], [], []]
SOFT_PROMPT = AdapterRef("a", 6, 0, 1, 1)
CHUNKED: dict[str, Any] = {"padded": False, "block_size": 1, "prefill_tokens": 4}


@pytest.mark.parametrize(
    ("padded", "prefill_tokens", "contexts"),
    [(True, 2 * 5, [2 * 6, 5, 2 * 5, 2 * 6]), (False, 3 + 5, [4 + 6, 5, 5 + 3, 6 + 4])],
)
def test_steps_of_whole_prompts(tmp_path: Path, padded: bool, prefill_tokens: int, contexts: list[int]) -> None:
    assert [*map(after, run(tmp_path, TWO_THEN_ONE, padded=padded))] == [
        (2, contexts[0], 3 + 1, 2, 0, prefill_tokens, False, 2),
        (1, contexts[1], 2, 0, 2, 0, False, 0),  # the second has ended
        (2, contexts[2], 2 + 8, 1, 0, 2, True, 1),
        (2, contexts[3], 1 + 7, 0, 2, 0, False, 0),
    ]


def test_steps_that_mix_prefill_chunks_and_decodes(tmp_path: Path) -> None:
    turns: list[Turn] = [[submit(request(1, 3, 4))], [submit(request(2, 9, 3))], [], [], []]
    stats = run(tmp_path, turns, **CHUNKED)
    second = StepStats(True, 1, 1, 3, 0.0, 0.0, 2, 5 + 9, 2 + 3, True, 0, {2: (0.0, 0)}, 3, token_capacity=1000)
    assert replace(stats[1], duration=0.0, forward_duration=0.0, first_scheduled={2: (0.0, 0)}) == second
    assert all(0 < step.forward_duration < step.duration < 60 for step in stats)
    assert [*map(after, stats)] == [
        (1, 4, 3, 1, 0, 3, False, 1),
        (2, 5 + 9, 2 + 3, 1, 1, 3, True, 1),  # in chunks of 4, less 1 for the decode
        (2, 6 + 9, 1 + 3, 1, 1, 3, False, 0),
        (1, 10, 2, 1, 1, 3, False, 0),  # one ends as the other starts
        (1, 11, 1, 0, 1, 0, False, 0),
    ]


def test_a_running_request_without_scheduled_tokens_is_not_queued(tmp_path: Path) -> None:
    """The token budget of the step goes to two prompts: the third sequence gets nothing yet."""
    turns: list[Turn] = [[submit(request(1, 50, 4), request(2, 2, 4), request(3, 9, 4))], []]
    stats = run(tmp_path, turns, **CHUNKED)
    assert [after(step)[:2] for step in stats] == [(3, 50 + 3 + 9), (3, 50 + 4 + 9)]
    assert [[*step.first_scheduled] for step in stats] == [[1, 2, 3], []]


@pytest.mark.parametrize(
    ("turns", "kind", "expected"),
    [
        ([[submit(request(1, 3, 4), request(2, 3, 4))]], {}, 0),  # nothing ran before
        ([[submit(request(1, 3, 4))], [], [submit(request(2, 3, 1))]], {}, 0),  # ends with its first token
        ([[submit(request(1, 3, 9), request(2))], [], [Cancel([2]), submit(request(3))]], {}, 1),
        ([[submit(request(1, 3, 9))], [], [Cancel([1]), submit(request(2))]], {}, 0),
        ([[submit(request(1, 3, 9))], [], [submit(request(2), request(3))]], {}, 1),  # batches are counted
        ([[submit(request(1, 3, 2))], [submit(request(2, 3, 4))]], CHUNKED, 1),  # the other ends in the same step
    ],
)
def test_a_prefill_that_joins_a_running_batch_is_a_concatenation(
    tmp_path: Path, turns: list[Turn], kind: dict[str, Any], expected: int
) -> None:
    assert sum(stats.concatenated for stats in run(tmp_path, turns, **({"padded": True} | kind))) == expected


def test_sequences_that_fail_in_a_step_count_as_part_of_it(tmp_path: Path) -> None:
    poisoned = Request(1, [77, 77], 5, False, request(1).sampling_params, request(1).logprob_options)
    stats = run(tmp_path, [[submit(poisoned, request(2, 3, 4))], [submit(request(3, 3, 9))]], padded=True)
    assert [*map(after, stats)] == [(1, 4, 3, 2, 0, 2 * 3, False, 2), (1, 5, 2, 0, 1, 0, False, 0)]


def test_queue_time_starts_at_arrival_even_during_a_long_step(tmp_path: Path) -> None:
    now = time.monotonic()
    stats = run(tmp_path, [[Submit([request(1)], now - 500)], [], [Submit([request(2)], now - 200)]])
    assert [int(seconds) // 100 for step in stats for seconds, _ in step.first_scheduled.values()] == [5, 2]


def test_sequences_of_a_failed_step_are_requeued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The third step of two sequences runs out of memory; then one of them is recomputed alone."""
    turns: list[Turn] = [[submit(*[request(n, 3, 9) for n in range(4)])], [], [], []]
    stats = run(tmp_path, turns, memory_tokens=9, padded=False, max_batch_size=2)
    assert [step.num_requeued for step in stats] == [0, 0, 1]  # the other two have never run
    assert after(stats[-1]) == (1, 6, 6, 1, 0, 5, False, 0)
    assert caplog.messages == ["2 sequences of a failed step (oom) will be retried"]


@pytest.mark.parametrize(
    ("turns", "kind", "expected"),
    [
        (TWO_THEN_ONE, {"padded": True}, [3 + 5, 0, 2, 0]),  # without padding
        ([[submit(request(1, 3, 4))], [submit(request(2, 9, 3))], [], []], CHUNKED, [3, 3, 3, 3]),
        ([[submit(request(1, 5, 4))], []], CHUNKED, [4, 1]),
        ([[submit(replace(request(1, 9, 4), adapter=SOFT_PROMPT))], [], []], CHUNKED, [0, 2, 1]),
        # the second prompt is cached but for its last token
        ([[submit(request(1, 9, 2))], [], [submit(request(2, 9, 2))], []], {"block_size": 4}, [9, 0, 9, 0]),
        # the third step preempts one sequence, the last one computes it again
        ([[submit(request(1, 2, 4), request(2, 2, 4))], *[[]] * 4], {"block_size": 1, "weight": 8}, [4, 0, 0, 0, 0]),
        # the third step runs out of memory, and one of the two is computed again
        ([[submit(request(1, 3, 9), request(2, 4, 9))], [], [], []], {"memory_tokens": 9}, [3 + 4, 0, 0]),
    ],
)
def test_each_input_token_counts_once(tmp_path: Path, turns: list[Turn], kind: Any, expected: list[int]) -> None:
    assert [stats.prompt_tokens for stats in run(tmp_path, turns, **({"padded": False} | kind))] == expected


def admissions(turns: list[list[tuple[int, int]]], **kind: Any) -> list[int]:
    """Counters of requests with these prompt lengths and new tokens, one step per turn."""
    batcher, ids, total = Batcher(limits(**kind), {EOS}), iter(range(99)), [0, 0, 0, 0]
    for now, turn in enumerate(turns):
        batcher.submit([request(next(ids), *lengths) for lengths in turn], now / 2)
        plan = batcher.plan(now / 2)
        batcher.commit(plan, [[7]] * len(plan.sampled), now / 2)
        new = batcher.take_counters()
        counts = (new.queue_jumps, new.granular_additions, new.prefill_weight_exceeded, new.prefill_padding_exceeded)
        total = [old + more for old, more in zip(total, counts, strict=True)]
    return total


def test_admission_counters() -> None:
    assert admissions([[(3, 5), (3, 5)]], padded=False) == [0, 0, 0, 0]
    # 60 of 100 tokens are taken, 70 do not fit: the third joins before the second
    assert admissions([[(4, 56)], [], [(4, 66), (4, 6)]], weight=100, padded=False) == [1, 0, 0, 0]
    # at worst 50 + 42 + 40 of 100 tokens, but the second will have ended
    assert admissions([[(8, 42), (38, 4)], [], [(5, 35)]], weight=100, padded=False, prefill_tokens=50) == [0, 1, 0, 0]
    # one step takes 10 prompt tokens
    assert admissions([[(9, 5)] * 4], padded=False, prefill_tokens=10) == [0, 0, 3, 0]
    # one step begins nine chunks of them: the oldest has half of it, eight have the rest
    chunked = {"padded": False, "block_size": 1, "max_batch_size": 12}
    assert admissions([[(90, 5)] * 12], weight=9999, **chunked) == [0, 0, 3, 0]
    assert admissions([[(90, 5)], [(90, 5)] * 11], weight=9999, **chunked) == [0, 0, 3, 0]
    assert admissions([[(90, 5)] * 12], weight=9999, prefill_tokens=4, **chunked) == [0, 0, 7, 0]
    # ten blocks: at worst the first needs five of them, the second the others
    assert admissions([[(8, 9)], [(8, 12), (2, 2)]], weight=40, padded=False, block_size=4) == [0, 1, 0, 0]
    assert admissions([[(20, 5), (2, 5), (19, 5)]], padded=True, max_prefill_padding=0.2) == [1, 0, 0, 1]
