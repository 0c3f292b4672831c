"""The batcher under random arrivals, cancels, deadlines, failed steps and lack of memory."""

import zlib
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from batches import EOS, check_pool, commit, limits, pool_of, preempted
from hypothesis import given, settings
from hypothesis import strategies as st
from proposers import proposing

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import RequestState
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, StopReason
from tgis.speculation.lookup import Lookup
from tgis.speculation.speculator import Speculator

SALTS = (b"", b"tenant")
CLIENTS = (b"", b"one", b"other")


@dataclass(frozen=True)
class Arrival:
    length: int
    new: int
    step: int
    deadline: float | None = None
    cancelled_at: int | None = None
    poisoned: bool = False
    shared: int = 0  # tokens of a beginning that all have in common
    tenant: int = 0  # tenants share no blocks
    prompt_logprobs: bool = False
    client: int = 0
    soft_prompt: int = 0  # of encoder-decoders: virtual tokens of the decoder; the encoder has two

    def request(self, number: int, *, encoder_decoder: bool = False) -> Request:
        shared = min(self.shared, self.length)
        tokens = [*range(1, 1 + shared), *[1000 + number] * (self.length - shared)]
        details = LogprobOptions(input_tokens=self.prompt_logprobs, logprobs=self.prompt_logprobs)
        salt, client = SALTS[self.tenant], CLIENTS[self.client]
        adapter = None
        if encoder_decoder and self.soft_prompt:
            adapter = AdapterRef("a", self.soft_prompt + 3, self.soft_prompt, 10**6 + number, self.soft_prompt)
            tokens, salt = [0] * adapter.length + tokens, salt + bytes([adapter.version])
        params, deadline = SamplingParams(), self.deadline
        return Request(number, tokens, self.new, False, params, details, deadline, salt, adapter, client=client)


def next_token(tokens: list[int]) -> int:
    """Depends on every token so far, and never ends a sequence."""
    return 10_000 + zlib.crc32(str(tokens).encode()) % 1000


class Guesses(Speculator):
    """Some right tokens, then wrong ones."""

    def propose(self, _rows: int, lookups: SequenceOf[tuple[Lookup, int]]) -> list[list[int]]:
        found = []
        for lookup, most in lookups:
            tokens, count = list(lookup._tokens), min(most, self._max_tokens)
            right = next_token([*tokens, 1]) % (count + 1)
            for at in range(count):
                tokens.append(next_token(tokens) if at < right else 0)
            found.append(tokens[len(tokens) - count :])
        return found


@dataclass
class World:
    """An engine that only counts, and its clients. A step takes half a second."""

    bounds: BatchLimits
    arrivals: list[Arrival]
    memory: int = 10**9  # tokens of context that the engine really has
    max_new_tokens: int = 1  # of a sequence in one step of an engine with blocks
    accidents: frozenset[int] = frozenset()  # steps that fail once
    held: dict[int, int] = field(default_factory=dict)  # id -> computed tokens
    ends: dict[int, list[StopReason]] = field(default_factory=dict)
    out_of_memory: set[int] = field(default_factory=set)  # failed because of it
    tried: set[int] = field(default_factory=set)  # in a step that failed
    passed_over: set[int] = field(default_factory=set)  # waited while a step ran
    rolled_back: set[int] = field(default_factory=set)  # in the last step, if it failed
    generated: dict[int, int] = field(default_factory=dict)
    slots: dict[int, tuple[bytes, object]] = field(default_factory=dict)  # KV slot -> the salt, and what is there

    def run(self) -> None:
        with proposing(Guesses):
            batcher = Batcher(self.bounds, {EOS})
        for step in range(3000):
            now = step * 0.5
            self._come_and_go(batcher, step, now)
            self._end(batcher.expire(now))
            queue = batcher.state(now, 1000).waiting_requests
            plan = batcher.plan(now)
            self._release(plan, batcher)
            if not plan.seqs:
                assert batcher.idle
                if step > 40:
                    break
                continue
            self._check(plan, batcher, queue)
            self.passed_over |= {seq.id for seq in batcher.state(now, 1000).waiting_requests}
            self._step(batcher, plan, step, now)
        assert batcher.idle
        assert self.held == {}
        if batcher._block_manager:
            assert batcher._block_manager.pool.num_used == 0

    def _come_and_go(self, batcher: Batcher, step: int, now: float) -> None:
        for number, a in enumerate(self.arrivals):
            if a.step == step:
                batcher.submit([a.request(number, encoder_decoder=self.bounds.encoder_decoder)], now)
            if a.cancelled_at == step and a.step <= step and number not in self.ends:
                self.ends[number] = [StopReason.CANCELLED]
                batcher.cancel([number])

    def _check(self, plan: StepPlan, batcher: Batcher, queue: list[RequestState]) -> None:
        """What an engine can rely on in a plan, and clients in the order."""
        assert 0 < len(batcher.running) <= self.bounds.max_batch_size
        assert all(
            0 < count <= seq.num_uncomputed_tokens
            for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        )
        if self.bounds.block_size:
            self._check_blocks(plan, batcher)
        else:
            assert all(seq.num_computed_tokens == self.held.get(seq.id, 0) for seq in plan.seqs)
            old, new = (
                [r for r in plan.seqs if r.num_computed_tokens],
                [r for r in plan.seqs if not r.num_computed_tokens],
            )
            assert not new or not old
            assert new or {seq.id for seq in old} == set(self.held)
        left = {seq.id for seq in batcher.state(0.0, 1000).waiting_requests}
        waited = {seq.id: seq.seconds_since_arrival for seq in queue}
        places = {seq.id: place for place, seq in enumerate(queue)}
        for joined in waited.keys() - left - self.tried:  # those are in front
            rivals = [other for other in left if self.arrivals[other].client == self.arrivals[joined].client]
            assert all(waited[other] - waited[joined] <= 1.0 for other in rivals), "overtaken by a later one"
            passed = [other for other in left - self.tried if places.get(other, len(places)) < places[joined]]
            assert all(abs(waited[other] - waited[joined]) <= 1.0 for other in passed), "overtaken by another client's"

    def _check_blocks(self, plan: StepPlan, batcher: Batcher) -> None:
        """The oldest of a client proceed, its youngest are preempted."""
        check_pool(pool_of(batcher))
        tokens = sum(plan.num_scheduled_tokens)
        if self.bounds.encoder_decoder:
            assert plan.sampled == plan.seqs, "a prompt is cut"
            tokens -= sum(plan.num_prefill_tokens[:1])  # the oldest is computed, whatever its size
        assert tokens <= self.bounds.prefill_tokens + len(plan.seqs) + 16
        oldest = batcher.running[0]
        assert oldest in plan.seqs or oldest.retry_group != plan.seqs[0].retry_group
        lost = [seq for seq in preempted(plan) if seq.id not in self.rolled_back]
        mine = [(one, seq) for one in lost for seq in plan.seqs if one.request.client == seq.request.client]
        assert all((one.arrival_time, one.id) > (seq.arrival_time, seq.id) for one, seq in mine)
        for seq in plan.seqs:
            if seq.request.logprob_options.input_tokens and not seq.num_generated_tokens:
                assert seq.num_computed_tokens == self.held.get(seq.id, 0), (
                    "prompt logprobs of these tokens are missing"
                )

    def _step(self, batcher: Batcher, plan: StepPlan, step: int, now: float) -> None:
        self.rolled_back = set()
        for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            self.held[seq.id] = seq.num_computed_tokens + count
            self._write(seq, count)
        self._write_lookahead(plan)
        self._write_proposed(plan)
        manager = batcher._block_manager
        context = manager.pool.num_used * manager.block_size if manager else self._context([*self.held.values()])
        lacking = context > self.memory
        if lacking or step in self.accidents or any(self.arrivals[seq.id].poisoned for seq in plan.seqs):
            self.rolled_back = {seq.id for seq in plan.seqs}
            self.tried |= self.rolled_back
            refused = batcher.rollback(plan, out_of_memory=lacking)
            self.out_of_memory |= {seq.id for seq in refused if lacking}
            self._end(refused)
            return
        tokens = [self._next_tokens(seq, plan.proposals) for seq in plan.sampled]
        ended = commit(batcher, plan, tokens, now + 0.25, plan.proposals)
        self._end(ended)
        if self.memory == 10**9 and not self.bounds.block_size:
            self._check_future(batcher)

    def _next_tokens(self, seq: Sequence, proposals: Mapping[int, list[int]]) -> list[int]:
        """Several if there are blocks, sometimes more than the sequence may still get; one more than was guessed."""
        tokens = list(seq.tokens)
        if proposed := proposals.get(seq.id):
            assert 0 < len(proposed) < seq.num_remaining_tokens
            for guess in [*proposed, None]:
                tokens.append(next_token(tokens))
                if tokens[-1] != guess:
                    return tokens[len(seq.tokens) :]
        several = next_token([*tokens, 0]) % self.max_new_tokens if self.bounds.block_size else 0
        for _ in range(1 + several):
            tokens.append(next_token(tokens))
        return tokens[len(seq.tokens) :]

    def _write(self, seq: Sequence, count: int) -> None:
        """Write tokens to the sequence's blocks, and check that they hold the whole sequence."""
        if self.bounds.block_size:
            contents = self._contents(seq, seq.num_computed_tokens + count)
            assert max(contents) < self.bounds.token_capacity
            self.slots |= {place: contents[place] for place in contents.keys() - self._contents(seq).keys()}
            assert {place: self.slots[place] for place in contents} == contents

    def _contents(self, seq: Sequence, end: int | None = None) -> dict[int, tuple[bytes, object]]:
        """By KV slot what must be there when the tokens up to `end` are computed, or those that are."""
        size, end = self.bounds.block_size, seq.num_computed_tokens if end is None else end
        tokens: dict[int, object] = dict(enumerate(seq.tokens[:end]))
        if self.bounds.encoder_decoder:
            tokens = {at: (_input(seq.request), at) for at in range(seq.request.input_positions if end else 0)}
            if end >= seq.prompt_length:
                first = self._place(seq, seq.prompt_length)  # of the output
                tokens |= {first - 1 - at: -at for at in range(seq.request.decoder_length + 1)}
                tokens |= dict(enumerate(seq.tokens[seq.prompt_length : end], first))
        places = [seq.block_table[at // size] * size + at % size for at in tokens]
        assert len({*places}) == len(places)
        return dict(zip(places, [(seq.request.cache_salt, token) for token in tokens.values()], strict=True))

    def _place(self, seq: Sequence, at: int) -> int:
        """Where in the blocks of a sequence its output token `at` is."""
        if not self.bounds.encoder_decoder:
            return at
        input_blocks = -(-seq.request.input_positions // self.bounds.block_size)
        return input_blocks * self.bounds.block_size + seq.request.decoder_length + 1 + at - seq.prompt_length

    def _write_lookahead(self, plan: StepPlan) -> None:
        """Write the token after the next one, as async decoding does: it must be overwritten before it is read."""
        if size := self.bounds.block_size:
            for seq in plan.sampled:
                at = self._place(seq, len(seq.tokens))
                if self.bounds.lookahead and seq.num_remaining_tokens > 1 and at < len(seq.block_table) * size:
                    self.slots[seq.block_table[at // size] * size + at % size] = b"", -1

    def _write_proposed(self, plan: StepPlan) -> None:
        """Write what has been guessed into blocks that only its sequence has."""
        size = self.bounds.block_size
        for seq in plan.seqs:
            for at, token in enumerate(plan.proposals.get(seq.id, ()), self._place(seq, len(seq.tokens))):
                block = seq.block_table[at // size]
                assert all(block not in other.block_table for other in plan.seqs if other is not seq)
                self.slots[block * size + at % size] = seq.request.cache_salt, token

    def _check_future(self, batcher: Batcher) -> None:
        """Memory must suffice if all that runs goes on to its end without further arrivals."""
        seqs = [
            [seq.prompt_tokens + seq.generated_tokens, seq.remaining_tokens]
            for seq in batcher.state(0.0, 1000).running_requests
        ]
        while len(seqs) > 1:  # one alone is always allowed
            assert self._context([length for length, _ in seqs]) <= self.bounds.token_capacity
            seqs = [[length + 1, rest - 1] for length, rest in seqs if rest > 0]

    def _context(self, lengths: list[int]) -> int:
        return len(lengths) * max(lengths, default=0) if self.bounds.padded else sum(lengths)

    def _release(self, plan: StepPlan, batcher: Batcher) -> None:
        """All sequences that have left the batch are named, and no others are held."""
        for seq in plan.to_release:
            self.held.pop(seq.id, None)  # it may not have been in a step yet
        assert self.held.keys() <= {seq.id for seq in batcher.running}

    def _end(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.ends.setdefault(seq.id, []).append(seq.stop_reason)
            self.generated[seq.id] = seq.num_generated_tokens
            alone = Sequence(seq.request, 0.0)
            while len(alone.tokens) < len(seq.tokens):
                alone.tokens.append(next_token(alone.tokens))
            assert seq.tokens == alone.tokens


def _input(one: Request) -> tuple[bytes, tuple[int, ...]]:
    return one.cache_salt, tuple(one.tokens)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        length=st.integers(1, 30),
        new=st.integers(1, 8),
        step=st.integers(0, 20),
        deadline=st.sampled_from([None, None, 3.0, 10.0]),
        cancelled_at=st.sampled_from([None, None, 5, 9, 15, 30]),
        poisoned=st.sampled_from([False] * 9 + [True]),
        shared=st.sampled_from([0, 6, 17, 30]),
        tenant=st.sampled_from([0, 0, 0, 1]),
        prompt_logprobs=st.sampled_from([False] * 4 + [True]),
        client=st.sampled_from([0, 0, 0, 1, 2]),
        soft_prompt=st.sampled_from([0, 0, 1, 4]),
    ),
    max_size=25,
)
PADDED = {
    "weight": st.sampled_from([40, 90, 200, 1000]),
    "max_batch_size": st.integers(1, 8),
    "prefill_tokens": st.sampled_from([4, 40]),
    "max_prefill_padding": st.sampled_from([0.0, 0.2, 1.0]),
    "max_waiting_tokens": st.sampled_from([0, 3, 24]),
}
FLAT = PADDED | {
    "padded": st.just(False),
    "block_size": st.sampled_from([0, 1, 4]),
    "lookahead": st.sampled_from([0, 1]),
    "prefix_cache": st.booleans(),
    "max_prefill_gap_ms": st.sampled_from([1, 500, 60_000]),
}
ENCODER_DECODER = FLAT | {
    "weight": st.sampled_from([50, 90, 200, 1000]),
    "block_size": st.sampled_from([1, 4]),
    "encoder_decoder": st.just(True),
}
GUESSED = {"lookahead": st.just(0), "block_size": st.sampled_from([1, 4]), "proposed_tokens": st.integers(1, 6)}
RECURRENT = GUESSED | {"proposed_tokens": st.integers(0, 6), "state_slots": st.integers(8, 30)}
BOUNDS = (
    st.builds(limits, **PADDED)
    | st.builds(limits, **(FLAT | GUESSED))
    | st.builds(limits, **(ENCODER_DECODER | GUESSED))
    | st.builds(limits, **(FLAT | RECURRENT))
    | st.builds(limits, **FLAT)
    | st.builds(limits, **ENCODER_DECODER)
)


@settings(max_examples=150)
@given(ARRIVALS, BOUNDS, st.sampled_from([1, 4]))
def test_every_request_ends_once_and_memory_is_never_promised_twice(
    arrivals: list[Arrival], bounds: BatchLimits, max_new_tokens: int
) -> None:
    world = World(bounds, arrivals, max_new_tokens=max_new_tokens)
    world.run()
    assert {number: len(ends) for number, ends in world.ends.items()} == dict.fromkeys(range(len(arrivals)), 1)
    for number, (end,) in world.ends.items():
        arrival = arrivals[number]
        if end is StopReason.MAX_TOKENS:
            assert world.generated[number] == arrival.new
            assert not arrival.poisoned
        else:
            assert end is not StopReason.ERROR or arrival.poisoned
            assert end is not StopReason.TIME_LIMIT or arrival.deadline
            assert end is not StopReason.TIME_LIMIT or world.generated[number] or number in world.passed_over
            assert end is not StopReason.CANCELLED or arrival.cancelled_at


@settings(max_examples=100)
@given(ARRIVALS, BOUNDS, st.integers(20, 120), st.frozensets(st.integers(0, 200), max_size=20))
def test_out_of_memory_and_failed_steps_lose_no_request(
    arrivals: list[Arrival], bounds: BatchLimits, memory: int, accidents: frozenset[int]
) -> None:
    world = World(bounds, arrivals, memory, accidents=accidents, max_new_tokens=4)
    world.run()
    assert {number: len(ends) for number, ends in world.ends.items()} == dict.fromkeys(range(len(arrivals)), 1)
    for number in world.out_of_memory:
        one = arrivals[number].request(number, encoder_decoder=bounds.encoder_decoder)
        parts = 1 + bounds.encoder_decoder
        assert len(one.tokens) + one.max_new_tokens - 1 + parts * bounds.block_size > memory
