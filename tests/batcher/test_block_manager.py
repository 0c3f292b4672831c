"""Batches with KV blocks: prefix caching, and preemption when blocks run out; the same of encoder-decoders."""

from collections.abc import Callable
from typing import Any

import pytest
from batches import EOS, busy, check_pool, ids, limits, next_plan, pool_of, preempted

from tgis.batcher.batcher import Batcher
from tgis.batcher.block_pool import BlockPool
from tgis.batcher.capacity import encoder_decoder_room
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import BatcherCounters, WaitReason
from tgis.ipc.request import LogprobOptions, Request, SamplingParams

SIZE = 4  # tokens of a block
BUDGET = 8  # prefill tokens of a step without decodes


def batcher(blocks: int = 100, *, prefix_cache: bool = True, **changes: int) -> Batcher:
    values = {"prefill_tokens": BUDGET, "max_batch_size": 8, "block_size": SIZE} | changes
    return Batcher(limits(blocks * values["block_size"], padded=False, prefix_cache=prefix_cache, **values), {EOS})


def queued(requests: list[Request], blocks: int = 100, **changes: Any) -> Batcher:
    one = batcher(blocks, **changes)
    one.submit(requests, 0.0)
    return one


def ask(
    number: int,
    tokens: list[int],
    new: int = 1,
    *,
    salt: bytes = b"",
    details: LogprobOptions | None = None,
    deadline: float | None = None,
    adapter: AdapterRef | None = None,
) -> Request:
    return Request(number, tokens, new, False, SamplingParams(), details or LogprobOptions(), deadline, salt, adapter)


def step(one: Batcher, token: int = 7, now: float = 0.0) -> StepPlan:
    plan = next_plan(one, now)
    one.commit(plan, [[token]] * len(plan.sampled), now)
    check_pool(pool_of(one))
    return plan


def work(one: Batcher, token: int = 7) -> list[dict[int, int]]:
    """Run to the end; how many tokens each request computed in each step."""
    steps = []
    while busy(one):
        plan = step(one, token)
        steps.append(dict(zip(ids(plan.seqs), plan.num_scheduled_tokens, strict=True)))
    assert pool_of(one).num_used == 0
    return steps


def computed(one: Batcher, last: Request) -> int:
    """Run to the end; how many tokens the last request computed."""
    one.submit([last], 0.0)
    return sum(counts.get(last.id, 0) for counts in work(one))


def prompt(length: int, first: int = 1000) -> list[int]:
    return list(range(first, first + length))


def test_flushed_prefixes_are_computed_again_and_running_requests_keep_theirs() -> None:
    one = queued([ask(1, prompt(9), 6)])
    step(one), step(one), step(one)
    one.flush_cache()
    assert computed(one, ask(2, prompt(9))) == 9
    assert computed(one, ask(3, prompt(9))) == 1
    one.flush_cache()  # nobody uses the blocks any more
    check_pool(pool_of(one))
    assert computed(one, ask(4, prompt(9))) == 9


@pytest.mark.parametrize(
    ("length", "hits"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 28), (32, 28), (33, 32)]
)
def test_a_cached_prompt_is_computed_from_its_last_block_on(length: int, hits: int) -> None:
    one = batcher()
    assert computed(one, ask(1, prompt(length), 2)) == length + 1
    assert one.take_counters() == BatcherCounters(prefix_cache_queries=length)
    assert computed(one, ask(2, prompt(length))) == length - hits  # at least one, for its logits
    assert one.take_counters() == BatcherCounters(prefix_cache_queries=length, prefix_cache_hits=hits)


def test_generated_tokens_are_cached_for_the_next_turn() -> None:
    one = queued([ask(1, prompt(10), 8)])
    work(one, token=3)
    assert computed(one, ask(2, [*prompt(10), *[3] * 7, 5, 5, 5])) == 20 - 16


def test_no_salt_reaches_the_cached_blocks_of_others() -> None:
    """Not even the hash of their first block."""
    one = queued([ask(1, prompt(20), salt=b"a" * 32)])
    work(one)
    for number, key in enumerate(list(pool_of(one)._cached_blocks), 2):
        assert computed(one, ask(number, prompt(20)[4:], salt=key)) == 16


def started(prompt_length: int = 24) -> tuple[Batcher, StepPlan]:
    """A request in the middle of its prefill, and one that waits for its blocks."""
    one = queued([ask(1, prompt(prompt_length))])
    step(one)
    one.submit([ask(2, [*prompt(prompt_length), 5])], 0.0)
    plan = next_plan(one)
    assert ids(plan.seqs) == [1]
    assert one.state(0.0, max_seqs=9).wait_reason is WaitReason.PREFIX_CACHE
    return one, plan


def test_a_prompt_waits_for_an_inflight_prefix() -> None:
    one, plan = started()
    one.commit(plan, [], 0.0)
    assert sum(counts.get(2, 0) for counts in work(one)) == 1
    assert one.take_counters() == BatcherCounters(prefix_cache_queries=24 + 25, prefix_cache_hits=24)


def test_a_prompt_waits_only_for_the_shared_part() -> None:
    one = queued([ask(1, prompt(80))])
    step(one)
    one.submit([ask(2, [*prompt(16), 5, 5, 5])], 0.0)
    assert [2 in ids(step(one).seqs) for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize(
    "end", [lambda one, _plan: one.cancel([1]), lambda one, plan: one.drop(plan.seqs)], ids=["cancelled", "failed"]
)
def test_a_prompt_goes_on_where_the_inflight_prefix_ended(end: Callable[[Batcher, StepPlan], object]) -> None:
    one, plan = started()
    end(one, plan)
    assert [counts.get(2) for counts in work(one)] == [8, 8, 1]  # of 25 tokens, 8 were done
    assert pool_of(one).num_used == 0


def test_a_prompt_waits_for_the_retry_of_an_inflight_prefix() -> None:
    one, plan = started()
    one.rollback(plan, out_of_memory=False)
    steps = work(one)
    assert sum(counts.get(1, 0) for counts in steps) == 16  # what is not cached is recomputed
    assert sum(counts.get(2, 0) for counts in steps) == 1


def test_blocks_of_a_failed_step_are_not_cached() -> None:
    one = queued([ask(1, prompt(20))])
    for _ in range(2):
        one.rollback(next_plan(one), out_of_memory=False)  # it fails alone for the second time
    assert not busy(one)
    assert computed(one, ask(2, prompt(20))) == 20


def test_the_end_of_a_prefix_is_evicted_first() -> None:
    one = queued([ask(1, prompt(24))], blocks=8)
    work(one)
    one.submit([ask(2, prompt(16, 500))], 0.0)  # two blocks are free: two of the first's are evicted
    work(one)
    assert computed(one, ask(3, prompt(24))) == 24 - 16


def test_free_blocks_with_low_numbers_are_used_first() -> None:
    """Memory is real where they are."""
    pool = BlockPool(9)
    blocks = pool.allocate(6)
    for freed in ([4], [1, 3], [0]):
        pool.free(freed)
    assert (blocks, pool.allocate(5)) == ([*range(6)], [0, 1, 3, 4, 6])


def test_shared_blocks_are_counted_once() -> None:
    one = queued([ask(1, prompt(24), 8)], blocks=10)
    for _ in range(3):
        step(one)
    one.submit([ask(2, [*prompt(24), 5, 5], 2)], 0.0)  # of ten blocks it needs seven, six of them shared
    assert ids(step(one).seqs) == [1, 2]
    assert pool_of(one).num_used == 8


def test_what_has_to_wait_is_overtaken_without_much_hashing() -> None:
    """In a step about 256 blocks are hashed, and those of one prompt, to find out what may overtake."""
    one = queued([ask(1, prompt(400), 50)], 1000, block_size=1, prefill_tokens=1000, max_batch_size=99)
    step(one)
    one.submit([ask(n, [*prompt(300), n]) for n in (2, 3, 4)], 0.0)
    assert ids(step(one).seqs) == [1, 2, 3, 4]  # none of them overtakes
    one.submit([ask(5, prompt(900, 5000)), *(ask(n, [*prompt(399), n]) for n in (6, 7, 8))], 0.0)
    assert [ids(step(one).seqs) for _ in range(3)] == [[1, 6], [1, 7], [1, 8]]


def test_a_preempted_sequence_reuses_its_cached_blocks() -> None:
    one = queued([ask(0, prompt(8), 20), ask(1, prompt(8, 100), 20)], 8, prefill_tokens=64)
    lost: list[Sequence] = []
    for _ in range(200):
        plan = step(one)
        lost += preempted(plan)
        if lost and lost[0] in plan.seqs:
            break
    seq = lost[0]
    admissions = one.take_counters()
    assert admissions.prefix_cache_queries == 8 + 8 + len(seq.tokens) - 1  # after the step it has one more
    assert admissions.prefix_cache_hits > 0
    assert seq.num_computed_tokens == len(seq.tokens) - 1


def test_the_last_sequence_waits_for_blocks_and_gives_its_own_to_older_ones() -> None:
    one = queued([ask(0, prompt(5), 12), ask(1, prompt(3, 100), 12)], 5, prefix_cache=False, prefill_tokens=64)
    plans = [
        step(one) for _ in range(9)
    ]  # the last lacks a third block from the seventh on; in the ninth the first needs a fourth
    assert [ids(plan.seqs) for plan in plans] == [*[[0, 1]] * 6, [0], [0], [0]]
    assert [ids(preempted(plan)) for plan in plans] == [*[[]] * 8, [1]]
    assert one.state(0.0, max_seqs=9).wait_reason is WaitReason.MEMORY


def test_lookahead_blocks_come_one_step_early_and_are_no_more_in_all() -> None:
    one = queued([ask(0, prompt(6), 7)], 20, lookahead=1)
    held = [
        len(step(one).seqs[0].block_table) for _ in range(6)
    ]  # for 7, 8, ... 12 tokens, and 12 of the 13 are computed
    assert held == [2, 2, 3, 3, 3, 3]
    step(one)
    assert (busy(one), pool_of(one).num_used) == (False, 0)


def test_an_unfinished_prompt_gets_no_lookahead_block() -> None:
    one = queued([ask(0, prompt(16), 7)], 20, lookahead=1)
    assert [len(step(one).seqs[0].block_table) for _ in range(2)] == [2, 5]


def test_lookahead_preempts_nothing() -> None:
    """A lookahead block would have been allocated in the next step anyway; if none is free, none is allocated early."""
    lost = {}
    for lookahead in (0, 1):
        one = batcher(6, lookahead=lookahead, prefix_cache=False)
        one.submit([ask(n, prompt(7, 100 * n), 9) for n in range(4)], 0.0)
        lost[lookahead] = [ids(preempted(step(one))) for _ in range(28)]
        assert pool_of(one).num_used <= 6
        assert one.take_counters().preemptions == sum(map(len, lost[lookahead]))
    assert lost[1] == lost[0]
    assert [1] in lost[0]


def encoder_decoder(blocks: int = 100, **changes: Any) -> Batcher:
    return batcher(blocks, encoder_decoder=True, **changes)


def soft_prompt(encoder: int, decoder: int) -> AdapterRef:
    return AdapterRef("a", encoder + decoder + (decoder > 0), decoder, 100, 1)


@pytest.mark.parametrize(
    ("length", "adapter", "lookahead", "held"),
    [
        (1, None, 0, [2, 2, 2, 2, 3]),  # one block for the input; the fifth step computes the fifth token
        (4, None, 0, [2, 2, 2, 2, 3]),
        (5, None, 0, [3, 3, 3, 3, 4]),
        (5, None, 1, [3, 3, 3, 4, 4]),
        (5, None, 9, [4, 4, 4, 4, 4]),  # no more than it may need
        (5, soft_prompt(0, 2), 9, [4, 4, 4, 4, 4]),  # 2 + 1 + 5 tokens
        (5, soft_prompt(0, 0), 0, [3, 3, 3, 3, 4]),  # LoRA
        (5, soft_prompt(3, 0), 0, [3, 3, 3, 3, 4]),
        (5, soft_prompt(4, 0), 0, [4, 4, 4, 4, 5]),
        (5, soft_prompt(0, 2), 0, [3, 3, 4, 4, 4]),
        (5, soft_prompt(4, 4), 0, [5, 5, 5, 5, 6]),
    ],
)
def test_the_input_of_an_encoder_decoder_has_blocks_of_its_own(
    length: int, adapter: AdapterRef | None, lookahead: int, held: list[int]
) -> None:
    one = encoder_decoder(lookahead=lookahead)
    tokens = prompt(length + (adapter.length if adapter else 0))
    one.submit([ask(1, tokens, 6, adapter=adapter)], 0.0)
    assert [len(step(one).seqs[0].block_table) for _ in held] == held
    work(one)


def test_equal_inputs_of_encoder_decoders_share_nothing() -> None:
    one = encoder_decoder(prefill_tokens=64)
    one.submit([ask(n, prompt(10), 2) for n in range(3)], 0.0)
    assert work(one) == [dict.fromkeys(range(3), 10), dict.fromkeys(range(3), 1)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("blocks", [2, 3, 5])
@pytest.mark.parametrize("decoder_length", [0, 1, 3])
def test_a_request_of_the_maximal_length_runs_to_its_end(size: int, blocks: int, decoder_length: int) -> None:
    """However input and output share the tokens; one token more would not fit in all cases."""
    one = encoder_decoder(blocks, block_size=size)
    adapter = soft_prompt(0, decoder_length)
    most = encoder_decoder_room(one._limits.token_capacity, size)
    for length in range(adapter.length + 1, most):
        one.submit([ask(length, prompt(length), most - length, adapter=adapter)], 0.0)
        assert len(work(one)) == most - length
    assert one._block_manager is not None
    needed = [
        one._block_manager.blocks_for(Sequence(ask(0, prompt(length)), 0.0), most) for length in range(1, most + 1)
    ]
    assert max(needed) == blocks + 1


def test_a_prompt_of_an_encoder_decoder_is_computed_whole() -> None:
    """As many prompts join as about one step computes; the others may still overtake one another."""
    one = encoder_decoder()
    one.submit([ask(n, prompt(length, 100 * n), 9) for n, length in enumerate([20, 5, 3, 30, 2])], 0.0)
    steps = []
    for _ in range(4):
        plan = step(one)
        steps.append((dict(zip(ids(plan.seqs), plan.num_scheduled_tokens, strict=True)), len(one.running)))
    assert steps == [({0: 20}, 1), ({0: 1, 1: 5}, 3), ({0: 1, 1: 1, 2: 3}, 4), ({0: 1, 1: 1, 2: 1, 3: 30}, 4)]
