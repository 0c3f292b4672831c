"""Every engine samples with grammars what an oracle does that tries each token of the vocabulary.

In batches that rows with grammars, penalties, soft prompts and nothing of it join and leave: tokens and logprobs
against the logits of transformers.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import regex
import torch
from batches import engine_options, limits
from checked_runs import Launches, Subject
from proposers import Adversary, ForcedDrafts, proposing
from random_requests import KINDS, WISHES
from tiny_models import EOS, VOCAB_SIZE, make_model
from transformers import AutoModelForCausalLM

from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.lookups import AdapterRef, GrammarKind, GrammarSpec, Vocabulary
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import Request, SamplingParams, StopReason
from tgis.prompts.soft_prompt import SoftPrompt
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher, MaskThreads, TokenTable

ROWS, REQUESTS, NEW_TOKENS = 6, 16, 14
SPECIAL = 4  # the first tokens, without a text
PATTERNS = [r"[a-d]{4,30}", r"(ab|ba|c)+ ?\d*", r"\d{2}( [a-d]+)*", r"abcdabcd|bb|dc+b", r"(a|b)c?", r"[^ ]* [^ ]*"]
PIECES = [
    *("".join(piece) for length in (1, 2, 3) for piece in itertools.product("abcd", repeat=length)),
    *"0123456789 ",
    *(f" {letter}" for letter in "abcd"),
]
TEXTS = [""] * SPECIAL + list(itertools.islice(itertools.cycle(PIECES), VOCAB_SIZE - SPECIAL))
TABLE = TokenTable(Vocabulary([text.encode() for text in TEXTS]), VOCAB_SIZE, [EOS])


@dataclass
class Grammars(Subject):
    """An engine, transformers' model, and sequences of which some follow patterns."""

    patterns: list[str | None] = field(default_factory=list)  # by request
    masks: MaskThreads | None = None  # that make them beside the steps
    forced: int = 0  # tokens beside the first of a step
    guessed: int = 0  # those of them that were proposed beside a grammar
    texts: list[list[int]] = field(default_factory=list)  # prompts and outputs

    def prepare(self, seq: Sequence) -> None:
        if pattern := self.patterns[seq.id]:
            seq.grammar = compile_grammar(GrammarSpec(GrammarKind.REGEX, pattern), TABLE)
            seq.grammar.in_thread = self.masks is not None
        if adapter := seq.request.adapter:
            generator = torch.Generator().manual_seed(seq.id)
            size = self.model.config.hidden_size
            seq.adapter = SoftPrompt(1, torch.randn((adapter.length, size), generator=generator))

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        assert not result.failed
        for seq, tokens in zip(plan.sampled, result.tokens, strict=True):
            self.forced += len(tokens) - 1
            guesses = zip(tokens[:-1], result.verified.get(seq.id, ()), strict=False)
            self.guessed += sum(token == guess for token, guess in guesses if seq.grammar)
        return result

    def allows(self, row: Sequence, output: list[int]) -> set[int] | None:
        pattern, text = self.patterns[row.id], "".join(TEXTS[token] for token in output)
        if pattern is None:
            return None
        ends = {EOS} if regex.fullmatch(pattern, text) else set()
        return ends | {
            token for token in range(SPECIAL, VOCAB_SIZE) if regex.fullmatch(pattern, text + TEXTS[token], partial=True)
        }

    def check(self, row: Sequence) -> None:
        super().check(row)
        self.texts.append(row.tokens)
        if pattern := self.patterns[row.id]:
            text = "".join(TEXTS[token] for token in row.tokens[row.prompt_length :])
            ended = row.stop_reason is StopReason.EOS_TOKEN
            assert regex.fullmatch(pattern, text, partial=not ended), (pattern, text)


def _request(rng: random.Random, number: int, share: float) -> tuple[Request, str | None]:
    prompt = [rng.randrange(SPECIAL, VOCAB_SIZE) for _ in range(rng.randint(1, 14))]
    length = rng.randint(1, 5) if rng.random() < 0.4 else 0
    pattern = rng.choice(PATTERNS) if rng.random() < share else None
    kinds = [kind for kind in KINDS if pattern is None or not kind.excluding_field]  # nothing may be left else
    return Request(
        number,
        [0] * length + prompt,
        NEW_TOKENS,
        sampling_params=msgspec.structs.replace(rng.choice(kinds), seed=rng.getrandbits(64)),
        logprob_options=msgspec.structs.replace(rng.choice(WISHES), input_tokens=False),
        cache_salt=bytes([number]) if length else b"",  # each has a soft prompt of its own
        adapter=AdapterRef("p", length, length, number, 1) if length else None,
        grammar=1 if pattern else None,
    ), pattern


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("Llama", tmp_path_factory.mktemp("model"))


def _subject(llama: Path, new_engine: Callable[..., Engine], **options: Any) -> Grammars:
    engine = new_engine(engine_options(llama, ROWS, dtype="float64"), **options)
    engine.warm_up()
    return Grammars(engine, AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64).eval())


PAGED = limits(160, padded=False, block_size=4, prefix_cache=True, max_batch_size=ROWS, prefill_tokens=9, lookahead=1)
PADDED = limits(10**5, max_batch_size=ROWS, prefill_tokens=64)


@pytest.mark.parametrize(
    ("paged", "masks"),
    [
        pytest.param(True, True, id="paged, masks in threads"),
        pytest.param(False, False, id="padded, masks in steps"),
        pytest.param(True, False, id="paged, masks in steps", marks=pytest.mark.slow),
        pytest.param(False, True, id="padded, masks in threads", marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_brute_force(llama: Path, paged: bool, masks: bool) -> None:
    """Rows whose masks are made in threads stay out of steps until then, in whatever order the threads are done."""
    subject = _subject(llama, PagedEngine, block_size=4) if paged else _subject(llama, PaddedEngine)
    subject.masks = MaskThreads() if masks else None
    ends = _check_all(subject, PAGED if paged else PADDED, random.Random(4 if masks else 1))
    assert ends == {StopReason.EOS_TOKEN, StopReason.MAX_TOKENS}
    assert (subject.forced > 0) == (paged and not masks)


def test_proposals_with_grammars_and_beside_them(llama: Path) -> None:
    def drafting(options: EngineOptions, **changes: Any) -> PagedEngine:
        own = msgspec.structs.replace(options, speculation="auto", speculator_path=options.model_path)
        return PagedEngine(own, **changes)

    bounds = replace(PAGED, lookahead=0, proposed_tokens=5, drafted_tokens=3)
    subject = _subject(llama, drafting, block_size=4)
    for kind, least in ((Adversary, 0), (Adversary, 6), (ForcedDrafts, 9)):
        subject.forced = subject.guessed = 0
        with proposing(kind, subject.texts):
            _check_all(subject, bounds, random.Random(5), share=0.5)
        assert subject.forced > subject.guessed >= least


@pytest.fixture(scope="module")
def ahead(llama: Path) -> Grammars:
    """An engine that launches steps ahead, as on a GPU."""
    return _subject(llama, PagedEngine, block_size=4, async_decode=True)


@pytest.mark.parametrize(("count", "ready"), [(1, 1.0), (4, 1.0), (1, 0.5)])
def test_steps_with_grammars_are_launched_ahead(
    ahead: Grammars, monkeypatch: pytest.MonkeyPatch, count: int, ready: float
) -> None:
    """Of four rows, so many have a grammar: all get a token in each step in which their masks are ready, and no token
    takes a second launch, not even one that is forced.
    """
    rng, launches = random.Random(1), Launches(ahead.engine, monkeypatch)
    monkeypatch.setattr(GrammarMatcher, "ready", property(lambda _: rng.random() < ready))
    ahead.patterns = ["(01)+"] * count + [None] * (4 - count)
    params = SamplingParams(temperature=1.0, min_new_tokens=NEW_TOKENS)
    with torch.inference_mode():
        run = ahead.run_within(PAGED)
        for number, pattern in enumerate(ahead.patterns):
            request = Request(number, [SPECIAL], NEW_TOKENS, sampling_params=params, grammar=1 if pattern else None)
            ahead.prepare(*run.batcher.submit([request], 0.0))
        while not run.batcher.idle:
            run.step()
    assert sum(launches.rows("planned")) == 4
    assert sum(launches.rows("ahead")) == 4 * (NEW_TOKENS - 1)
    assert (len(launches.seen) == NEW_TOKENS) == (ready == 1.0)


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_logits_of_steps_launched_ahead_wait_for_their_masks(
    ahead: Grammars, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Masks are ready after some steps; rows join, end and are preempted meanwhile."""
    rng, launches = random.Random(7), Launches(ahead.engine, monkeypatch)
    monkeypatch.setattr(GrammarMatcher, "ready", property(lambda _: rng.random() < 0.5))
    _check_all(ahead, replace(PAGED, token_capacity=36), random.Random(3), share)
    assert sum(launches.rows("ahead")) > 2 * sum(launches.rows("planned"))
    assert [sampler._slots._slots for sampler in (ahead.engine._sampler, ahead.engine._late_sampler)] == [{}, {}]


def _check_all(subject: Grammars, bounds: BatchLimits, rng: random.Random, share: float = 0.7) -> set[StopReason]:
    """The reasons why outputs of requests that come at random steps ended. `share`: of those that have a grammar"""
    made = [_request(rng, number, share) for number in range(REQUESTS)]
    subject.patterns = [pattern for _, pattern in made]
    waiting = [request for request, _ in made]
    with torch.inference_mode():
        run = subject.run_within(bounds)
        while waiting or not run.batcher.idle:
            if waiting and (run.batcher.idle or rng.random() < 0.4):
                subject.prepare(*run.batcher.submit([waiting.pop(0)], 0.0))
            plan = run.step()
            if subject.masks and plan:
                going_on = [seq for seq in plan.sampled if seq.grammar and not seq.finished]
                subject.masks.prepare((seq.grammar, seq.tokens[seq.prompt_length :]) for seq in going_on)
        run.finish()
    assert subject.num_ambiguous < subject.num_tokens / 5
    return {seq.stop_reason for seq in run.ended}
