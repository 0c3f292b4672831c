"""Recorded passes: a replay gives the bits of the same pass run again, whatever is in its inputs by then."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from cpu_kernels import of_best_isa, of_each_isa, seeded
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding, linear

from tgis.engines.kernels.cpu.gemm import MakeGemm, OneDnnGemm
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.norms import Norm, NormFormula
from tgis.engines.kernels.cpu.recording import Recorder
from tgis.errors import Unsupported

DTYPES = [torch.float32, torch.bfloat16]


deterministic, kernels, best_kernels = seeded, of_each_isa, of_best_isa


@pytest.fixture
def recorder(best_kernels: CpuKernels) -> Recorder:
    return Recorder(best_kernels)


def assert_replays(recorder: Recorder, run: Callable[[], Tensor], inputs: list[Tensor]) -> Counter[str]:
    """`run` computes from the inputs; the recording is replayed with others in their place.

    Returns the operators of PyTorch that a replay calls.
    """
    expected = run().clone()
    with torch.inference_mode():
        replay, output = recorder.record(run)
        assert torch.equal(output, expected)
        for _ in range(3):
            for tensor in inputs:
                tensor.copy_(torch.randn(tensor.shape))
            expected = run().clone()
            replay()
            assert torch.equal(output, expected)
    return replay.operators


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "run",
    [
        lambda x, y: x + y - (x / y) * 0.3 + 2,
        lambda x, y: (x[:, None] * y) / x[:, :1],  # repeated
        lambda x, y: -(x * y[:1]) - y[0, 0] / 30.0,
        lambda x, y: x[:, ::3] * y[:, ::3] + 1e-3,
        lambda x, y: torch.cat([-x[:, 9:], y[:, :9]], -1),
        lambda x, y: torch.cat([x.T, y.T[:5]]),
        lambda x, y: torch.stack([-x[:, 1::2], y[:, 1::2]], -1).flatten(-2),
        lambda x, y: (x.view(-1, 2, 265).transpose(1, 2).reshape(-1, 530) + y[:, :1].clone()).contiguous(),
        lambda x, y: dropout(x * y, 0.5, training=False),
        lambda x, y: x * torch.ones(530, dtype=x.dtype) + y * torch.full((1, 530), 0.3, dtype=x.dtype),
        lambda x, y: x * embedding(torch.arange(len(x)) + 1, y.repeat(2, 1)),
    ],
)
def test_arithmetic_and_copies_are_kernels_of_the_same_bits(
    kernels: CpuKernels, run: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    x, y = torch.randn(2, 20, 530).to(dtype)
    assert not assert_replays(Recorder(kernels), lambda: run(x, y), [x, y]).keys() - {"aten.repeat.default"}


@pytest.mark.parametrize(
    ("run", "operators"),
    [
        (lambda x: torch.cat([x.double(), x.T.reshape(3, 4)]), {"cat.default"}),
        (lambda x: x.T * x.T + torch.add(x.T, x.T, alpha=2), {"add.Tensor", "mul.Tensor"}),
        (lambda x: x + (torch.tensor([1, 2, 3]) * torch.tensor([4, 5, 6])).sum(), {"mul.Tensor"}),
        (lambda x: (x * 2).mul_(x[0]), {"mul_.Tensor"}),
        (lambda x: x * torch.tensor([0.5, 1.5, 2.5, 3.5]) + torch.arange(4), set[str]()),
    ],
)
def test_what_no_kernel_does_is_an_operator(
    recorder: Recorder, run: Callable[[Tensor], Tensor], operators: set[str]
) -> None:
    x = torch.randn(3, 4)
    assert assert_replays(recorder, lambda: run(x), [x]).keys() >= {f"aten.{name}" for name in operators}


@pytest.mark.parametrize(
    "make", [OneDnnGemm, lambda weight: lambda x, bias: linear(x, weight, bias)], ids=["onednn", "pytorch"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
def test_linear_layers_without_a_kernel_are_repeated(
    recorder: Recorder, make: MakeGemm, dtype: torch.dtype, rows: int
) -> None:
    """As of an odd number of inputs in bfloat16; oneDNN's weights have no address."""
    weights = torch.randn(33, 7).to(dtype), torch.randn(7, 33).to(dtype)
    if make is OneDnnGemm and not OneDnnGemm.supports(weights[0]):
        pytest.skip(f"no oneDNN for {dtype} on this CPU")
    up, down = map(make, weights)
    x, bias = torch.randn(1, rows, 7).to(dtype), torch.randn(33).to(dtype)
    assert_replays(recorder, lambda: down(up(x, bias) * up(x, None), None) + x, [x, bias])


@pytest.mark.parametrize("convert", [Tensor.to_mkldnn, Tensor.to_sparse])
def test_results_without_an_address_cannot_be_recorded(recorder: Recorder, convert: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(Unsupported):
        recorder.record(lambda: convert(x).to_dense())


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_looked_up_again(kernels: CpuKernels, dtype: torch.dtype) -> None:
    table, ids = torch.randn(50, 7).to(dtype), torch.tensor([[3, 0, 49], [7, 7, 1]])
    with torch.inference_mode():
        replay, output = Recorder(kernels).record(lambda: embedding(ids, table))
        for _ in range(3):
            replay()
            assert torch.equal(output, table[ids])
            ids.copy_(torch.randint(50, ids.shape))
        for wrong in (-1, 50):
            ids[1, 2] = wrong
            with pytest.raises(RuntimeError, match=r"packed_rows_.* failed, call 1 of a recorded pass"):
                replay()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_recording_serves_any_sizes(kernels: CpuKernels, dtype: torch.dtype) -> None:
    size = 72
    norm = Norm(nn.LayerNorm(size).to(dtype), NormFormula(1e-5, centered=True), kernels)
    table, ids, chosen = torch.randn(50, size).to(dtype), torch.zeros(300, dtype=torch.int64), torch.zeros(5).long()

    def run(sizes: tuple[int, ...]) -> Tensor:
        hidden = embedding(ids[None, : sizes[0]] + 1, table) * torch.tensor(0.7, dtype=dtype)
        heads = (hidden + torch.ones(1, sizes[0], 1, dtype=dtype)).unflatten(-1, (8, 9)).transpose(1, 2).contiguous()
        turned = torch.cat([-heads[..., 5:], heads[..., :5]], -1) / hidden[:, None, :, :9]
        hidden = (
            hidden + turned.transpose(1, 2).reshape(1, sizes[0], size) * torch.arange(sizes[0], dtype=dtype)[:, None]
        )
        return norm(hidden + norm(hidden * hidden))[:, chosen[: sizes[1]]]

    recorder = Recorder(kernels)
    with torch.inference_mode():
        replay, output = recorder.record_resizable(run, (300, 5))
        for sizes in ((300, 5), (7, 2), (1, 1), (200, 0)):
            ids.copy_(torch.randint(49, ids.shape))
            chosen.copy_(torch.randint(sizes[0], chosen.shape))
            replay(sizes)
            assert torch.equal(output[:, : sizes[1]], run(sizes)), sizes
        for unfit in (
            lambda sizes: run(sizes).softmax(-1),
            lambda sizes: norm(run(sizes)) if sizes[0] % 2 else run(sizes),
            lambda sizes: norm(embedding(ids[None, : sizes[0] * sizes[1] // 5], table)),
            lambda sizes: run(sizes) * torch.arange(sizes[1], 0, -1, dtype=dtype)[:, None],
            lambda sizes: run(sizes) * torch.ones(1, 3 - sizes[0] % 2, 1, dtype=dtype)[:, :1],
            lambda sizes: run(sizes) if sizes[0] % 2 == 0 else run(sizes) + torch.tensor([0.5], dtype=dtype),
        ):
            with pytest.raises(Unsupported, match=r"operators of PyTorch|other (calls|constants)"):
                recorder.record_resizable(unfit, (300, 5))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x * x.sum().item(),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x[x > 0],
        lambda x: x + torch.rand(3),
        lambda x: x.sum()[None] if torch.equal(x, x) else x,
    ],
)
def test_what_depends_on_numbers_in_tensors_cannot_be_recorded(
    recorder: Recorder, run: Callable[[Tensor], Tensor]
) -> None:
    x = torch.randn(3)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), pytest.raises(Unsupported):
            recorder.record(lambda: run(x))
    replay, output = recorder.record(lambda: x + x)  # others can be, later
    replay()
    assert torch.equal(output, x + x)
