"""Running ahead: the next decode step is launched before the tokens of the last one are on the host.

A flight is such a step, of rows that are sure to want another token unless they end by the one that they are getting;
on its way into the flight that one never leaves the device. The flight lands in the step that is planned next. Rows
that have left by then, or whose token turned out to be another, are computed anew or not at all. All passes are in one
queue of the device: whoever gets a block next writes to it after the flight has, and reads what it has written itself.
"""

from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import Tensor

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.base import StepResult
from tgis.engines.paged.prompt_logprobs import Explainer
from tgis.engines.paged.underway import Underway

_PAUSE = 16  # steps after one whose tokens have changed: where that is usual, rows would be computed twice

Launch = Callable[[Plan], Underway]
LaunchNext = Callable[[list[Sequence], Tensor, list[int]], Underway]  # rows; tokens; places of the rows' own
Source = tuple[int, int]  # number of a pass, and a place in what it chooses


class RunAhead:
    """The steps of one engine, from plan to result."""

    def __init__(
        self,
        launch: Launch,
        launch_next: LaunchNext | None,
        forget: Callable[[], None],
        explainer: Explainer,
        block_size: int,
    ) -> None:
        """Without `launch_next` every step is launched when it is planned; `forget` is for tokens that changed."""
        self._launch = launch
        self._launch_next = launch_next
        self._forget = forget
        self._explainer = explainer
        self._block_size = block_size
        self._pause = 0  # steps to go without a flight
        self._flight: Underway | None = None
        self._lengths: dict[int, int] = {}  # by request id: tokens of a row when it lands with the flight

    def step(self, plan: Plan) -> StepResult:
        """Let land what can, launch the rest and the next flight, and only then wait for tokens."""
        landing = {row.id for row in plan.sampled if self._lengths.get(row.id) == len(row.tokens)}
        passes = [self._flight] if self._flight and landing else []
        self._flight, self._lengths = None, {}
        rest = _without(plan, landing) if landing else plan
        if rest.rows:
            passes.append(self._launch(rest))
        # A row that was in the flight and does not land has been computed anew: the later pass counts.
        sources = {row.id: (number, place) for number, each in enumerate(passes) for place, row in enumerate(each.rows)}
        self._take_off(plan, passes, sources)
        return self._result(plan, passes, sources)

    def release(self, rows: Iterable[Sequence]) -> None:
        """Rows that have gone do not land."""
        for row in rows:
            self._lengths.pop(row.id, None)
        if not self._lengths:
            self._flight = None

    def _take_off(self, plan: Plan, passes: list[Underway], sources: dict[int, Source]) -> None:
        rows = self._going_on(plan)
        if self._launch_next is None or not rows:
            return
        if self._pause:
            self._pause -= 1
            return
        tokens = [each.draft.tokens() for each in passes]
        starts = [0, *accumulate(map(len, tokens))]
        own = [starts[number] + place for number, place in (sources[row.id] for row in rows)]
        self._flight = self._launch_next(rows, torch.cat(tokens), own)
        self._lengths = {row.id: len(row.tokens) + 1 for row in rows}

    def _going_on(self, plan: Plan) -> list[Sequence]:
        """The rows that will want another token whatever the next is, short of an end. None where one lacks a block for
        it or has not done its prompt: what is left behind is a second pass, which costs more than is won.
        """
        rows = [row for row in plan.sampled if row.remaining > 1]
        ready = all(self._has_place(row) for row in rows)
        return rows if ready and len(plan.sampled) == len(plan.rows) else []

    def _has_place(self, row: Sequence) -> bool:
        place = len(row.tokens)  # of the next token: in no block that others may find
        assert place >= row.labelled * self._block_size
        return place < len(row.blocks) * self._block_size

    def _result(self, plan: Plan, passes: list[Underway], sources: dict[int, Source]) -> StepResult:
        result, choices = StepResult([], []), []
        for each in passes:
            choice, told = each.wait()
            choices.append(choice)
            result.inputs |= self._explainer.finish(each.parts, told)
        asked = any(choice.facts for choice in choices)
        for row in plan.sampled:
            number, place = sources[row.id]
            choice = choices[number]
            result.tokens.append(choice.tokens[place])
            if asked:
                result.facts.append(choice.facts[place] if choice.facts else None)
            if place in choice.bad:
                result.failed[row.id] = "the model's scores are not finite"
            if place in choice.changed:
                self.release([row])
                self._forget()
                self._pause = _PAUSE
        return result


def _without(plan: Plan, gone: set[int]) -> Plan:
    """The plan without the rows of these requests."""
    work = [(row, count) for row, count in zip(plan.rows, plan.counts, strict=True) if row.id not in gone]
    rows, counts = [row for row, _ in work], [count for _, count in work]
    return Plan(rows, counts, [row for row in plan.sampled if row.id not in gone], plan.prefill)
