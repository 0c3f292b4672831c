"""Test cases of draws from filtered tokens, on a GPU or interpreted."""

from dataclasses import dataclass

import torch
from msgspec.structs import replace

from tgis.engines.sampling.draws import FilteredRows, _triton_draw_filtered, draw_filtered
from tgis.engines.sampling.logits_processors import Filters, Scores, SoftmaxStats
from tgis.engines.sampling.logprobs import LogprobRequest
from tgis.ipc.request import LogprobOptions, SamplingParams

ROWS = 3
Inputs = tuple[FilteredRows, int]


@dataclass(frozen=True)
class Case:
    """The first row has the parameters, the others have only some of them."""

    vocab_size: int
    num_candidates: int
    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    top_n: int = 0
    steps: float = 0.0  # between scores, most of which tie then
    special: float = 0.0  # the score of some tokens of the last row


CASES = {
    "top_k": Case(500, 32, top_k=5),
    "top_k and top_p": Case(500, 32, top_k=5, top_p=0.9, temperature=0.7, top_n=2),
    "top_p": Case(500, 128, top_p=0.9),
    "a list too short for top_p": Case(500, 16, top_p=0.99, temperature=5.0, top_n=1),
    "a list too short for the candidates": Case(500, 16, top_k=3, top_n=3, steps=2.0),
    "a list too short for those that tie": Case(500, 16, top_k=8, steps=1.0),
    "the whole vocabulary": Case(10, 10, top_k=3, top_p=0.5, top_n=2),
    "one token": Case(1, 1, top_p=0.5),
    "no power of two": Case(300, 48, top_k=40, top_p=0.8, top_n=3, steps=0.5),
    "the longest list": Case(1000, 256, top_p=0.95, temperature=1.5),
    "the lowest temperature": Case(300, 16, top_k=4, temperature=1e-30),
    "excluded tokens": Case(40, 16, top_k=9, top_p=0.9, special=-torch.inf),
    "more than a list can have": Case(700, 32, top_k=400, top_p=0.9, steps=0.5),
    "all equal": Case(500, 16, top_k=40, top_p=0.7, top_n=2, steps=100.0),
    "no number": Case(40, 16, top_k=9, special=torch.nan),
}


def inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(case.vocab_size + case.num_candidates)
    values = 3 * torch.randn(ROWS, case.vocab_size, generator=generator)
    if case.steps:
        values = (values / case.steps).round() * case.steps
    if case.special:
        values[-1, : -case.vocab_size // 4] = case.special
    whole = SamplingParams(temperature=case.temperature, top_k=case.top_k, top_p=case.top_p)
    params = [whole, SamplingParams(temperature=1.0, top_k=case.top_k), SamplingParams(temperature=1.0, top_p=0.7)]
    place = torch.device(device)
    filters = Filters.of(params, case.vocab_size, place)
    wanted = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True)
    options = [replace(wanted, top_n_tokens=count) for count in ((case.top_n, 0, 1) if case.top_n else (0, 0, 0))]
    request = LogprobRequest.of(options, case.vocab_size, place)
    values = values.to(place)
    scores = Scores(values, values.amax(-1, keepdim=True), filters.temperature)
    keys = torch.randint(-(2**63), 2**63 - 1, (ROWS, 1), generator=generator).to(place)
    return FilteredRows(scores, SoftmaxStats.of(scores), filters, keys, request), case.num_candidates


def changed(case: Case, device: str) -> float:
    """The share of rows whose table is not that of plain PyTorch; invalid rows may differ but in their state."""
    arguments = inputs(case, device)
    found, expected = (draw(*arguments).cpu() for draw in (_triton_draw_filtered, draw_filtered))
    is_other = ~torch.isclose(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    width = expected.shape[1] // 2 - 2
    is_other[:, 5:] &= (torch.arange(width) < expected[:, 4:5]).repeat(1, 2)  # the others are not reported
    is_other[expected[:, 1] == 1.0, :1] = is_other[expected[:, 1] == 1.0, 2:] = False
    return float(is_other.any(-1).double().mean())
