"""The batcher, rule by rule, with a fake clock."""

from typing import Any
from unittest import mock

import msgspec
import pytest
from batches import EOS, busy, commit, ids, limits, next_plan, next_prefill, queued, request, run_step
from proposers import Adversary, ForcedDrafts, proposing

from tgis.batcher.admission import MAX_ADAPTER_RANKS
from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import Sequence
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import BatcherCounters, WaitReason
from tgis.ipc.request import Request, SamplingParams, StopReason
from tgis.speculation.speculator import Speculator


def generated(batcher: Batcher, the_request: Request, tokens: list[int], now: float = 0.0) -> Sequence:
    """The sequence after these tokens, one per step, or as many as it took to end it."""
    batcher.submit([the_request], 0.0)
    for token in tokens:
        plan, ended = run_step(batcher, token, now)
        if ended:
            break
    return plan.seqs[0]


def test_blocks_are_used_again_before_others_are_touched() -> None:
    batcher = Batcher(limits(160, padded=False, block_size=16), ())
    assert batcher.touched_share == 0
    for number in range(3):
        generated(batcher, request(number, 40, max_new=3), [7] * 3)
    assert batcher.touched_share == 3 / 10  # 43 tokens
    assert not batcher.plan(0.0).seqs
    batcher.forget_cached_prefixes()
    assert batcher.touched_share == 0
    padded = Batcher(limits(), ())  # no blocks: nothing to flush, and none is touched
    padded.flush_cache()
    assert padded.touched_share == 0


IGNORE_EOS = SamplingParams(ignore_eos=True)
STOP_TOKENS = SamplingParams(ignore_eos=True, stop_token_ids=(6, 5), min_new_tokens=3)
GUESSED = [7, 7, 7, EOS, 7, EOS]


def request_with(sampling: SamplingParams, max_new: int) -> Request:
    return msgspec.structs.replace(request(1, max_new=max_new), sampling_params=sampling)


@pytest.mark.parametrize(
    ("one", "tokens", "now", "count", "reason"),
    [
        (request(1, max_new=3), [7] * 10, 0.0, 3, StopReason.MAX_TOKENS),
        (request(1, max_new=3, capped=True), [7] * 10, 0.0, 3, StopReason.TOKEN_LIMIT),
        (request(1, max_new=2), [7, EOS], 0.0, 2, StopReason.EOS_TOKEN),
        (request(1, max_new=9), GUESSED, 0.0, 4, StopReason.EOS_TOKEN),
        (request(1, max_new=6, min_new=5), GUESSED, 0.0, 6, StopReason.EOS_TOKEN),
        (request(1, max_new=9, min_new=8), GUESSED, 0.0, 6, StopReason.NOT_FINISHED),
        (request(1), [7, 98], 0.0, 2, StopReason.EOS_TOKEN),  # another EOS id
        (request(1, min_new=3), [EOS, EOS, EOS], 0.0, 3, StopReason.EOS_TOKEN),
        (request(1, deadline=5.0, min_new=4), [EOS], 5.001, 1, StopReason.TIME_LIMIT),  # before everything else
        (request(1, deadline=5.0, max_new=9), GUESSED, 5.1, 1, StopReason.TIME_LIMIT),
        (request(1, deadline=5.0, max_new=1), [7], 5.0, 1, StopReason.MAX_TOKENS),  # the deadline has not passed
        (request_with(IGNORE_EOS, max_new=3), [EOS] * 3, 0.0, 3, StopReason.MAX_TOKENS),
        (request_with(STOP_TOKENS, max_new=4), [98, 5, EOS, 6], 0.0, 4, StopReason.EOS_TOKEN),
    ],
)
def test_why_a_request_ends(one: Request, tokens: list[int], now: float, count: int, reason: StopReason) -> None:
    """Whether tokens come one by one or together; those after the last are dropped."""
    seq = generated(Batcher(limits(), {EOS, 98}), one, tokens, now)
    assert (seq.num_generated_tokens, seq.stop_reason) == (count, reason)
    batcher = Batcher(limits(padded=False, block_size=4), {EOS, 98})
    (seq,) = batcher.submit([one], 0.0)
    assert batcher.commit(next_plan(batcher), [tokens], now) == [tokens[:count]]
    assert (seq.tokens[seq.prompt_length :], seq.stop_reason) == (tokens[:count], reason)
    if not seq.finished:  # all of them are computed by the next step
        assert next_plan(batcher).num_scheduled_tokens == [count]


def test_a_sequence_stays_out_of_steps_until_its_grammar_is_ready() -> None:
    batcher = Batcher(limits(padded=False, block_size=4), {EOS})
    slow, other = batcher.submit([request_with(SamplingParams(ignore_eos=True, min_new_tokens=9), 9), request(2)], 0.0)
    slow.grammar = mock.Mock(ready=True)
    assert run_step(batcher)[0].seqs == [slow, other]
    slow.grammar.ready = False
    assert run_step(batcher)[0].seqs == [other]
    batcher.cancel([other.id])
    assert other.stop_reason is StopReason.CANCELLED
    assert not batcher.plan(0.0).seqs
    assert not batcher.idle
    slow.grammar.ready = True
    plan, ended = run_step(batcher, EOS)
    assert plan.seqs == ended == [slow]  # nothing can follow


def test_a_prompt_is_no_larger_beside_a_sequence_that_waits_for_its_grammar() -> None:
    batcher = Batcher(limits(padded=False, block_size=4, prefill_tokens=512), {EOS})
    (slow,) = batcher.submit([request(1, 3)], 0.0)
    slow.grammar = mock.Mock(ready=True)
    for _ in range(2):
        run_step(batcher)
    slow.grammar.ready = False
    batcher.submit([request(2, 500)], 0.0)
    assert run_step(batcher)[0].num_scheduled_tokens == [64]  # an eighth, as beside a decode


def with_adapter(one: Request, version: int, rank: int) -> Request:
    return msgspec.structs.replace(one, adapter=AdapterRef(f"a{version}", 0, 0, 100 + version, version, rank))


@pytest.mark.parametrize("kind", [{}, {"padded": False, "block_size": 4}])
def test_the_adapters_of_a_batch_have_a_limited_sum_of_ranks(kind: dict[str, Any]) -> None:
    """Each counts once; sequences without one, or with one that runs already, overtake."""
    batcher = Batcher(limits(max_batch_size=8, **kind), {EOS})
    ranks = {1: 512, 2: 512, 3: 1}
    wanted = [with_adapter(request(n, max_new=2), adapter, ranks[adapter]) for n, adapter in enumerate([1, 2, 3, 1, 2])]
    for one in [*wanted, request(9, max_new=9)]:
        batcher.submit([one], 0.0)
    assert ids(next_prefill(batcher).seqs) == [0, 1, 3, 4, 9]
    assert batcher.state(0.0, max_seqs=9).wait_reason is WaitReason.ADAPTER_RANKS
    together = []
    while busy(batcher):
        plan, _ = run_step(batcher)
        together.append({seq.request.adapter.version for seq in plan.seqs if seq.request.adapter})
    assert all(sum(ranks[version] for version in adapters) <= MAX_ADAPTER_RANKS for adapters in together)
    assert {3} in together


@pytest.mark.parametrize(("step_seconds", "last_step"), [(0.1, 8), (0.01, 95)])
def test_an_answer_leaves_two_steps_or_50_ms_before_it_is_due(step_seconds: float, last_step: int) -> None:
    batcher = Batcher(limits(), {EOS})
    (one,) = batcher.submit([msgspec.structs.replace(request(1, max_new=200), answer_deadline=1.0005)], 0.0)
    for number in range(1, 200):
        plan = batcher.plan((number - 1) * step_seconds)
        if commit(batcher, plan, [[7]], number * step_seconds):
            break
    assert (one.num_generated_tokens, one.stop_reason) == (last_step + 1, StopReason.TIME_LIMIT)


def test_requests_expire_in_the_queue_without_a_token() -> None:
    """After their deadline, or shortly before an answer is due."""
    due = msgspec.structs.replace(request(3), answer_deadline=2.0)
    batcher = queued([request(1), request(2, deadline=1.0), due], max_batch_size=1)
    run_step(batcher)
    assert ids(batcher.expire(1.0)) == []
    (expired,) = batcher.expire(1.1)
    assert (expired.id, expired.num_generated_tokens, expired.stop_reason) == (2, 0, StopReason.TIME_LIMIT)
    assert ids(batcher.expire(1.9)) == []
    assert ids(batcher.expire(1.96)) == [3]
    assert len(batcher.waiting) == 0


def test_a_failed_step_takes_no_request_its_only_token() -> None:
    """Its own prefill was under way: it has not waited through anybody's step."""
    batcher = Batcher(limits(padded=False, block_size=4, prefill_tokens=4), {EOS})
    (seq,) = batcher.submit([request(1, length=6, deadline=1.0)], 0.0)
    plan, _ = run_step(batcher, now=0.5)
    assert plan.num_scheduled_tokens == [4]
    assert batcher.rollback(next_plan(batcher, 0.6), out_of_memory=False) == []
    assert batcher.expire(2.0) == []
    while not seq.finished:
        run_step(batcher, now=2.0)
    assert (seq.num_generated_tokens, seq.stop_reason) == (1, StopReason.TIME_LIMIT)


KINDS: list[dict[str, Any]] = [{}, {"padded": False}, {"padded": False, "block_size": 4}]


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_lets_no_older_requests_of_others_pass(kind: dict[str, Any]) -> None:
    """The flood's small requests may overtake its large one, but nobody whose turn is before theirs."""
    batcher = Batcher(limits(400, max_batch_size=99, **kind), {EOS})
    small = [request(n, 20, 20, client=b"flood") for n in range(2, 60)]
    batcher.submit([request(0, 150, 150, client=b"flood")], 0.0)
    run_step(batcher)
    batcher.submit([request(1, 300, 50, client=b"flood"), *small], 0.5)
    batcher.submit([request(99, 300, 50, client=b"honest")], 9.0)
    joined: list[int] = []
    while 99 not in joined:
        run_step(batcher, now=9.0)
        joined += [seq.id for seq in batcher.running if seq.id not in joined]
    assert joined[:3] == [0, 1, 99]


LARGE, SMALL = 300, 20  # tokens of prompts beside one of 150; a large one does not fit


@pytest.mark.parametrize(
    ("arrivals", "joins"),
    [
        ([(0.0, LARGE), (1.0, SMALL)], True),
        ([(0.0, LARGE), (1.001, SMALL)], False),
        ([(0.0, LARGE), (0.9, LARGE), (1.5, SMALL)], False),  # too late for the first
        ([(0.0, LARGE)] * 64 + [(0.0, SMALL)], True),
        ([(0.0, LARGE)] * 65 + [(0.0, SMALL)], False),  # no more are looked at
    ],
)
def test_what_arrived_within_a_second_may_overtake(arrivals: list[tuple[float, int]], joins: bool) -> None:
    batcher = queued([request(99, 150, 50)], 400, max_batch_size=99, padded=False, block_size=4)
    run_step(batcher)
    for number, (time, length) in enumerate(arrivals):
        batcher.submit([request(number, length, 20)], time)
    for _ in range(3):
        run_step(batcher, now=2.0)
    assert ids(batcher.running) == [99, len(arrivals) - 1][: 1 + joins]


def test_sequences_that_end_in_time_make_room_for_one_that_grows() -> None:
    """They need 12 and 28 tokens, but never together."""
    batcher = queued([request(1, 10, max_new=2), request(2, 5, max_new=23)], weight=34, padded=False)
    assert ids(next_plan(batcher).seqs) == [1, 2]
    assert batcher.take_counters().granular_additions == 1


def test_a_step_out_of_memory_is_rolled_back_and_the_batch_shrinks() -> None:
    batcher = queued([request(n, 10, max_new=5) for n in range(4)], weight=100)
    run_step(batcher)
    failed = next_plan(batcher)
    assert batcher.rollback(failed, out_of_memory=True) == []
    assert (len(batcher.running), len(batcher.waiting)) == (0, 4)
    assert batcher.context_limit == int(44 * 0.9)
    plan = next_plan(batcher)
    assert ids(plan.seqs) == [0, 1]  # 2 x 15 fits into 39
    assert plan.num_scheduled_tokens == [11, 11]  # the token they had is kept
    assert [seq.num_generated_tokens for seq in plan.seqs] == [1, 1]
    paged = queued([request(n, 10, max_new=5) for n in range(4)], weight=100, padded=False, block_size=4)
    run_step(paged)
    paged.rollback(next_plan(paged), out_of_memory=True)
    assert paged.context_limit == int(48 * 0.9)  # of what its blocks hold


def test_a_prefill_out_of_memory_is_halved_and_the_running_sequences_stay() -> None:
    batcher = queued([request(0)], max_batch_size=8)
    run_step(batcher)
    batcher.submit([request(n) for n in range(1, 5)], 0.0)
    assert batcher.rollback(next_prefill(batcher), out_of_memory=True) == []
    assert (len(batcher.running), batcher.context_limit) == (1, 1000)
    assert ids(run_step(batcher)[0].seqs) == [0]  # its stream does not wait for all attempts
    assert ids(next_prefill(batcher).seqs) == [1, 2]
    batcher = queued([request(0)])
    run_step(batcher)
    batcher.submit([request(1)], 0.0)
    batcher.rollback(next_prefill(batcher), out_of_memory=True)
    assert batcher.context_limit == int(2 * 5 * 0.9)  # one input cannot be halved


def test_a_request_that_is_out_of_memory_alone_fails() -> None:
    batcher = queued([request(1), request(2)])
    batcher.rollback(next_plan(batcher), out_of_memory=True)
    plan = next_plan(batcher)
    assert ids(plan.seqs) == [1]
    (refused,) = batcher.rollback(plan, out_of_memory=True)
    assert (refused.id, refused.stop_reason) == (1, StopReason.ERROR)
    assert ids(next_plan(batcher).seqs) == [2]


@pytest.mark.parametrize(("kind", "drafted"), [(Adversary, 0), (ForcedDrafts, 3)])
def test_after_running_out_of_memory_proposals_pause(
    kind: type[Speculator], drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tgis.batcher.batcher.PAUSED_STEPS", 5)
    with proposing(kind):
        guessing = {"block_size": 4, "proposed_tokens": 3, "drafted_tokens": drafted}
        batcher = queued([request(1, max_new=20)], padded=False, **guessing)
    while not ((plan := next_plan(batcher)).proposals or plan.drafts):
        batcher.commit(plan, [[7]], 0.0)
    limit = batcher.context_limit
    assert batcher.rollback(plan, out_of_memory=True) == []
    assert batcher.context_limit == limit
    proposes = []
    while not batcher.idle and (plan := batcher.plan(0.0)).seqs:
        proposes.append(bool(plan.proposals or plan.drafts))
        (ended,) = commit(batcher, plan, [[7]]) or plan.seqs
    assert proposes.index(True) == 5
    assert (ended.stop_reason, ended.num_generated_tokens) == (StopReason.MAX_TOKENS, 20)


def test_as_many_tokens_are_proposed_as_have_blocks_and_their_acceptance_is_counted() -> None:
    speculator = mock.Mock(**{"propose.return_value": [5, [3, 4, 5]]})
    with mock.patch("tgis.batcher.batcher.Speculator", return_value=speculator) as made:
        bounds = limits(16, padded=False, block_size=4, proposed_tokens=5, drafted_tokens=4, vocab_size=800)
        batcher = Batcher(bounds, {EOS})
    assert made.mock_calls == [mock.call(5, 6, 800, 4, bounds.max_drafting)]  # six rows for one sequence
    batcher.submit([request(1, max_new=20), request(2, 1, 20)], 0.0)
    run_step(batcher)
    batcher.take_counters()
    plan = next_plan(batcher, now=1.0)
    assert (plan.drafts, plan.proposals) == ({1: 5}, {2: [3, 4]})  # three blocks, and the rest of the fourth
    tokens, verified = [[5, 6, 5, 8], [3, 9]], {1: [5, 6, 5, 6, 5], 2: [3, 4]}
    one, two = (seq.lookup for seq in plan.seqs)
    commit(batcher, plan, tokens, 1.5, verified)
    counted = BatcherCounters(proposed_tokens=2, accepted_tokens=1, drafted_tokens=5, accepted_drafted_tokens=3)
    assert batcher.take_counters() == counted
    assert speculator.mock_calls == [
        mock.call.policy.may_pay(2),
        mock.call.propose(2, [(one, 18), (two, 18)]),
        mock.call.policy.step_succeeded(9, 0.5, 5),  # rows, seconds, passes of the draft model
        mock.call.drafted(one, [5, 6, 5, 6, 5], [5, 6, 5, 8]),
    ]
    assert [(seq.num_computed_tokens, len(seq.block_table)) for seq in plan.seqs] == [(7, 2), (3, 1)]
    plan = next_plan(batcher, now=2.0)
    commit(batcher, plan, [[7], [7]], 2.5, {1: []})  # the draft model read a prompt instead: its time tells nothing
    rest = [mock.call.policy.may_pay(2), mock.call.propose(2, [(one, 14), (two, 16)]), mock.call.drafted(one, [], [7])]
    assert speculator.mock_calls[4:] == rest
    batcher.cancel([1, 2])
    assert [seq.lookup for seq in plan.seqs] == [None, None]


@pytest.mark.parametrize(("kind", "last"), [({}, [3]), ({"padded": False, "block_size": 4}, [0, 1, 3])])
def test_a_failed_step_is_retried_in_halves_until_one_sequence_is_found(kind: dict[str, Any], last: list[int]) -> None:
    """Sequences that keep their blocks wait meanwhile."""
    batcher = queued([request(n, max_new=50) for n in range(4)], **kind)
    tried: list[list[int]] = []
    refused: list[Sequence] = []
    while len(batcher.waiting) or tried[-1:] != [last]:
        plan = next_prefill(batcher) if not kind else next_plan(batcher)
        tried.append(ids(plan.seqs))
        if 2 in ids(plan.seqs):
            refused += batcher.rollback(plan, out_of_memory=False)
        else:
            batcher.commit(plan, [[7]] * len(plan.sampled), 0.0)
    assert tried[:5] == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [2]]
    assert (ids(refused), len(batcher.running)) == ([2], 3)


def test_only_consecutive_failures_alone_end_a_request() -> None:
    batcher = queued([request(1, max_new=9)], padded=False, block_size=4)
    for _ in range(3):
        assert batcher.rollback(next_plan(batcher), out_of_memory=False) == []
        batcher.commit(next_plan(batcher), [[7]], 0.0)
    assert batcher.rollback(next_plan(batcher), out_of_memory=False) == []
    plan = next_plan(batcher)
    assert batcher.rollback(plan, out_of_memory=False) == plan.seqs
