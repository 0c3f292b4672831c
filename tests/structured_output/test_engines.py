"""Every engine samples with grammars what an oracle does that tries each token of the vocabulary.

In batches that rows with grammars, penalties, soft prompts and nothing of it join and leave: tokens and logprobs
against the logits of transformers.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import regex
import sampling_oracle as oracle
import torch
from batches import engine_options, limits
from proposers import Adversary, ForcedDrafts, ForcedLookup, proposing
from random_requests import KINDS, WISHES
from tiny_models import EOS, VOCAB_SIZE, make_model, run_steps
from transformers import AutoModelForCausalLM

from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence
from tgis.engines.base import Engine
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.lookups import AdapterRef, GrammarKind, GrammarSpec, Vocabulary
from tgis.ipc.messages import EngineOptions
from tgis.ipc.request import Request, StopReason, TokenLogprobs
from tgis.prompts.soft_prompt import SoftPrompt
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import MaskThreads, TokenTable

ROWS, REQUESTS, NEW_TOKENS = 6, 16, 14
SPECIAL = 4  # the first tokens, without a text
PATTERNS = [
    r"[a-d]{4,30}",
    r"(ab|ba|c)+ ?\d*",
    r"\d{2}( [a-d]+)*",
    r"abcdabcd|bb|dc+b",
    r"(a|b)c?",
    r"[^ ]* [^ ]*",
]
PIECES = [
    *("".join(piece) for length in (1, 2, 3) for piece in itertools.product("abcd", repeat=length)),
    *"0123456789 ",
    *(f" {letter}" for letter in "abcd"),
]
TEXTS = [""] * SPECIAL + list(itertools.islice(itertools.cycle(PIECES), VOCAB_SIZE - SPECIAL))
TABLE = TokenTable(Vocabulary([text.encode() for text in TEXTS]), VOCAB_SIZE, [EOS])


@dataclass
class Subject:
    """An engine, and what transformers computes for its model."""

    engine: Engine
    bounds: BatchLimits
    model: Any
    masks: MaskThreads | None = None  # that make them beside the steps
    facts: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by request
    forced: int = 0  # tokens beside the first of a step
    guessed: int = 0  # those of them that were proposed beside a grammar
    ended: list[list[int]] = field(default_factory=list)  # prompts and outputs

    def generate(self, requests: list[Request], patterns: list[str | None], rng: random.Random) -> Iterator[Sequence]:
        """The sequences in the order in which they end, when they arrive at random steps."""

        def prepare(seq: Sequence) -> None:
            if pattern := patterns[seq.id]:
                seq.grammar = compile_grammar(GrammarSpec(GrammarKind.REGEX, pattern), TABLE)
                seq.grammar.in_thread = self.masks is not None
            if adapter := seq.request.adapter:
                generator = torch.Generator().manual_seed(seq.id)
                size = self.model.config.hidden_size
                seq.adapter = SoftPrompt(1, torch.randn((adapter.length, size), generator=generator))

        for plan, result, ended in run_steps(self.engine, self.bounds, requests, rng, prepare=prepare):
            assert not result.failed
            logprobs = result.logprobs or [[]] * len(plan.sampled)
            for seq, tokens, facts in zip(plan.sampled, result.tokens, logprobs, strict=True):
                self.facts.setdefault(seq.id, []).extend(fact for fact in facts if fact)
                self.forced += len(tokens) - 1
                guesses = zip(tokens[:-1], result.verified.get(seq.id, ()), strict=False)
                self.guessed += sum(token == guess for token, guess in guesses if seq.grammar)
            yield from ended
            if self.masks:
                going_on = [seq for seq in plan.sampled if seq.grammar and not seq.finished]
                self.masks.prepare((seq.grammar, seq.tokens[seq.prompt_length :]) for seq in going_on)

    def check(self, seq: Sequence, pattern: str | None) -> int:
        """Every token and logprob; how many are too close to a tie to tell."""
        request, facts = seq.request, self.facts.pop(seq.id, [])
        prompt, output = request.tokens[request.soft_prompt_length :], seq.tokens[seq.prompt_length :]
        facts = facts[: len(output)]  # of several tokens one may be the end
        assert len(facts) in ({len(output)} if request.logprob_options.generated_tokens else {0})
        logits, ambiguous = self._logits(prompt + output, seq.adapter)[len(prompt) - 1 :], 0
        for step, token in enumerate(output):
            context, before = prompt + output[:step], output[:step]
            allowed = None if pattern is None else self._allowed(pattern, before)
            expected = oracle.process(
                logits[step].tolist(), request.sampling_params, step, [EOS], context, before, allowed
            )
            if expected.ambiguous:
                ambiguous += 1
                continue
            oracle.check_token(token, expected, request.sampling_params, step)
            if facts:
                oracle.check_logprobs(facts[step], token, expected, request.logprob_options)
        if pattern is not None:
            self._check_end(seq, pattern)
        return ambiguous

    def _check_end(self, seq: Sequence, pattern: str) -> None:
        text = "".join(TEXTS[token] for token in seq.tokens[seq.prompt_length :])
        ended = seq.stop_reason is StopReason.EOS_TOKEN
        assert regex.fullmatch(pattern, text, partial=not ended), (pattern, text)

    def _allowed(self, pattern: str, before: list[int]) -> set[int]:
        text = "".join(TEXTS[token] for token in before)
        ends = {EOS} if regex.fullmatch(pattern, text) else set()
        return ends | {
            token for token in range(SPECIAL, VOCAB_SIZE) if regex.fullmatch(pattern, text + TEXTS[token], partial=True)
        }

    def _logits(self, tokens: list[int], soft_prompt: SoftPrompt | None) -> torch.Tensor:
        """After each of the tokens. [tokens, V]"""
        embeddings = self.model.get_input_embeddings()(torch.tensor(tokens))
        if soft_prompt is not None and soft_prompt.decoder is not None:
            embeddings = torch.cat([soft_prompt.decoder.to(embeddings.dtype), embeddings])
        logits: torch.Tensor = self.model(inputs_embeds=embeddings[None]).logits[0, -len(tokens) :]
        return logits


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


def _subject(llama: Path, new_engine: Callable[..., Engine], bounds: BatchLimits, **options: Any) -> Subject:
    engine = new_engine(engine_options(llama, ROWS, dtype="float64"), **options)
    engine.warm_up()
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64).eval()
    return Subject(engine, bounds, model)


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
    subject = _subject(llama, PagedEngine, PAGED, block_size=4) if paged else _subject(llama, PaddedEngine, PADDED)
    subject.masks = MaskThreads() if masks else None
    ends = _check_all(subject, random.Random(4 if masks else 1))
    assert ends == {StopReason.EOS_TOKEN, StopReason.MAX_TOKENS}
    assert (subject.forced > 0) == (paged and not masks)


def test_proposals_with_grammars_and_beside_them(llama: Path) -> None:
    def drafting(options: EngineOptions, **changes: Any) -> PagedEngine:
        own = msgspec.structs.replace(options, speculation="auto", speculator_path=options.model_path)
        return PagedEngine(own, **changes)

    bounds = replace(PAGED, lookahead=0, proposed_tokens=5, drafted_tokens=3)
    subject = _subject(llama, drafting, bounds, block_size=4)
    for kind, least in ((ForcedLookup, 0), (Adversary, 5), (ForcedDrafts, 8)):
        subject.forced = subject.guessed = 0
        with proposing(kind, subject.ended):
            _check_all(subject, random.Random(5), share=0.5)
        assert subject.forced > subject.guessed > least


def test_steps_run_ahead_between_those_with_grammars(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    subject = _subject(llama, PagedEngine, PAGED, block_size=4, async_decode=True)
    engine: Any = subject.engine
    ahead = mock.Mock(wraps=engine._decoder.launch_next)
    monkeypatch.setattr(engine._decoder, "launch_next", ahead)
    _check_all(subject, random.Random(3), share=0.2)
    assert ahead.call_count > 5


def _check_all(subject: Subject, rng: random.Random, share: float = 0.7) -> set[StopReason]:
    """The reasons why outputs ended. `share`: of the rows that have a grammar"""
    ambiguous, tokens, ends = 0, 0, set()
    requests, patterns = zip(*(_request(rng, number, share) for number in range(REQUESTS)), strict=True)
    with torch.inference_mode():
        for seq in subject.generate(list(requests), list(patterns), rng):
            ambiguous += subject.check(seq, patterns[seq.id])
            tokens += seq.num_generated_tokens
            subject.ended.append(seq.tokens)
            ends.add(seq.stop_reason)
    assert ambiguous < tokens / 5
    return ends
