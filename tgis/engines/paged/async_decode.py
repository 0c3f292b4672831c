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

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.paged.prompt_logprobs import PromptLogprobs
from tgis.engines.paged.underway import InFlightStep

_COOLDOWN_STEPS = 16  # steps after one whose tokens have changed: where that is usual, rows would be computed twice

Launch = Callable[[StepPlan], InFlightStep]
LaunchNext = Callable[[list[Sequence], Tensor, list[int]], InFlightStep]  # rows; tokens; places of the rows' own
Source = tuple[int, int]  # number of a pass, and a place in what it chooses


class AsyncDecoder:
    """The steps of one engine, from plan to result."""

    def __init__(
        self,
        launch: Launch,
        launch_next: LaunchNext | None,
        invalidate: Callable[[], None],
        explainer: PromptLogprobs,
        block_size: int,
    ) -> None:
        """Without `launch_next` every step is launched when it is planned; `forget` is for tokens that changed."""
        self._launch = launch
        self._launch_next = launch_next
        self._invalidate = invalidate
        self._prompt_logprobs = explainer
        self._block_size = block_size
        self._cooldown = 0  # steps to go without a flight
        self._in_flight: InFlightStep | None = None
        self._expected_lengths: dict[int, int] = {}  # by request id: tokens of a row when it lands with the flight

    def step(self, plan: StepPlan) -> StepResult:
        """Let land what can, launch the rest and the next flight, and only then wait for tokens."""
        reused = {row.id for row in plan.sampled if self._expected_lengths.get(row.id) == len(row.tokens)}
        steps = [self._in_flight] if self._in_flight and reused else []
        self._in_flight, self._expected_lengths = None, {}
        rest = plan.without(reused) if reused else plan
        if rest.seqs:
            steps.append(self._launch(rest))
        # A row that was in the flight and does not land has been computed anew: the later pass counts.
        sources = {row.id: (number, place) for number, each in enumerate(steps) for place, row in enumerate(each.seqs)}
        self._launch_ahead(plan, steps, sources)
        return self._collect(plan, steps, sources)

    def release(self, rows: Iterable[Sequence]) -> None:
        """Rows that have gone do not land."""
        for row in rows:
            self._expected_lengths.pop(row.id, None)
        if not self._expected_lengths:
            self._in_flight = None

    def _launch_ahead(self, plan: StepPlan, steps: list[InFlightStep], sources: dict[int, Source]) -> None:
        rows = self._continuing(plan)
        if self._launch_next is None or not rows:
            return
        if self._cooldown:
            self._cooldown -= 1
            return
        tokens = [each.sampled.token_ids() for each in steps]
        starts = [0, *accumulate(map(len, tokens))]
        own = [starts[number] + place for number, place in (sources[row.id] for row in rows)]
        self._in_flight = self._launch_next(rows, torch.cat(tokens), own)
        self._expected_lengths = {row.id: len(row.tokens) + 1 for row in rows}

    def _continuing(self, plan: StepPlan) -> list[Sequence]:
        """The rows that will want another token whatever the next is, short of an end. None where one lacks a block for
        it or has not done its prompt: what is left behind is a second pass, which costs more than is won.
        """
        rows = [row for row in plan.sampled if row.num_remaining_tokens > 1]
        ready = all(self._has_free_slot(row) for row in rows)
        return rows if ready and len(plan.sampled) == len(plan.seqs) else []

    def _has_free_slot(self, row: Sequence) -> bool:
        place = len(row.tokens)  # of the next token: in no block that others may find
        assert place >= row.num_cached_blocks * self._block_size
        return place < len(row.block_table) * self._block_size

    def _collect(self, plan: StepPlan, steps: list[InFlightStep], sources: dict[int, Source]) -> StepResult:
        result, choices = StepResult([], []), []
        for each in steps:
            choice, told = each.wait()
            choices.append(choice)
            result.prompt_logprobs |= self._prompt_logprobs.finish(each.prompt_chunks, told)
        asked = any(choice.logprobs for choice in choices)
        for row in plan.sampled:
            number, place = sources[row.id]
            choice = choices[number]
            result.tokens.append([choice.tokens[place]])
            if asked:
                logprobs = choice.logprobs[place] if choice.logprobs else None
                result.logprobs.append([logprobs] if logprobs else [])
            if place in choice.invalid:
                result.failed[row.id] = "the model's scores are not finite"
            if place in choice.changed:
                self.release([row])
                self._invalidate()
                self._cooldown = _COOLDOWN_STEPS
        return result
