"""When prefills interrupt decodes, and how the budget of a step is split, in simulated time."""

import pytest
from batches import EOS, limits, request
from hypothesis import given
from hypothesis import strategies as st

from tgis.batcher.batcher import Batcher
from tgis.batcher.prefill_budget import split_budget
from tgis.batcher.sequence import Sequence


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


def test_a_step_beside_decodes_has_the_prompt_tokens_that_fit_into_the_gap() -> None:
    bounds = limits(1 << 30, padded=False, block_size=16, prefill_tokens=800, max_prefill_gap_ms=100)
    batcher = Batcher(bounds, {EOS})

    def prompt_tokens_of_step(token_seconds: float) -> int:
        plan = batcher.plan(0.0)
        tokens = sum(plan.num_prefill_tokens)
        batcher.commit(plan, [[7]] * len(plan.sampled), token_seconds * tokens)
        return tokens

    batcher.submit([request(1, 800, max_new=99)], 0.0)
    assert prompt_tokens_of_step(0.0001) == 800  # nothing decodes
    batcher.submit([request(2, 3000, max_new=99)], 0.0)
    seen = [prompt_tokens_of_step(seconds) for seconds in (0.0001, 0.0002, 0.0002, 0.008, 0.0002, 0.0001)]
    assert seen == [799, 799, 400, 400, 100, 113]  # 80 of 100 ms, but at least an eighth of 800 tokens


def _sequence(number: int, length: int, decoding: bool) -> Sequence:
    seq = Sequence(request(number, length), 0.0)
    if decoding:
        seq.num_computed_tokens = len(seq.tokens)
        seq.tokens.append(7)
    return seq


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([130, 130, 130], 100, [100]),  # one after the other
        ([130, 90, 130], 100, [50, 50]),
        ([120, 120, 40], 150, [110, 0, 40]),
        ([700, 700, 130], 200, [100, 0, 100]),  # those longer than a step share it
        ([700, 700], 200, [100, 100]),
        ([130, 130, 130], 400, [130, 130]),  # enough end with the step
    ],
)
def test_prompts_of_one_length_are_done_one_after_the_other(
    lengths: list[int], budget: int, expected: list[int]
) -> None:
    sequences = [_sequence(n, length, decoding=False) for n, length in enumerate(lengths)]
    split = dict(split_budget(sequences, budget, 512))
    assert [split.get(seq, 0) for seq in sequences] == expected + [0] * (len(lengths) - len(expected))


SEQS = st.lists(
    st.builds(_sequence, st.integers(), st.integers(1, 50), st.booleans()),
    min_size=1,
    max_size=12,
    unique_by=lambda seq: seq.id,
)


@given(SEQS, st.integers(1, 60), st.integers(1, 300))
def test_the_budget_is_split_without_waste(sequences: list[Sequence], budget: int, max_tokens: int) -> None:
    """Unless prompts with 3/8 of a step's tokens end in it."""
    split = {seq.id: tokens for seq, tokens in split_budget(sequences, budget, max_tokens)}
    prefilling = [seq for seq in sequences if not seq.decoding]
    assert all(split[seq.id] == 1 for seq in sequences if seq.decoding)
    sizes = [(split.get(seq.id, 0), seq.num_uncomputed_tokens) for seq in prefilling]
    ended = [count for count, size in sizes if count == size]
    missing = min(budget, sum(size for _, size in sizes)) - sum(count for count, _ in sizes)
    assert missing == 0 or (missing > 0 and sum(ended) >= max_tokens * 3 / 8 > sum(ended) - max(ended))
    assert all(1 <= split.get(seq.id, 1) <= seq.num_uncomputed_tokens for seq in prefilling)
    if prefilling:
        assert split[prefilling[0].id] >= min(prefilling[0].num_uncomputed_tokens, (budget + 1) // 2)
