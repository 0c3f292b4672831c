"""Details of tokens that requests ask for: logprob, rank and the best candidates.

All details of some rows are one float64 table, so that a single transfer brings it from the device. Columns: token,
whether the row is invalid (its scores are not finite, or no token is left), logprob, rank, number of candidates, then
the ids and the logprobs of the best tokens.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.host_memory import download
from tgis.engines.sampling.logits_processors import Rows, Scores, column, first_tokens, softmax_mass
from tgis.ipc.request import LogprobOptions, TokenLogprobs

_MAX_TIE_FACTOR = 4  # reported when many tie, in multiples of those asked for
_TIE_DIGITS = 9  # digits that are compared: logprobs of equal scores may differ by rounding

Row = list[float]  # row of a table on the host


@dataclass(frozen=True, slots=True)
class LogprobRequest(Rows):
    """The details that some rows ask for."""

    logprobs: bool  # whether any does
    ranks: bool  # whether any does
    top_n: Tensor  # [b, 1] int64
    max_top: int  # length of a list of best tokens that holds the candidates to report of every row

    @classmethod
    def of(cls, rows: list[LogprobOptions], vocab_size: int, device: torch.device) -> "LogprobRequest":
        """What the options of these rows ask for together."""
        top_n = [min(row.top_n_tokens, vocab_size) for row in rows]
        max_top = min((_MAX_TIE_FACTOR + 1) * max(top_n), vocab_size)
        logprobs, ranks = any(row.logprobs for row in rows), any(row.ranks for row in rows)
        return cls(logprobs, ranks, column(top_n, torch.int64, device), max_top)


class PendingCopy:
    """Some tables on their way to the host, in one transfer."""

    def __init__(self, tables: list[Tensor]) -> None:
        self._shapes = [table.shape for table in tables]
        self._wait: Callable[[], list[float]] = (
            download(torch.cat([table.flatten() for table in tables])) if tables else list
        )

    def wait(self) -> list[list[Row]]:
        """The rows of each table."""
        values, tables, start = self._wait(), [], 0
        for count, width in self._shapes:
            tables.append([values[at : at + width] for at in range(start, start + count * width, width)])
            start += count * width
        return tables


def table_of(max_score: Tensor, token_ids: Tensor, logprob: Tensor, rank: Tensor, *candidates: Tensor) -> Tensor:
    """The table with these columns [b, 1]; `candidates` are their number, their ids and their logprobs, or nothing."""
    columns = token_ids, ~max_score.isfinite(), logprob, rank, *(candidates or (torch.zeros_like(token_ids),))
    return torch.cat([column.double() for column in columns], -1)


def candidate_columns(
    logits: Tensor, ids: Tensor, kept: Tensor, mass: Tensor, request: LogprobRequest
) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of a table with the best of the kept tokens, which are adjacent, in lists [b, C] by descending logit;
    `mass` [b, 1] is that of all kept tokens.
    """
    last = ids.shape[1] - 1
    first = kept.byte().argmax(-1, keepdim=True)
    nth = (first + request.top_n - 1).clamp(0, last)  # whatever follows the last kept one has a lower score
    num_top = (kept & (logits >= logits.gather(1, nth))).sum(-1, keepdim=True).clamp(max=request.max_top)
    at = (first + torch.arange(request.max_top, device=first.device)).clamp(max=last)
    return num_top, ids.gather(1, at), logits.gather(1, at) - mass.log()


def token_ranks(scores: Scores, token_ids: Tensor) -> Tensor:
    """The ranks of `token_ids` [b, 1]: 1 + the number of tokens with a higher score."""
    values, chosen = scores.values, scores.values.gather(1, token_ids)
    return 1 + torch.cat([(values[rows] > chosen[rows]).sum(-1, keepdim=True) for rows in scores.row_blocks()])


def logprob_table(scores: Scores, token_ids: Tensor, request: LogprobRequest) -> Tensor:
    """The table of `token_ids` [b, 1] in rows without filters."""
    zeros = torch.zeros_like(token_ids)
    mass = softmax_mass(scores) if request.logprobs else zeros
    rank = token_ranks(scores, token_ids) if request.ranks else zeros
    logit = (scores.values.gather(1, token_ids).double() - scores.max_score) / scores.temperature
    chosen = scores.max_score, token_ids, logit - mass.log(), rank
    if request.max_top == 0:
        return table_of(*chosen)
    values, ids = first_tokens(scores, request.max_top, request.top_n)
    logits = (values.double() - scores.max_score) / scores.temperature
    return table_of(*chosen, *candidate_columns(logits, ids, values > -torch.inf, mass, request))


def token_logprobs(row: list[float], options: LogprobOptions) -> TokenLogprobs:
    """The details that `options` ask for, from a row of a table."""
    token, _, logprob, rank, num_top, *best = row
    half = len(best) // 2
    top = list(zip(map(int, best[:half]), best[half:], strict=True))[: int(num_top)]
    return TokenLogprobs(
        logprob + 0.0 if options.logprobs else 0.0,  # not -0.0
        int(rank) if options.ranks else 0,
        _top_candidates(top, options, (int(token), logprob)) if options.top_n_tokens else [],
    )


def _top_candidates(
    best: list[tuple[int, float]], options: LogprobOptions, chosen: tuple[int, float]
) -> list[tuple[int, float]]:
    """At most 4 n of `best`, preferring those with low ids; sorted by logprob, or by id where no logprobs are asked
    for. With `exact_top_n` the n best; of those that tie, the chosen token first.
    """
    n = options.top_n_tokens
    if options.exact_top_n:
        candidates = [chosen, *((token, logprob) for token, logprob in best if token != chosen[0])]
        return sorted(candidates, key=lambda candidate: -round(candidate[1], _TIE_DIGITS))[:n]
    by_id = sorted(best)[: _MAX_TIE_FACTOR * n]
    return (
        sorted(by_id, key=lambda candidate: -candidate[1]) if options.logprobs else [(token, 0.0) for token, _ in by_id]
    )


def first_prompt_logprobs(options: LogprobOptions) -> TokenLogprobs:
    """The logprobs of the first prompt token, which nothing predicts."""
    return TokenLogprobs(math.nan if options.logprobs else 0.0)


def prompt_logprobs(logits: Tensor, tokens: list[int], options: LogprobOptions) -> list[TokenLogprobs]:
    """The logprobs of prompt `tokens` [T], each predicted by the same row of `logits` [T, V].

    They come from the raw logits, before penalties and temperature. Where these are not finite, the logprob is NaN.
    """
    if not tokens or not options.wants_details:
        return [TokenLogprobs() for _ in tokens]
    with torch.inference_mode():
        (rows,) = PendingCopy([prompt_logprob_table(logits, tokens, options)]).wait()
    return [token_logprobs(row, options) for row in rows]


def prompt_logprob_table(logits: Tensor, tokens: list[int], options: LogprobOptions) -> Tensor:
    """The table of prompt `tokens` for `prompt_logprobs`, while it is on the device."""
    max_score, vocab_size = logits.amax(-1, keepdim=True).float(), logits.shape[1]
    scores = Scores(logits, max_score, torch.ones_like(max_score, dtype=torch.float64))
    targets = column(tokens, torch.int64, logits.device)
    request = LogprobRequest.of([options] * len(tokens), vocab_size, logits.device)
    return logprob_table(scores, targets, request)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The prompt tokens of a sequence that one step predicts."""

    seq: Sequence
    num_targets: int
    is_last: bool  # whether it ends the prompt
    table: Tensor | None  # None where nothing is asked


class PromptLogprobs:
    """The logprobs of prompts that are computed in chunks, kept until the prompt is done."""

    def __init__(self) -> None:
        self._logprobs: dict[int, list[TokenLogprobs]] = {}  # logprobs by request id

    def start(self, plan: StepPlan, prompt_slices: dict[int, slice], logits: Tensor) -> list[PromptChunk]:
        """The chunks of a plan, with tables on the device; `prompt_slices` are the slices of `logits` by request id."""
        work = zip(plan.seqs, plan.num_scheduled_tokens, strict=True)
        return [
            _prompt_chunk(seq, count, logits[prompt_slices[seq.id]]) for seq, count in work if seq.id in prompt_slices
        ]

    def finish(self, chunks: Iterable[PromptChunk], tables: Iterable[list[Row]]) -> dict[int, list[TokenLogprobs]]:
        """The logprobs of prompts that are done now, by request id; `tables` are those of the chunks that have one."""
        done, remaining = {}, iter(tables)
        for chunk in chunks:
            seq, options = chunk.seq, chunk.seq.request.logprob_options
            if not seq.num_computed_tokens:
                self._logprobs[seq.id] = [first_prompt_logprobs(options)]
            if chunk.table is not None:
                self._logprobs[seq.id] += [token_logprobs(row, options) for row in next(remaining)]
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
