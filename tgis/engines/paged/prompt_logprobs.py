"""Logprobs of prompts that are computed in chunks; they are reported when the prompt is done."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.sampling.logprobs import LogprobTable, first_prompt_logprobs, prompt_logprob_table, token_logprobs
from tgis.ipc.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The prompt tokens of a sequence that one step predicts."""

    seq: Sequence
    num_targets: int
    is_last: bool  # of the prompt
    table: LogprobTable | None  # None where nothing is asked


class PromptLogprobs:
    """Keeps the logprobs of unfinished prompts."""

    def __init__(self) -> None:
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # by request id

    def start(self, plan: StepPlan, prompt_slices: dict[int, slice], logits: Tensor) -> list[PromptChunk]:
        """The chunks of a plan, with tables on the device; `prompt_slices` are the slices of `logits` by request id."""
        work = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        return [
            _prompt_chunk(seq, count, logits[prompt_slices[seq.id]]) for seq, count in work if seq.id in prompt_slices
        ]

    def finish(self, chunks: Iterable[PromptChunk]) -> dict[int, list[TokenLogprobs]]:
        """The logprobs of prompts that are done now, by request id; the chunks' tables are on the host."""
        done = {}
        for chunk in chunks:
            seq, options = chunk.seq, chunk.seq.request.logprob_options
            if not seq.num_computed_tokens:
                self._logprobs[seq.id] = [first_prompt_logprobs(options)]
            if chunk.table:
                self._logprobs[seq.id] += [token_logprobs(row, options) for row in chunk.table.rows]
            else:
                self._logprobs[seq.id] += [TokenLogprobs()] * chunk.num_targets
            if chunk.is_last:
                done[seq.id] = self._logprobs.pop(seq.id)
        return done

    def release(self, seqs: Iterable[Sequence]) -> None:
        """Forget the logprobs of unfinished prompts."""
        for seq in seqs:
            self._logprobs.pop(seq.id, None)


def _prompt_chunk(seq: Sequence, count: int, logits: Tensor) -> PromptChunk:
    end = seq.num_computed_tokens + count
    targets = seq.tokens[seq.num_computed_tokens + 1 : end + 1]
    options = seq.request.logprob_options
    asked = targets and options.wants_details
    table = prompt_logprob_table(logits[: len(targets)], targets, options) if asked else None
    return PromptChunk(seq, len(targets), end == len(seq.tokens), table)
