"""Facts about the input tokens of rows whose prompts are computed in parts, told when a prompt is done."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.sampling.logprobs import (
    HostTable,
    LogprobTable,
    any_requested,
    first_prompt_logprobs,
    prompt_logprob_table,
    token_logprobs,
)
from tgis.ipc.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The input tokens of a row that a pass says something about."""

    seq: Sequence
    num_targets: int
    is_last: bool  # of the prompt
    tables: list[LogprobTable]  # one or, where nothing is asked, none


class PromptLogprobs:
    """Keeps the facts of prompts that are not done."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # by request id

    def start(self, plan: StepPlan, prompt_slices: dict[int, slice], logits: Tensor) -> list[PromptChunk]:
        """What the logits of a plan say about input tokens; `explained` tells where those of which request are."""
        work = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        return [
            _prompt_chunk(row, count, logits[prompt_slices[row.id]]) for row, count in work if row.id in prompt_slices
        ]

    def finish(self, chunks: Iterable[PromptChunk], fetched: Iterable[HostTable]) -> dict[int, list[TokenLogprobs]]:
        """The facts of prompts that are done now, by request id; `fetched` are the parts' passes."""
        done, tables = {}, iter(fetched)
        for part in chunks:
            row, details = part.seq, part.seq.request.logprob_options
            if not row.num_computed_tokens:
                self._logprobs[row.id] = [first_prompt_logprobs(details)]
            rows = next(tables).rows if part.tables else []
            told = [token_logprobs(each, details, self._vocab_size) for each in rows]
            self._logprobs[row.id] += told or [TokenLogprobs()] * part.num_targets
            if part.is_last:
                done[row.id] = self._logprobs.pop(row.id)
        return done

    def release(self, rows: Iterable[Sequence]) -> None:
        """Forget what was found out about their inputs."""
        for row in rows:
            self._logprobs.pop(row.id, None)


def _prompt_chunk(row: Sequence, count: int, logits: Tensor) -> PromptChunk:
    following = row.tokens[row.num_computed_tokens + 1 : row.num_computed_tokens + count + 1]
    details = row.request.logprob_options
    asked = following and any_requested(details)
    passes = [prompt_logprob_table(logits[: len(following)], following, details)] if asked else []
    return PromptChunk(row, len(following), row.num_computed_tokens + count == len(row.tokens), passes)
