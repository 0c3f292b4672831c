"""Random arrivals, cancellations and preemptions: every sequence gets what transformers' `generate` gives it alone.

In float64 where the model's attention is computed in it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import check_pool, engine_options, limits, pool_of
from proposers import Adversary, ForcedDrafts, ForcedLookup, proposing
from tiny_models import EOS, VOCAB_SIZE, make_model
from transformers import AutoModelForCausalLM

from tgis.batcher.batcher import Batcher
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.messages import BatcherCounters
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, TokenLogprobs
from tgis.speculation.speculator import Speculator

MAX_NEW_TOKENS, MAX_BATCH_SIZE = 20, 6
PENALTIES = (1.0, 1.3)
SALTS = (b"", b"", b"tenant")


def _prompts() -> list[tuple[int, ...]]:
    """Unrelated ones, some with shared prefixes, one that is the prefix of another."""
    rng = random.Random(7)
    own = [tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length)) for length in (1, 2, 5, 9, 16, 24)]
    shared = [own[5][:cut] + own[other][:more] for cut, other, more in ((8, 4, 9), (16, 3, 5), (13, 4, 3), (16, 0, 1))]
    return [*own, *shared, own[5][:16]]


PROMPTS = _prompts()


@dataclass
class Subject:
    """An engine, and what its model gives a prompt alone."""

    engine: PagedEngine
    block_size: int
    tolerance: float
    solo: Callable[[tuple[int, ...], float], list[int]]
    input_logprobs: Callable[[tuple[int, ...]], list[float]]

    def batcher(self, blocks: int, chunk: int, **changes: Any) -> Batcher:
        """With so many blocks, and so many tokens of prompts in a step."""
        lookahead = self.engine.info.lookahead
        values = {
            "block_size": self.block_size,
            "prefix_cache": False,
            "max_batch_size": MAX_BATCH_SIZE,
            "lookahead": lookahead,
            "drafted_tokens": self.engine.info.drafted_tokens,
        } | changes
        return Batcher(limits(blocks * self.block_size, padded=False, prefill_tokens=chunk, **values), {EOS})

    def check(self, row: Sequence, facts: list[TokenLogprobs] | None) -> None:
        """So far a sequence got what its prompt gets alone, and logprobs only where asked for."""
        prompt, generated = tuple(row.request.tokens), row.tokens[row.prompt_length :]
        expected = self.solo(prompt, row.request.sampling_params.repetition_penalty)
        assert generated == expected[: len(generated)]
        if facts is not None:
            assert [fact.logprob for fact in facts[1:]] == pytest.approx(
                self.input_logprobs(prompt), abs=self.tolerance
            )
        assert (facts is not None) == (row.request.logprob_options.input_tokens and row.num_generated_tokens > 0)

    def ended(self, row: Sequence, facts: list[TokenLogprobs] | None) -> None:
        """It did not end early."""
        self.check(row, facts)
        whole = self.solo(tuple(row.request.tokens), row.request.sampling_params.repetition_penalty)
        assert row.num_generated_tokens == min(row.request.max_new_tokens, len(whole))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny model, by name."""
    return cache(lambda name: make_model(name, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def subject(request: pytest.FixtureRequest, model: Callable[[str], Path]) -> Subject:
    name, block_size, dtype, async_decode, *drafters = request.param
    directory = model(name)
    options = msgspec.structs.replace(engine_options(directory, MAX_BATCH_SIZE, threads=1), dtype=dtype)
    for drafter in drafters:
        options = msgspec.structs.replace(options, speculation="auto", speculator_path=str(model(drafter)))
    engine = PagedEngine(options, async_decode=async_decode, block_size=block_size)
    engine.warm_up()
    return Subject(engine, block_size, 1e-4 if dtype == "float32" else 1e-6, *_oracle(directory, dtype))


@cache  # several engines have the same model
def _oracle(directory: Path, dtype: str) -> tuple[Callable[..., list[int]], Callable[..., list[float]]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    @cache
    def solo(prompt: tuple[int, ...], penalty: float) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, repetition_penalty=penalty
        )
        generated: list[int] = out[0, len(prompt) :].tolist()
        return generated

    @cache
    def input_logprobs(prompt: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return [logprobs[place, token].item() for place, token in enumerate(prompt[1:])]

    return solo, input_logprobs


@dataclass
class Run:
    """Steps of one batcher on the engine; every sequence is checked when it ends."""

    subject: Subject
    batcher: Batcher
    facts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    counts: BatcherCounters = field(default_factory=BatcherCounters)

    def step(self) -> StepPlan | None:
        plan = self.batcher.plan(0.0)
        self.subject.engine.release(plan.to_release)
        if not plan.seqs:
            return None
        result = self.subject.engine.step(plan)
        assert not result.failed
        self.facts |= result.prompt_logprobs
        ended = self.batcher.commit(plan, result.tokens, 0.0)
        for row in ended:
            self.subject.ended(row, self.facts.pop(row.id, None))
        self._count()
        return plan

    def cancel(self, number: int) -> int:
        """1 if the request was running."""
        cancelled = [row for row in self.batcher.running if row.id == number]
        self.batcher.cancel([number])
        for row in cancelled:
            self.subject.check(row, self.facts.pop(row.id, None))
        return len(cancelled)

    def finish(self) -> None:
        while self.step():
            pass
        check_pool(pool_of(self.batcher))
        assert (self.batcher.idle, pool_of(self.batcher).num_used) == (True, 0)

    def _count(self) -> None:
        new = self.batcher.take_counters()
        self.counts.preemptions += new.preemptions
        self.counts.prefix_cache_hits += new.prefix_cache_hits
        self.counts.queue_jumps += new.queue_jumps
        self.counts.proposed_tokens += new.proposed_tokens + new.drafted_tokens
        self.counts.accepted_tokens += new.accepted_tokens + new.accepted_drafted_tokens


def _request(rng: random.Random, number: int) -> Request:
    sampling = SamplingParams(repetition_penalty=rng.choice(PENALTIES))
    facts = rng.random() < 0.2
    details = LogprobOptions(input_tokens=facts, logprobs=facts)
    prompt, new = list(rng.choice(PROMPTS)), rng.randint(1, MAX_NEW_TOKENS)
    return Request(number, prompt, new, False, sampling, details, None, rng.choice(SALTS))


def _interleave(rng: random.Random, run: Run) -> int:
    """Eight requests that arrive at any time; some are cancelled. How many of these were running."""
    to_come, left = [_request(rng, number) for number in range(8)], 0
    while to_come or not run.batcher.idle:
        while to_come and (run.batcher.idle or rng.random() < 0.3):
            run.batcher.submit([to_come.pop(0)], 0.0)
        if rng.random() < 0.05:
            left += run.cancel(rng.randrange(8))
        run.step()
    run.finish()
    return left


@pytest.mark.parametrize(
    "subject",
    [("Llama", 2, "float64", False), ("Llama", 2, "float64", True)],
    indirect=True,
    ids=["synchronous", "asynchronous"],
)
@pytest.mark.parametrize("few_blocks", [False, True], ids=["many blocks", "few_blocks blocks"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 50), marks=pytest.mark.slow)], ids=["five", "45 more"]
)
def test_interleavings(subject: Subject, few_blocks: bool, prefix_cache: bool, seeds: range) -> None:
    total, left = BatcherCounters(), 0
    for seed in seeds:
        rng = random.Random(seed)
        blocks = rng.randint(22, 30) if few_blocks else 200  # the largest request has 22
        chunk, rows = rng.choice([1, 2, 3, 5, 8, 13, 64]), rng.randint(2, MAX_BATCH_SIZE)
        batcher = subject.batcher(blocks, chunk, prefix_cache=prefix_cache, max_batch_size=rows)
        run = Run(subject, batcher, counts=total)
        left += _interleave(rng, run)
    assert left > 0
    assert (total.preemptions >= len(seeds) // 2) == few_blocks
    assert (total.prefix_cache_hits > len(seeds)) == prefix_cache
    assert total.queue_jumps or not few_blocks


@pytest.mark.parametrize("few_blocks", [False, True], ids=["many blocks", "few blocks"])
@pytest.mark.parametrize(
    ("subject", "kind"),
    [
        (("Llama", 2, "float64", False), ForcedLookup),
        (("Llama", 2, "float64", False), Adversary),
        (("Llama", 2, "float64", False, "Llama"), ForcedDrafts),
        (("Llama", 2, "float64", False, "Mistral"), ForcedDrafts),
    ],
    indirect=["subject"],
)
def test_interleavings_with_proposals(subject: Subject, few_blocks: bool, kind: type[Speculator]) -> None:
    total = BatcherCounters()
    right = [[*prompt, *subject.solo(prompt, penalty)] for prompt in PROMPTS for penalty in PENALTIES]
    with proposing(kind, right):
        for seed in range(100, 108):
            rng = random.Random(seed)
            blocks, chunk = rng.randint(22, 30) if few_blocks else 200, rng.choice([2, 5, 64])
            batcher = subject.batcher(blocks, chunk, prefix_cache=True, proposed_tokens=rng.choice([1, 3, 15]))
            _interleave(rng, Run(subject, batcher, counts=total))
    assert 0 < total.accepted_tokens < total.proposed_tokens
    assert (total.preemptions > 0) == few_blocks


PLAIN, SLIDING_WINDOW, SOFT_CAPPING, SINKS = (
    ("Llama", 1, "float64", False),
    ("Mistral", 1, "float64", False),
    ("Gemma2", 1, "float32", False),
    ("GptOss", 1, "float32", False),
)


@pytest.mark.parametrize(
    "subject",
    [PLAIN, SLIDING_WINDOW, *(pytest.param(each, marks=pytest.mark.slow) for each in (SOFT_CAPPING, SINKS))],
    indirect=True,
)
def test_chunks_of_every_size(subject: Subject) -> None:
    """Alone, and beside a decode."""
    long = Request(1, list(PROMPTS[5]), 8, logprob_options=LogprobOptions(input_tokens=True, logprobs=True))
    for chunk in range(1, len(long.tokens) + 1):
        for beside in (0, 1):
            run = Run(subject, subject.batcher(100, 8 * chunk if beside else chunk))  # beside decodes, about an eighth
            run.batcher.submit([Request(0, [5, 6], MAX_NEW_TOKENS)] * beside, 0.0)
            for _ in range(3 * beside):
                run.step()
            run.batcher.submit([long], 0.0)
            plan = run.step()
            assert plan is not None
            *decodes, found = plan.num_scheduled_tokens
            assert decodes == [1] * beside
            assert 1 <= found <= 8 * chunk if beside else found == chunk
            run.finish()
