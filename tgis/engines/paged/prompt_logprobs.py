"""Facts about the input tokens of rows whose prompts are computed in parts, told when a prompt is done."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.sampling.logprobs import Fetched, Pass, facts, first_input_fact, input_pass, wanted
from tgis.ipc.messages import TokenFacts


@dataclass(frozen=True, slots=True)
class Part:
    """The input tokens of a row that a pass says something about."""

    row: Sequence
    tokens: int
    last: bool  # of the prompt
    passes: list[Pass]  # one or, where nothing is asked, none


class Explainer:
    """Keeps the facts of prompts that are not done."""

    def __init__(self, vocab_size: int) -> None:
        self._vocabulary = vocab_size
        self._facts: dict[int, list[TokenFacts]] = {}  # by request id

    def begin(self, plan: Plan, explained: dict[int, slice], logits: Tensor) -> list[Part]:
        """What the logits of a plan say about input tokens; `explained` tells where those of which request are."""
        work = zip(plan.rows, plan.counts, strict=True)
        return [_part(row, count, logits[explained[row.id]]) for row, count in work if row.id in explained]

    def finish(self, parts: Iterable[Part], fetched: Iterable[Fetched]) -> dict[int, list[TokenFacts]]:
        """The facts of prompts that are done now, by request id; `fetched` are the parts' passes."""
        done, tables = {}, iter(fetched)
        for part in parts:
            row, details = part.row, part.row.request.details
            if not row.computed:
                self._facts[row.id] = [first_input_fact(details)]
            rows = next(tables).rows if part.passes else []
            told = [facts(each, details, self._vocabulary) for each in rows]
            self._facts[row.id] += told or [TokenFacts()] * part.tokens
            if part.last:
                done[row.id] = self._facts.pop(row.id)
        return done

    def release(self, rows: Iterable[Sequence]) -> None:
        """Forget what was found out about their inputs."""
        for row in rows:
            self._facts.pop(row.id, None)


def _part(row: Sequence, count: int, logits: Tensor) -> Part:
    following = row.tokens[row.computed + 1 : row.computed + count + 1]
    details = row.request.details
    asked = following and wanted(details)
    passes = [input_pass(logits[: len(following)], following, details)] if asked else []
    return Part(row, len(following), row.computed + count == len(row.tokens), passes)
