"""Nothing that a step samples waits for the device, as far as a CPU shows it."""

from itertools import product
from typing import Any

import pytest
import torch
from grammar_walks import compiled, digits
from random_requests import KINDS, WISHES
from sampling_oracle import make_row
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from tgis.engines import host_memory
from tgis.engines.sampling import draws, logits_processors
from tgis.engines.sampling.draws import FilteredRows, SamplingOps
from tgis.engines.sampling.encoder_decoder import EncoderDecoder
from tgis.engines.sampling.logprobs import prompt_logprob_table
from tgis.engines.sampling.sampler import BatchSampler
from tgis.ipc.lookups import GrammarKind
from tgis.ipc.request import LogprobOptions

CPU = torch.device("cpu")
VOCAB_SIZE = 800
ATEN = torch.ops.aten
WAITING = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.is_nonzero, ATEN._unique2}
INDEXING = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}


class NoWaits(TorchDispatchMode):  # type: ignore[misc]
    """Refuses values of tensors as Python numbers, masks as indices, and indices or values that come from Python."""

    def __init__(self) -> None:
        super().__init__()
        self._from_python: list[Tensor] = []  # alive, so that no other tensor has their addresses

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in WAITING, func
        if func.overloadpacket in INDEXING:
            tensors = [x for x in [*args[1], *args[2:3]] if isinstance(x, Tensor)]
            assert not any(x.dtype in (torch.bool, torch.uint8) for x in args[1] if x is not None)
            assert not any(x is y for x in tensors for y in self._from_python)
        result = func(*args, **kwargs or {})
        if func is ATEN.lift_fresh.default:
            self._from_python.append(result)
        return result


def sorted_draw(rows: FilteredRows, _num_candidates: int) -> Tensor:
    """As on devices where no kernel draws."""
    return draws.draw_filtered(rows, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_copy_async", lambda numbers, _device: numbers.clone())
    monkeypatch.setattr(logits_processors, "_possibly_any", lambda _: True)


def test_sampling_never_waits() -> None:
    """Sequences that join, newest tokens on the device only, all methods, and grammars."""
    sampler = BatchSampler(VOCAB_SIZE, [3, 7], CPU, lambda seq: seq.tokens, SamplingOps(draw_filtered=sorted_draw))
    rows = [make_row(kind, wish) for kind, wish in product(KINDS, WISHES) if not kind.watermark]
    for row in rows[::3]:
        row.grammar = compiled(GrammarKind.REGEX, "[0-9]+", digits(VOCAB_SIZE))
    for count, lookahead in ((5, 0), (len(rows), 0), (len(rows), 1)):
        with NoWaits():
            (metadata,) = host_memory.upload([sampler.prepare(rows[:count], lookahead)], CPU)
            newest = torch.ones(count, dtype=torch.int64) if lookahead else None
            sampler.sample(torch.randn(count, VOCAB_SIZE), metadata, newest).token_ids()


@pytest.mark.parametrize("wish", WISHES)
def test_logprobs_of_prompts_never_wait(wish: LogprobOptions) -> None:
    logits = torch.randn(5, VOCAB_SIZE)
    with NoWaits():
        prompt_logprob_table(logits, [1, 2, 3, 4, 5], wish)


def test_constraints_of_encoder_decoders_never_wait() -> None:
    outputs = EncoderDecoder(GenerationConfig(decoder_start_token_id=2, forced_bos_token_id=5), 40, CPU)
    logits = torch.zeros(3, 40)
    with NoWaits():
        outputs.constrain(logits, [0, 2])
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits] == [[5], list(range(40)), [5]]
