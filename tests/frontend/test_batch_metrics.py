"""Batch and queue metrics after each step, on small loads counted by hand."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
from batches import EOS, engine_options, limits, request
from engine_clients import connected_client, engine_outputs
from harness import run_async
from scraped_metrics import make_metrics, value

from demo.fake_model import make_fake_model
from tgis.batcher.batcher import Batcher
from tgis.engine_core.core import EngineCore
from tgis.engine_core.lookups import LookupTable
from tgis.engines.fake import FakeEngine
from tgis.frontend.metrics import Metrics
from tgis.ipc.messages import Cancel, Shutdown, Step, StepStats, Submit
from tgis.ipc.request import Request, StopReason

if TYPE_CHECKING:
    from tgis.ipc.channel import Channel

Turn = list[Submit | Cancel]


class After(NamedTuple):
    """Gauges after a step, then what the step added to counters and sums."""

    num_running: float
    context_tokens: float
    remaining_tokens: float
    num_prefills: float = 0  # sums of tgi_batch_inference_batch_size
    num_decodes: float = 0
    prefill_tokens: float = 0
    concatenated: float = 0
    scheduled: float = 0


SAMPLES: list[tuple[str, dict[str, str]]] = [
    ("tgi_batch_current_size", {}),
    ("tgi_batch_input_tokens", {}),
    ("tgi_batch_max_remaining_tokens", {}),
    ("tgi_batch_inference_batch_size_sum", {"method": "prefill"}),
    ("tgi_batch_inference_batch_size_sum", {"method": "next_token"}),
    ("tgi_batch_next_tokens_sum", {}),
    ("tgi_batch_concatenation_count", {}),
    ("tgi_request_queue_duration_count", {}),
]


class ScriptedChannel:
    """Stands in for the channel: one turn of messages before each step, and the metrics after it."""

    def __init__(self, turns: list[Turn], metrics: Metrics) -> None:
        self._turns = iter(turns)
        self._metrics = metrics
        self.stats: list[StepStats] = []
        self.seen: list[After] = []
        self._sums = [0.0] * len(SAMPLES)

    def receive(self, *, timeout: float | None = None) -> list[Any]:
        assert timeout == 0 or len(self.seen) in (0, len(self.stats))
        turn = next(self._turns, None)
        return [Shutdown()] if turn is None else turn

    def send(self, message: object) -> None:
        if isinstance(message, Step) and message.stats:
            self._metrics.step_succeeded(message.stats, message.tokens, 0.0, {})
            now = [value(self._metrics, name, **labels) for name, labels in SAMPLES]
            self.stats.append(message.stats)
            self.seen.append(After(*now[:3], *(new - old for new, old in zip(now[3:], self._sums[3:], strict=True))))
            self._sums = now


def run(directory: Path, turns: list[Turn], **kind: Any) -> ScriptedChannel:
    """Run an engine core with the fake engine through these turns."""
    metrics = make_metrics()
    script = ScriptedChannel(turns, metrics)
    memory_tokens = kind.pop("memory_tokens", None)
    steps = {name: kind[name] for name in ("padded", "block_size") if name in kind} | {"memory_tokens": memory_tokens}
    engine = FakeEngine(engine_options(make_fake_model(directory, **steps, poison_token=77), 4))
    EngineCore(cast("Channel", script), engine, Batcher(limits(**kind), {EOS}), LookupTable(script.send)).run()
    return script


def submit(*requests: Request) -> Submit:
    return Submit(list(requests), time.monotonic())


TWO_THEN_ONE: list[Turn] = [
    [submit(request(1, 3, 4), request(2, 5, 2))],
    [submit(request(3, 2, 9))],
    [],
    [],
]
PADDED = {"padded": True}


@pytest.mark.parametrize(
    ("padded", "prefill_tokens", "contexts"),
    [(True, 2 * 5, [2 * 6, 5, 2 * 5, 2 * 6]), (False, 3 + 5, [4 + 6, 5, 5 + 3, 6 + 4])],
)
def test_steps_of_whole_prompts(tmp_path: Path, padded: bool, prefill_tokens: int, contexts: list[int]) -> None:
    assert run(tmp_path, TWO_THEN_ONE, padded=padded).seen == [
        After(2, contexts[0], 3 + 1, num_prefills=2, prefill_tokens=prefill_tokens, scheduled=2),
        After(1, contexts[1], 2, num_decodes=2),  # the second has ended
        After(2, contexts[2], 2 + 8, num_prefills=1, prefill_tokens=2, concatenated=1, scheduled=1),
        After(2, contexts[3], 1 + 7, num_decodes=2),
    ]


def test_steps_that_mix_prefill_chunks_and_decodes(tmp_path: Path) -> None:
    turns: list[Turn] = [
        [submit(request(1, 3, 4))],
        [submit(request(2, 9, 3))],  # in chunks of 4, less 1 for the decode
        [],
        [],
        [],
    ]
    assert run(tmp_path, turns, padded=False, block_size=1, prefill_tokens=4).seen == [
        After(1, 4, 3, num_prefills=1, prefill_tokens=3, scheduled=1),
        After(2, 5 + 9, 2 + 3, num_prefills=1, num_decodes=1, prefill_tokens=3, concatenated=1, scheduled=1),
        After(2, 6 + 9, 1 + 3, num_prefills=1, num_decodes=1, prefill_tokens=3),
        After(1, 10, 2, num_prefills=1, num_decodes=1, prefill_tokens=3),  # one ends as the other starts
        After(1, 11, 1, num_decodes=1),
    ]


def test_a_running_request_without_scheduled_tokens_is_not_queued(tmp_path: Path) -> None:
    """The token budget of the step goes to two prompts: the third sequence gets nothing yet."""
    turns: list[Turn] = [[submit(request(1, 50, 4), request(2, 2, 4), request(3, 9, 4))], []]
    script = run(tmp_path, turns, padded=False, block_size=1, prefill_tokens=4)
    assert script.seen == [
        After(3, 50 + 3 + 9, 4 + 3 + 4, num_prefills=2, prefill_tokens=2 + 2, scheduled=3),
        After(3, 50 + 4 + 9, 4 + 2 + 4, num_prefills=2, num_decodes=1, prefill_tokens=2 + 1, concatenated=1),
    ]
    assert [[*stats.first_scheduled] for stats in script.stats] == [[1, 2, 3], []]


@pytest.mark.parametrize(
    ("turns", "kind", "expected"),
    [
        ([[submit(request(1, 3, 4), request(2, 3, 4))]], PADDED, 0),  # nothing ran before
        ([[submit(request(1, 3, 4))], [], [submit(request(2, 3, 1))]], PADDED, 0),  # ends with its first token
        ([[submit(request(1, 3, 9), request(2))], [], [Cancel([2]), submit(request(3))]], PADDED, 1),
        ([[submit(request(1, 3, 9))], [], [Cancel([1]), submit(request(2))]], PADDED, 0),
        # batches are counted, not sequences
        ([[submit(request(1, 3, 9))], [], [submit(request(2), request(3))]], PADDED, 1),
        # the sequence that it joins ends in the same step
        ([[submit(request(1, 3, 2))], [submit(request(2, 3, 4))]], {"padded": False, "block_size": 1}, 1),
    ],
)
def test_a_prefill_that_joins_a_running_batch_is_a_concatenation(
    tmp_path: Path, turns: list[Turn], kind: dict[str, Any], expected: int
) -> None:
    script = run(tmp_path, turns, **kind)
    assert sum(after.concatenated for after in script.seen) == expected


def test_sequences_that_fail_in_a_step_count_as_part_of_it(tmp_path: Path) -> None:
    poisoned = Request(1, [77, 77], 5, False, request(1).sampling_params, request(1).logprob_options)
    script = run(tmp_path, [[submit(poisoned, request(2, 3, 4))], [submit(request(3, 3, 9))]], padded=True)
    assert script.seen[0] == After(1, 4, 3, num_prefills=2, prefill_tokens=2 * 3, scheduled=2)
    assert script.seen[1] == After(1, 5, 2, num_decodes=1)


def test_queue_time_starts_at_arrival_even_during_a_long_step(tmp_path: Path) -> None:
    now = time.monotonic()
    script = run(tmp_path, [[Submit([request(1)], now - 500)], [], [Submit([request(2)], now - 200)]])
    assert [int(seconds) // 100 for stats in script.stats for seconds in stats.first_scheduled.values()] == [5, 2]


def test_sequences_of_a_failed_step_are_requeued(tmp_path: Path) -> None:
    """The third step of two sequences runs out of memory; then one of them is recomputed alone."""
    turns: list[Turn] = [[submit(*[request(n, 3, 9) for n in range(4)])], [], [], []]
    script = run(tmp_path, turns, padded=False, max_batch_size=2, memory_tokens=9)
    assert [stats.num_requeued for stats in script.stats] == [0, 0, 1]  # the other two have never run
    assert script.seen[-1] == After(1, 6, 6, num_prefills=1, prefill_tokens=5)


@pytest.mark.parametrize(
    ("turns", "kind", "expected"),
    [
        (TWO_THEN_ONE, {"padded": True}, [3 + 5, 0, 2, 0]),  # without padding
        (
            [[submit(request(1, 3, 4))], [submit(request(2, 9, 3))], [], []],
            {"block_size": 1, "prefill_tokens": 4},
            [3, 3, 3, 3],
        ),  # chunks
        # the second prompt is cached but for its last token
        (
            [[submit(request(1, 9, 2))], [], [submit(request(2, 9, 2))], []],
            {"block_size": 4, "prefix_cache": True},
            [9, 0, 9, 0],
        ),
        # the third step preempts one sequence, the last one computes it again
        (
            [[submit(request(1, 2, 4), request(2, 2, 4))], [], [], [], []],
            {"block_size": 1, "weight": 8},
            [2 + 2, 0, 0, 0, 0],
        ),
        # the third step runs out of memory, and one of the two is computed again
        ([[submit(request(1, 3, 9), request(2, 4, 9))], [], [], []], {"memory_tokens": 9}, [3 + 4, 0, 0]),
    ],
)
def test_each_input_token_counts_once(
    tmp_path: Path, turns: list[Turn], kind: dict[str, Any], expected: list[int]
) -> None:
    script = run(tmp_path, turns, **({"padded": False} | kind))
    assert [stats.prompt_tokens for stats in script.stats] == expected


def admissions(turns: list[list[tuple[int, int]]], **kind: Any) -> tuple[int, int, int, int]:
    """Count admissions of requests with these prompt lengths and new tokens, one step per turn."""
    batcher, now, ids = Batcher(limits(**kind), {EOS}), 0.0, iter(range(99))
    total = [0, 0, 0, 0]
    for turn in turns:
        batcher.submit([request(next(ids), *lengths) for lengths in turn], now)
        plan = batcher.plan(now)
        assert plan.seqs
        batcher.commit(plan, [[7]] * len(plan.sampled), now)
        now += 0.5
        new = batcher.take_counters()
        counts = (new.queue_jumps, new.granular_additions, new.prefill_weight_exceeded, new.prefill_padding_exceeded)
        total = [old + more for old, more in zip(total, counts, strict=True)]
    return total[0], total[1], total[2], total[3]


def test_admission_counters() -> None:
    kind = {"padded": False}
    assert admissions([[(3, 5), (3, 5)]], **kind) == (0, 0, 0, 0)
    # 60 of 100 tokens are taken, 70 do not fit: the third joins before the second
    assert admissions([[(4, 56)], [], [(4, 66), (4, 6)]], weight=100, **kind) == (1, 0, 0, 0)
    # at worst 50 + 42 + 40 of 100 tokens, but the second will have ended
    assert admissions([[(8, 42), (38, 4)], [], [(5, 35)]], weight=100, **kind, prefill_tokens=50) == (0, 1, 0, 0)
    # one step takes 10 prompt tokens
    assert admissions([[(9, 5)] * 4], **kind, prefill_tokens=10) == (0, 0, 3, 0)
    assert admissions([[(20, 5), (2, 5), (19, 5)]], padded=True, max_prefill_padding=0.2) == (1, 0, 0, 1)


@run_async
async def test_queue_size_follows_arrivals_cancels_schedules_and_ends() -> None:
    metrics = make_metrics()
    client, _ = connected_client(metrics)

    def queue() -> tuple[float, int]:
        metrics.set_num_queued(len(client.queued()))
        return value(metrics, "tgi_queue_size"), sum(len(one.tokens) for one in client.queued())

    def step(ids: list[int], ends: list[StopReason], stats: StepStats | None) -> Step:
        return Step(ids, [[7]] * len(ids), [*ends], [], stats)

    outputs = engine_outputs([request(n, 10 + n) for n in range(5)])
    with client.submit(outputs):
        assert queue() == (5, 10 + 11 + 12 + 13 + 14)
        client.cancel(outputs[4])
        assert queue() == (4, 46)
        client.handle(step([0, 1], [StopReason.NOT_FINISHED] * 2, joined([0, 1])))
        assert queue() == (2, 25)
        client.handle(step([2], [StopReason.TIME_LIMIT], None))
        assert queue() == (1, 13)
        client.handle(step([0, 1], [StopReason.NOT_FINISHED] * 2, joined([], returned=1)))
        assert queue() == (2, 13)
    assert queue() == (0, 0)


@run_async
async def test_tokens_are_counted_when_they_come_whatever_becomes_of_the_request() -> None:
    metrics = make_metrics()
    client, _ = connected_client(metrics)

    def counts() -> list[float]:
        names = (
            "tgi_batch_generated_tokens",
            "tgi_batch_discarded_tokens",
            "tgi_request_inter_token_latency_duration_count",
        )
        return [value(metrics, name) for name in (*names, "tgi_request_time_to_first_token_duration_count")]

    def step(tokens: dict[int, list[int]], end: StopReason = StopReason.NOT_FINISHED) -> Step:
        return Step([*tokens], [*tokens.values()], [end] * len(tokens), [], joined([]))

    arrived = time.monotonic() - 500
    outputs = engine_outputs([request(n) for n in range(3)], arrived)
    with client.submit(outputs):
        client.handle(step({0: [7], 1: [7]}))
        assert counts() == [2, 0, 0, 2]
        client.handle(step({0: [7, 7], 1: [7]}))  # two tokens in one step have no time between them
        assert counts() == [5, 0, 2, 2]
        client.cancel(outputs[0])
        client.handle(step({0: [7], 1: [7]}))
        assert counts() == [7, 1, 3, 2]
        client.handle(step({2: []}, StopReason.TIME_LIMIT))  # expired in the queue
        assert counts() == [7, 1, 3, 2]
        assert [output.num_tokens for output in outputs] == [3, 3, 0]
    assert value(metrics, "tgi_request_time_to_first_token_duration_sum") == pytest.approx(2 * 500, abs=60)


def joined(ids: list[int], returned: int = 0) -> StepStats:
    return StepStats(True, 2, 0, 9, 0.1, 0.1, 2, 9, 9, False, returned, dict.fromkeys(ids, 0.1))
