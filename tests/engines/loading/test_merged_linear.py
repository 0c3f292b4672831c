"""Merged linear layers: which ones they are, and that the model computes the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import make_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tgis.engines.loading.merged_linear import MergedLinearSlice, merge_linears

IDS = torch.tensor([[5, 9, 13, 2, 7]])
MERGED = {  # per layer: those of the queries, keys and values, then gate and up
    "Llama": 3 + 2,
    "Qwen2": 3 + 2,  # with biases
    "OPT": 3,
    "GPTNeoX": 0,  # they are one from the start
    "StableLm": 3 + 2,
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def slices(model: nn.Module) -> list[MergedLinearSlice]:
    return [module for module in model.modules() if isinstance(module, MergedLinearSlice)]


@pytest.mark.parametrize("name", MERGED)
def test_the_model_computes_the_same(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_model(name, tmp_path), dtype=torch.float32).eval()
    before = model(IDS).logits
    layers = model.config.num_hidden_layers
    merge_linears(model, input_ids=IDS)
    assert len(slices(model)) == MERGED[name] * layers
    torch.testing.assert_close(model(IDS).logits, before)
    torch.testing.assert_close(model(IDS[:, :2]).logits, before[:, :2])
    assert all((layer.merged._input, layer.merged._outputs) == (None, []) for layer in slices(model))  # no memory


class Odd(nn.Module):  # type: ignore[misc]
    """Two layers that share an input, one that does not, one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other, self.twice = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, use_cache: bool) -> Tensor:
        result: Tensor = self.other(self.a(x) + self.b(x)) + self.twice(x) + self.twice(2 * x)
        return result


def test_others_are_left_alone() -> None:
    model, x = Odd(), torch.randn(3, 4)
    before = model(x, False)
    merge_linears(model, x=x)
    assert len(slices(model)) == 2
    assert isinstance(model.a, MergedLinearSlice)
    assert isinstance(model.b, MergedLinearSlice)
    torch.testing.assert_close(model(x, False), before)


def test_slices_called_with_other_inputs_and_out_of_order() -> None:
    model, x, y = Odd(), torch.randn(3, 4), torch.randn(2, 4)
    expected = model.b(y), model.a(x), model.b(x), model.a(y)
    merge_linears(model, x=x)
    for found, wanted in zip((model.b(y), model.a(x), model.b(x), model.a(y)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
