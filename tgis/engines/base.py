"""What every engine is: a thing that computes one plan at a time and knows no text, no queue and no clock."""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import TokenLogprobs


@dataclass(slots=True)
class StepResult:
    """The new tokens of each sampled sequence of the plan, in its order, and the logprobs that were asked for.

    A sequence gets one token at least; several only from an engine with KV blocks.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]  # of each sequence's tokens, or none; empty when no sequence asked
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # request id -> its input tokens
    failed: dict[int, str] = field(default_factory=dict)  # request id -> why; its tokens mean nothing

    @classmethod
    def gather(cls, seqs: list[Sequence], results: "list[tuple[list[Sequence], StepResult]]") -> "StepResult":
        """One result in the order of `seqs` from those of several batches; the last batch with a sequence counts."""
        gathered = cls([], [])
        sources = {seq.id: (result, index) for batch, result in results for index, seq in enumerate(batch)}
        asked = any(result.logprobs for _, result in results)
        for seq in seqs:
            result, index = sources[seq.id]
            gathered.tokens.append(result.tokens[index])
            if asked:
                gathered.logprobs.append(result.logprobs[index] if result.logprobs else [])
            if seq.id in result.failed:
                gathered.failed[seq.id] = result.failed[seq.id]
        for _, result in results:
            gathered.prompt_logprobs |= result.prompt_logprobs
        return gathered


class Engine(Protocol):
    """An engine holds rows between steps: those that it has not computed anything of join, and stay until released.

    A row may come back after its release, with the tokens that it has generated: it joins anew, and all of it is
    pending. A plan of an engine that does not chunk is all rows held, each with one token pending, or new rows only.
    """

    @property
    def info(self) -> EngineInfo:
        """What the loaded model is; final once `warm_up` has returned."""

    def warm_up(self) -> None:
        """Run one real pass, so that the first request finds everything ready."""

    def step(self, plan: StepPlan) -> StepResult:
        """Compute so many pending tokens of every row, and choose the next one of those that have none left.

        When it raises, the rows of the plan are as good as lost; they will be released. OutOfMemory asks for smaller
        steps, StartError says that no step will ever succeed again.
        """

    def release(self, rows: Rows[Sequence]) -> None:
        """Forget rows; those never seen are ignored."""

    def close(self) -> None:
        """Give everything back."""
