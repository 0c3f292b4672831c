"""Runs of an engine in which everything that a sequence gets is what the oracle makes of transformers' logits."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import sampling_oracle as oracle
import torch
from batches import check_pool, commit, pool_of
from random_requests import KINDS, WISHES
from tiny_models import EOS, VOCAB_SIZE, limits_of

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.paged.engine import PagedEngine
from tgis.ipc.request import Request, TokenLogprobs
from tgis.prompts.soft_prompt import SoftPrompt


class Broken(RuntimeError):
    """Of a step that tests let fail."""


def random_request(rng: random.Random, number: int, new: int = 12, **changes: Any) -> Request:
    """With any prompt, way to sample and details, unless `changes` says something else."""
    sampling = changes.get("sampling_params") or msgspec.structs.replace(rng.choice(KINDS), seed=rng.getrandbits(64))
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 14))]
    values: dict[str, Any] = {"tokens": prompt, "sampling_params": sampling, "logprob_options": rng.choice(WISHES)}
    return Request(number, max_new_tokens=max(new, sampling.min_new_tokens), **values | changes)


class Launches:
    """Each launch of an engine and the ids that it samples for, in order: planned, or ahead of the plan."""

    def __init__(self, engine: PagedEngine, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[str, list[int]]] = []
        steps = engine._decoder
        launch, launch_next = steps.launch, steps.launch_next
        assert launch_next is not None

        def planned(plan: StepPlan) -> Any:
            self.seen.append(("planned", [seq.id for seq in plan.sampled]))
            return launch(plan)

        def ahead(seqs: list[Sequence], *others: Any) -> Any:
            self.seen.append(("ahead", [seq.id for seq in seqs]))
            return launch_next(seqs, *others)

        patch.setattr(steps, "launch", planned)
        patch.setattr(steps, "launch_next", ahead)

    def rows(self, kind: str) -> list[int]:
        """How many the launches of one kind sample for."""
        return [len(ids) for each, ids in self.seen if each == kind]


@dataclass
class Subject:
    """An engine, transformers' model, and the logprobs of sequences that have not been checked."""

    engine: Any
    model: Any
    tolerance: float = 1e-6  # of the input's logprobs
    facts: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    inputs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    num_tokens: int = 0
    num_ambiguous: int = 0

    def step(self, plan: StepPlan) -> StepResult:
        """Record the logprobs."""
        result: StepResult = self.engine.step(plan)
        for place, row in enumerate(plan.sampled):
            if row.id not in result.failed:
                told = result.logprobs[place] if result.logprobs else []
                self.facts.setdefault(row.id, []).extend(told or [None] * len(result.tokens[place]))
        self.inputs |= result.prompt_logprobs
        return result

    def allows(self, _row: Sequence, _output: list[int]) -> set[int] | None:
        """The tokens that may follow this output; None: all of them."""
        return None

    def check(self, row: Sequence) -> None:
        """Everything that the sequence has got so far."""
        request, facts, logits = row.request, self.facts.pop(row.id, []), self._logits(row)
        assert len(facts) >= row.num_generated_tokens  # one of several tokens may be the end
        for step, fact in enumerate(facts[: row.num_generated_tokens]):
            context = row.tokens[request.soft_prompt_length : row.prompt_length + step]
            scores, output = logits[len(context) - 1].tolist(), row.tokens[row.prompt_length :][:step]
            expected = oracle.process(
                scores, request.sampling_params, step, [EOS], context, output, self.allows(row, output)
            )
            self.num_tokens, self.num_ambiguous = self.num_tokens + 1, self.num_ambiguous + expected.ambiguous
            if expected.ambiguous:
                continue
            token = row.tokens[row.prompt_length + step]
            oracle.check_token(token, expected, request.sampling_params, step)
            assert (fact is not None) == request.logprob_options.generated_tokens
            if fact is not None:
                oracle.check_logprobs(fact, token, expected, request.logprob_options)
        self._check_inputs(row, logits.log_softmax(-1))

    def _logits(self, row: Sequence) -> torch.Tensor:
        """After each token behind a soft prompt. [tokens, V]"""
        tokens = row.tokens[row.request.soft_prompt_length :]
        embeddings = self.model.get_input_embeddings()(torch.tensor(tokens))
        if isinstance(row.adapter, SoftPrompt) and row.adapter.decoder is not None:
            embeddings = torch.cat([row.adapter.decoder.to(embeddings.dtype), embeddings])
        logits: torch.Tensor = self.model(inputs_embeds=embeddings[None]).logits[0, -len(tokens) :]
        return logits

    def _check_inputs(self, row: Sequence, logprobs: torch.Tensor) -> None:
        told = self.inputs.pop(row.id, [])
        is_told = row.request.logprob_options.input_tokens and row.num_generated_tokens > 0
        assert len(told) == (row.prompt_length if is_told else 0)
        expected = [logprobs[place, token].item() for place, token in enumerate(row.request.tokens[1:])]
        assert [fact.logprob for fact in told[1:]] == pytest.approx(expected[: len(told)], abs=self.tolerance)

    def run(self, blocks: int, **bounds: Any) -> "Run":
        """With this number of blocks."""
        return self.run_within(limits_of(self.engine, blocks, **bounds))

    def run_within(self, bounds: BatchLimits) -> "Run":
        self.facts.clear()
        self.inputs.clear()
        return Run(self, Batcher(bounds, {EOS}))


@dataclass
class Run:
    """Steps of a batcher, as the worker takes them; every sequence is checked when it ends."""

    subject: Subject
    batcher: Batcher
    ended: list[Sequence] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)

    def step(self) -> StepPlan | None:
        plan, engine = self.batcher.plan(0.0), self.subject.engine
        engine.release(plan.to_release)
        if not plan.seqs:
            return None
        try:
            result = self.subject.step(plan)
        except Broken:
            assert self.batcher.rollback(plan, out_of_memory=False) == []
            return plan
        failed = [row for row in plan.seqs if row.id in result.failed]
        self.failed |= result.failed.keys()
        self.batcher.drop(failed)
        tokens = [new for row, new in zip(plan.sampled, result.tokens, strict=True) if row not in failed]
        ended = commit(self.batcher, plan.without(result.failed), tokens, verified=result.verified)
        for row in ended:
            self.subject.check(row)
            end = {EOS, *row.request.sampling_params.stop_token_ids}
            assert row.num_generated_tokens == row.request.max_new_tokens or row.tokens[-1] in end
        self.ended += ended
        if not engine.info.padded:
            check_pool(pool_of(self.batcher))
        return plan

    def cancel(self, number: int) -> int:
        """1 if the request was running."""
        cancelled = [row for row in self.batcher.running if row.id == number]
        self.batcher.cancel([number])
        for row in cancelled:
            self.subject.check(row)
        return len(cancelled)

    def finish(self) -> None:
        while self.step():
            pass
        assert self.batcher.idle
        assert self.subject.engine.info.padded or pool_of(self.batcher).num_used == 0
