"""Slots for the states of recurrent layers, and their snapshots in the prefix cache."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from batches import EOS, busy, check_pool, limits, preempted
from proposers import proposing

from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import StepPlan
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.speculation.lookup import Lookup
from tgis.speculation.speculator import Speculator

SIZE = 4  # tokens of a block
PAGED: dict[str, Any] = {"padded": False, "block_size": SIZE, "prefix_cache": True, "state_slots": 12}


def ask(number: int, tokens: list[int], new: int = 1, salt: bytes = b"", *, logprobs: bool = False) -> Request:
    return Request(number, tokens, new, False, SamplingParams(), LogprobOptions(input_tokens=logprobs), cache_salt=salt)


class Sixes(Speculator):
    def propose(self, _rows: int, lookups: Sequence[tuple[Lookup, int]]) -> list[list[int]]:
        return [[6] * min(most, self._max_tokens) for _, most in lookups]


class World:
    """An engine that keeps in each slot the salt and the tokens that have made its states."""

    def __init__(self, **changes: Any) -> None:
        with proposing(Sixes):
            self.batcher = Batcher(limits(**PAGED | changes), {EOS})
        self.states: dict[int, tuple[bytes, list[int]]] = {}
        self.computed = Counter[int]()  # tokens by request id
        self.texts: dict[int, list[int]] = {}  # of requests that have ended
        self.events = Counter[str]()

    def step(self, accident: str = "", token: int = 8) -> None:
        """Plan a step, write to the slots as an engine does, and commit it unless it fails."""
        plan = self.batcher.plan(0.0)
        self._check(plan)
        for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            self.computed[seq.id] += count
            proposed = plan.proposals.get(seq.id, [])
            begin, end = seq.num_computed_tokens, seq.num_computed_tokens + count + len(proposed)
            assert all(begin <= at < end and (proposed or at % SIZE == SIZE - 1) for at in seq.state_saves)
            tokens = [] if accident == "failed step" else [*seq.tokens[: begin + count], *proposed]
            for at, slot in [*seq.state_saves.items(), (end - 1, seq.state_slot)]:
                self.states[slot] = seq.request.cache_salt, tokens[: at + 1]
        if plan.seqs and accident == "failed step":
            self.batcher.rollback(plan, out_of_memory=token % 2 > 0)
        elif plan.seqs:
            gone = plan.seqs[: accident == "failed sequence"]
            self.batcher.drop(gone)
            rest = plan.without({seq.id for seq in gone})
            sixes = {seq.id: plan.proposals.get(seq.id, []) for seq in rest.sampled}
            kept = {seq.id: sixes[seq.id][: (token + len(seq.tokens)) % 4] for seq in rest.sampled}
            self.computed.update({number: len(tokens) for number, tokens in kept.items()})
            new = [[*tokens, *[token] * (1 + token % 2)] for tokens in kept.values()]
            self.batcher.commit(rest, new, 0.0, plan.proposals)
            self.events += Counter(proposed=sum(map(len, sixes.values())), kept=sum(map(len, kept.values())))
        self.texts |= {seq.id: seq.tokens for seq in plan.sampled if seq.finished}

    def _check(self, plan: StepPlan) -> None:
        """A slot has one use in a step, and each sequence goes on from the states of its computed tokens."""
        pool, running = self.batcher._block_manager.states.pool, self.batcher.running  # type: ignore[union-attr]
        written = [slot for seq in running for slot in [seq.state_slot, *seq.state_saves.values()]]
        sources = {seq.state_source for seq in running} - {-1}
        check_pool(pool)
        assert len({*written, *sources}) == len(written) + len(sources) == pool.num_used
        for seq in running:
            slot = seq.state_source if seq.state_source >= 0 else seq.state_slot
            if done := seq.num_computed_tokens:
                assert self.states[slot] == (seq.request.cache_salt, seq.tokens[:done])
                self.events["source" if seq.state_source >= 0 else "slot"] += not self.computed[seq.id]
        self.events += Counter(saves=sum(len(seq.state_saves) for seq in plan.seqs), preempted=len(preempted(plan)))
        self.events["snapshots"] = len(pool._cached_blocks)

    def run(self, *requests: Request) -> list[int]:
        """Run requests that arrive together to their ends; the numbers of tokens that they have computed."""
        self.batcher.submit(requests, 0.0)
        while busy(self.batcher):
            self.step()
        return [self.computed[request.id] for request in requests]


def test_each_sequence_goes_on_from_the_states_of_its_tokens() -> None:
    events = Counter[str]()
    for seed in range(24):
        rng = random.Random(seed)
        sizes = {"weight": rng.choice([80, 200, 1000]), "prefill_tokens": rng.choice([6, 30])}
        world = World(**sizes, state_slots=4 + seed % 5 * 3, proposed_tokens=seed % 3 * 4)
        for number in range(100):
            known = rng.choice([*world.texts.values(), [3] * 9, [5] * 22])
            tokens = [*known[: rng.choice([9, 22, len(known)])], *range(rng.randint(1, 9))][-60:]
            salt, logprobs = rng.choice([b"", b"", b"salt"]), rng.random() < 0.1
            world.batcher.submit([ask(number, tokens, rng.randint(1, 15), salt, logprobs=logprobs)], 0.0)
            for _ in range(rng.randint(0, 6)):
                world.step(rng.choice(["failed step", "failed sequence", *[""] * 20]), rng.randint(7, 9))
            world.batcher.cancel([number - rng.randint(0, 30)])
        world.run()
        world.step()  # nothing runs and no slot is in use
        events += world.events
    assert min(events[name] for name in ("source", "slot", "saves", "preempted", "proposed", "kept")) > 20


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize(("slots", "proposed"), [(4, 0), (12, 0), (14, 6)])  # with 4 it takes over its snapshot's slot
def test_the_next_turn_computes_only_what_follows_the_last_full_block(slots: int, proposed: int, length: int) -> None:
    world, text = World(state_slots=slots, proposed_tokens=proposed), list[int]()
    for turn in range(5):
        known = max(len(text) - 1, 0) // SIZE * SIZE  # the last token of an answer is not computed
        prompt = [*text, *[turn] * length]
        assert world.run(ask(turn, prompt, length + turn)) == [len(prompt) + length + turn - 1 - known]
        text = world.texts[turn]


def test_a_common_system_prompt_is_computed_once_if_it_comes_at_once_and_else_twice() -> None:
    requests = [ask(number, [1] * 30 + [number] * 10) for number in (2, 3, 4)]
    assert World().run(*requests) == [40, 40 - 28, 40 - 28]
    world, uncached = World(), World(prefix_cache=False)
    assert [world.run(request) for request in requests] == [[40], [40], [40 - 28]]
    assert (uncached.run(*requests), uncached.events["saves"]) == ([40] * 3, 0)


def test_one_snapshot_of_the_prompt_and_one_of_the_answer_are_kept() -> None:
    world, prompt = World(prefill_tokens=6), [1] * 18
    requests = ask(1, prompt, 20), ask(2, prompt), ask(3, prompt, logprobs=True)
    assert [*map(world.run, requests)] == [[37], [2], [18]]
    assert (world.events["saves"], world.events["snapshots"]) == (6, 2)  # after 16, 20 and so on up to 36 tokens
    world.batcher.flush_cache()
    assert (world.run(ask(4, [2])), world.events["snapshots"]) == ([1], 0)


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    world = World(state_slots=6)  # one for the sequence that runs, and one snapshot of each text
    order = [0, 1, 2, 3, 4, 0, 5, 0, 5, 1]
    computed = [*map(world.run, [ask(number, [text] * 10) for number, text in enumerate(order)])]
    assert computed == [[10]] * 5 + [[2], [10], [2], [2], [10]]
