"""Packed linear layers against products in float64, and that no row depends on those beside it."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tgis.engines.kernels.cpu import linear
from tgis.engines.kernels.cpu.build import library
from tgis.engines.kernels.cpu.linear import OneDnnProduct, OurProduct, PackedLinear, Product, has_kernel

KINDS = [OurProduct, OneDnnProduct]
SIZES = [(2, 1), (64, 32), (576, 192), (576, 49), (1538, 70), (4100, 33)]  # beyond a tile, beyond what is read at once
ERROR = {torch.float32: 1e-5, torch.bfloat16: 8e-3}

needs_kernel = pytest.mark.skipif(not has_kernel(torch.zeros(2, 2)), reason="no kernel for this processor")


@pytest.fixture(autouse=True)
def deterministic() -> None:
    torch.manual_seed(7)


@pytest.fixture
def uncached() -> Iterator[None]:
    for cached in (library, linear._kernel):
        cached.cache_clear()
    yield
    for cached in (library, linear._kernel):
        cached.cache_clear()


def parts(inputs: int, outputs: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(outputs, inputs).div(inputs**0.5).to(dtype)
    return weight, torch.randn(outputs).to(dtype), torch.randn(rows, inputs).to(dtype)


def error(product: Product, weight: Tensor, bias: Tensor | None, x: Tensor) -> float:
    expected = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((product(x, bias).double() - expected).abs().max() / expected.abs().max())


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 65, 200])
def test_is_a_product(
    kind: Callable[[Tensor], Product], dtype: torch.dtype, inputs: int, outputs: int, rows: int
) -> None:
    weight, bias, x = parts(inputs, outputs, dtype, rows)
    assert error(kind(weight), weight, None, x) < ERROR[dtype]
    assert error(kind(weight), weight, bias, x) < ERROR[dtype]


@needs_kernel
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_row_depends_on_others(dtype: torch.dtype, threads: int) -> None:
    weight, bias, x = parts(576, 200, dtype, 150)
    product = partial(OurProduct(weight), bias=bias)
    alone = torch.cat([product(row[None]) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (2, 9, 64, 150):
            assert torch.equal(product(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("dtype", ERROR)
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype) -> None:
    weight, bias, x = parts(64, 40, dtype, 9)
    x[3, 5], x[6, 0] = float("nan"), float("inf")
    y = OurProduct(weight)(x, bias)
    assert y[3].isnan().all()
    assert not y[6].isfinite().any()
    assert y[[0, 1, 2, 4, 5, 7, 8]].isfinite().all()


@needs_kernel
def test_any_shape_and_order_of_inputs() -> None:
    weight, bias, x = parts(64, 40, torch.float32, 12)
    product = partial(OurProduct(weight), bias=bias)
    assert torch.equal(product(x.view(2, 3, 2, 64)), product(x).view(2, 3, 2, 40))
    assert torch.equal(product(x.T.contiguous().T), product(x))
    assert product(x[:0]).shape == (0, 40)


@pytest.mark.parametrize(("inputs", "dtype"), [(63, torch.bfloat16), (64, torch.float16), (64, torch.float64)])
def test_other_shapes_and_dtypes_have_no_kernel(inputs: int, dtype: torch.dtype) -> None:
    assert not has_kernel(torch.zeros(32, inputs, dtype=dtype))


@pytest.mark.usefixtures("uncached")
def test_without_a_compiler_onednn_multiplies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    linear = nn.Linear(64, 40).requires_grad_(requires_grad=False)
    packed = PackedLinear(linear)
    assert isinstance(packed.product, OneDnnProduct)
    assert error(lambda x, _: packed(x), linear.weight, linear.bias, torch.randn(3, 64)) < ERROR[torch.float32]
