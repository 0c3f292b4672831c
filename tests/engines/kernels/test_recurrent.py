"""Kernels of recurrent layers against transformers; the same bits in chunks, beside neighbours and for any strides."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from cpu_kernels import kernels_here, num_threads, seeded
from torch import Tensor
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from tgis.engines.kernels.cpu.library import DTYPES
from tgis.engines.kernels.cpu.recurrent import RecurrentKernels, StateSpace
from tgis.engines.paged import recurrence
from tgis.errors import Unsupported

deterministic = seeded
Shapes = list[tuple[int, ...]]
TOKENS, SLOTS, LIMIT = 75, 5, (0.01, 0.9)


class Plain:
    """Transformers' functions for one sequence from its start."""

    def causal_conv(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *_: Tensor) -> Tensor:
        return causal_conv1d_fn(x.T[None], weight, bias, activation)[0].T

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Tensor, normalize: bool
    ) -> Tensor:
        q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
        inputs = (x[None] for x in (q, k, v, g, beta))
        return torch_recurrent_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=normalize)[0][0]

    def selective_scan(self, inputs: Any, *_: Tensor) -> Tensor:
        x, dt, a, b, c, d, z, bias, limit = inputs
        if z is None:
            options = {"D": d[:, 0], "dt_bias": bias[:, 0], "dt_softplus": True, "dt_limit": limit}
            return mamba2_chunk_scan(x[None], dt[None, ..., 0], a[:, 0, 0], b[None], c[None], 16, **options)[0]
        x, dt, b, c, z = (tensor.permute(1, 2, 0) for tensor in (x, dt, b, c, z))
        y = mamba_selective_scan(x, dt, a[0], b, c, d, z, delta_bias=bias, delta_softplus=True)
        return y.permute(2, 0, 1)


def decay(x: Tensor) -> Tensor:
    return -(x * x).float()


def conv(k: Any, x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor) -> Tensor:
    return k.causal_conv(x, weight, bias, "swish" if weight.shape[1] == 4 else None, *rest)


def delta_rule(normalize: bool) -> Callable[..., Tensor]:
    def run(kernels: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *rest: Tensor) -> Tensor:
        return kernels.gated_delta_rule(q, k / 8, v, decay(g), beta * beta / 4, *rest, normalize=normalize)

    return run


def mamba2(k: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, *rest: Tensor) -> Tensor:
    bias, *states = rest
    inputs = x, dt[..., None], decay(a)[:, None, None], b, c, d[:, None], None, bias[:, None], LIMIT
    return k.selective_scan(StateSpace(*inputs), *states)


def mamba(k: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, z: Tensor, *rest: Tensor) -> Tensor:
    a, d, bias, *states = rest
    x, dt, b, c, z = (tensor[:, None] for tensor in (x, dt, b, c, z))
    return k.selective_scan(StateSpace(x, dt, decay(a)[None], b, c, d, z, bias, (0.0, torch.inf)), *states)[:, 0]


OPERATORS: list[tuple[Callable[..., Tensor], Shapes, Shapes, tuple[int, ...]]] = [  # inputs of tokens, others, state
    (conv, [(200,)], [(200, 4), (200,)], (3, 200)),
    (conv, [(17,)], [(17, 8), (17,)], (7, 17)),
    (delta_rule(normalize=True), [(2, 48), (2, 48), (4, 64), (4,), (4,)], [], (4, 48, 64)),
    (delta_rule(normalize=False), [(1, 1024), (1, 1024), (3, 43), (3,), (3,)], [], (3, 1024, 43)),
    (mamba2, [(4, 64), (4,), (2, 32), (2, 32)], [(4,), (4,), (4,)], (4, 64, 32)),
    (mamba2, [(3, 5), (3,), (1, 1024), (1, 1024)], [(3,), (3,), (3,)], (3, 5, 1024)),
    (mamba, [(96,), (96,), (16,), (16,), (96,)], [(96, 16), (96,), (96,)], (1, 96, 16)),
    (mamba, [(37,), (37,), (5,), (5,), (37,)], [(37, 5), (37,), (37,)], (1, 37, 5)),
]


TOO_LARGE: list[tuple[Callable[..., Tensor], Shapes, Shapes, str]] = [
    (conv, [(2,)], [(2, 9), (2,)], "a convolution over 9 are not supported: at most 8"),
    (delta_rule(normalize=True), [(1, 1025), (1, 1025), (1, 2), (1,), (1,)], [], "keys of 1025 .*: at most 1024"),
    (mamba2, [(1, 2), (1,), (1, 1025), (1, 1025)], [(1,), (1,), (1,)], "states of 1025 .*: at most 1024"),
]


@pytest.mark.parametrize(("run", "inputs", "constants", "message"), TOO_LARGE)
def test_what_is_too_large_for_a_stack_is_refused(
    run: Callable[..., Tensor], inputs: Shapes, constants: Shapes, message: str
) -> None:
    of_tokens, others = drawn(inputs, constants, torch.float32)
    with pytest.raises(Unsupported, match=f"^recurrent layers with {message}$"):
        run(RecurrentKernels(kernels_here()[-1]), *of_tokens, *others, torch.empty(1), slots_of(TOKENS, -1, 0))


def drawn(inputs: Shapes, constants: Shapes, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    of_tokens = [torch.randn(TOKENS, *shape).to(dtype) for shape in inputs]
    return of_tokens, [torch.randn(shape).to(dtype) for shape in constants]


def new_states(run: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full((SLOTS, *shape), torch.nan, dtype=dtype if run is conv else torch.float32)


def slots_of(count: int, source: int, slot: int, *saves: tuple[int, int]) -> Tensor:
    slots = torch.tensor([[source, slot, -1]]).repeat(count, 1)
    for token, save in saves:
        slots[token, 2] = save
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("run", "inputs", "constants", "state"), OPERATORS)
def test_computes_what_transformers_does_whatever_the_batch(
    run: Callable[..., Tensor], inputs: Shapes, constants: Shapes, state: tuple[int, ...], dtype: torch.dtype
) -> None:
    of_tokens, others = drawn(inputs, constants, dtype)
    expected = run(Plain(), *(x.float() for x in (*of_tokens, *others)))
    wide = [torch.cat([x.flatten(1), x.flatten(1)], 1)[:, x[0].numel() :].view_as(x) for x in of_tokens]
    turned = [x.mT.contiguous().mT for x in of_tokens]
    states = new_states(run, state, dtype)
    plain = [run(recurrence, *(x[:50] for x in of_tokens), *others, states, slots_of(50, -1, 1, (29, 0)))]
    plain += [run(recurrence, *(x[30:] for x in of_tokens), *others, states, slots_of(TOKENS - 30, 0, 2))[20:]]
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    assert (torch.cat(plain) - expected).norm() < tolerance * expected.norm()
    rest = run(recurrence, *(x[50:] for x in of_tokens), *others, states, slots_of(TOKENS - 50, 1, 1))
    assert (rest - expected[50:]).norm() < tolerance * expected.norm()  # from the states after the first part
    of_isas: dict[str, Tensor] = {}
    for library in kernels_here():
        kernels = RecurrentKernels(library)
        states = new_states(run, state, dtype)
        whole = run(kernels, *of_tokens, *others, states, slots_of(TOKENS, -1, 0, (29, 1)))
        of_isas[library.isa] = whole
        assert (whole - expected).norm() < tolerance * expected.norm()
        for views in (wide, turned):
            assert torch.equal(run(kernels, *views, *others, states, slots_of(TOKENS, -1, 2)), whole)
            assert torch.equal(states[2], states[0])
        with num_threads(3):
            parts = []
            for first, last in pairwise((0, 1, 3, 30, 31, TOKENS)):  # beside neighbours, one after the snapshot
                batch = [torch.cat([x[:9], x[first:last], x[30:39]]) for x in of_tokens]
                slots = slots_of(9, -1, 4), slots_of(last - first, 3 if first else -1, 3), slots_of(9, 1, 2)
                y = run(kernels, *batch, *others, states, torch.cat(slots))
                parts.append(y[9:-9])
                assert torch.equal(y[-9:], whole[30:39])
            assert torch.equal(torch.cat(parts), whole)
            assert torch.equal(states[3], states[0])
    of_isas.pop("generic", None)  # it has no instruction that multiplies and adds
    assert all(torch.equal(whole, output) for output in of_isas.values())
