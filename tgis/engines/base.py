"""What every engine is: a thing that computes one plan at a time and knows no text, no queue and no clock."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from tgis.batcher.sequence import Plan, Sequence
from tgis.messages import EngineInfo, TokenFacts


@dataclass(slots=True)
class StepResult:
    """One new token per row of the plan, in its order, and what was asked about them."""

    tokens: list[int]
    facts: list[TokenFacts | None]  # empty when no row asked
    inputs: dict[int, list[TokenFacts]] = field(default_factory=dict)  # request id -> its input tokens
    failed: dict[int, str] = field(default_factory=dict)  # request id -> why; its token means nothing


class Engine(Protocol):
    """An engine holds rows between steps: those of a prefill join, and stay until they are released."""

    @property
    def info(self) -> EngineInfo:
        """What the loaded model is; final once `warm_up` has returned."""

    def warm_up(self) -> None:
        """Run one real pass, so that the first request finds everything ready."""

    def step(self, plan: Plan) -> StepResult:
        """Compute the pending tokens of every row and choose its next one."""

    def release(self, rows: Rows[Sequence]) -> None:
        """Forget rows; those never seen are ignored."""

    def close(self) -> None:
        """Give everything back."""
