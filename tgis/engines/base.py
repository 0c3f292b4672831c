"""The interface of engines: an engine computes one plan at a time and knows no text, no queue and no clock."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.errors import StartError
from tgis.ipc.messages import EngineInfo, EngineOptions, FailureKind
from tgis.ipc.request import TokenLogprobs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResult:
    """The new tokens of each sampled sequence of a plan, in the plan's order, and the logprobs that were asked for.

    A sequence gets at least one token, and several only from an engine with KV blocks.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]  # one per token, or none; empty when no sequence asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # results by request id
    # Failures by request id; the tokens of these requests are meaningless.
    failed: dict[int, tuple[FailureKind, str]] = field(default_factory=dict)
    verified: Mapping[int, list[int]] = field(default_factory=dict)  # computed proposals and drafts by request id


class Engine(Protocol):
    """An engine holds the sequences that it has begun to compute, until they are released.

    A released sequence may come back with the tokens that it has generated, and is computed anew. Unless an engine does
    chunked prefill, a plan is either all sequences held, each with one token to compute, or new ones only.

    Methods with a body are defaults; mypy would take an empty one for abstract.
    """

    info: EngineInfo  # properties of the loaded model; final once `warm_up` has returned

    def warm_up(self) -> None:
        """Run one real step, so that the first request finds everything ready."""
        return

    def step(self, plan: StepPlan) -> StepResult:
        """Compute the scheduled tokens of each sequence, and sample for those whose tokens are all computed then.

        When it raises, the sequences of the plan are lost and will be released. OutOfMemory asks for smaller steps;
        StartError means that no step will ever succeed again.
        """

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that it asks for as proposals."""
        return plan

    def discard_step(self) -> None:
        """Do not reuse a step in flight, after a step that failed: another rank may not have launched it."""
        return

    def release(self, seqs: Collection[Sequence]) -> None:
        """Forget sequences; unknown ones are ignored."""

    def clear_cache(self) -> bool:
        """Forget cached prefixes where that frees memory, and return whether it has. No sequence is held."""
        return False

    def close(self) -> None:
        """Free everything that does not end with the process."""
        return


def warn(options: EngineOptions, text: str) -> None:
    """Log that an option is ignored or replaced; StartError with STRICT_OPTIONS."""
    if options.strict:
        raise StartError(f"STRICT_OPTIONS: {text}")
    log.warning("%s", text)
