"""States of recurrent layers (convolutions, linear attention, state spaces), in a slot for each sequence.

The recurrent layers of all families in transformers call the same few functions of their module. In a step of the
engine, functions of ours take their place, which continue from the states of the sequences in the flat batch.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from tgis.engines.host_memory import HugePageBuffer
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.linear import PackedLinear, WeightArgument
from tgis.engines.kernels.cpu.recurrent import RecurrentKernels, StateSpace
from tgis.engines.loading.loader import has_other_state
from tgis.engines.paged import recurrence
from tgis.errors import Unsupported

_CONV = "causal_conv1d_fn"  # every module of transformers with recurrent layers has it
_CACHE_ARGUMENTS = ("past_key_values", "cache_params")
_NO_LIMIT = 0.0, math.inf
_NO_STATE = torch.empty(0)  # what models get as the state after a pass
_current: "ContextVar[RecurrentStates | None]" = ContextVar("recurrent_states", default=None)


class RecurrentStates(DynamicCache):  # type: ignore[misc]
    """The states of one engine. Also what transformers' layers get as their cache, which has no states of its own, so
    that passes of one token and of many take the same path.
    """

    def __init__(self, argument: str, kernels: CpuKernels | None) -> None:
        """`argument` is the name of the cache in the model's forward."""
        super().__init__()
        self._argument = argument
        self._operators: Any = RecurrentKernels(kernels) if kernels else recurrence
        self.slots = torch.empty(0, 3, dtype=torch.int64)
        self._states: dict[tuple[int, int, str, int], Tensor] = {}  # (layer, convolution, operator, call) -> states
        self._buffers: list[HugePageBuffer] = []
        self._attention_layer = -1
        self._layer = -1, 0  # (layer, convolution)
        self._calls = count()  # numbers the operators that a layer calls

    def __bool__(self) -> bool:  # a cache without layers is false
        return True

    def allocate(self, num_slots: int) -> None:
        """Have so many slots from now on, none of which has states."""
        for key, state in self._states.items():
            shape = num_slots, *state.shape[1:]
            self._buffers.append(HugePageBuffer(math.prod(shape) * state.itemsize))
            self._states[key] = self._buffers[-1].bytes.view(state.dtype).view(shape)

    def clear(self) -> None:
        """Forget all states to give their memory back."""
        for buffer in self._buffers:
            buffer.clear()

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all layers seen, for one sequence."""
        return sum(math.prod(state.shape[1:]) * state.itemsize for state in self._states.values())

    @contextmanager
    def using(self, slots: Tensor, arguments: dict[str, Any]) -> Iterator[None]:
        """Let a pass of the model read and write the states in these slots; its `arguments` get this cache."""
        self.slots = slots
        arguments[self._argument] = self
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def saved(self, slots: Tensor) -> Callable[[], None]:
        """A function that restores the states that a pass with these slots changes."""
        changed = slots[:, 1:].unique()
        changed = changed[changed >= 0]
        states = {key: state[changed] for key, state in self._states.items()}

        def restore() -> None:
            for key, state in states.items():
                self._states[key][changed] = state

        return restore

    # The interface of transformers' caches.

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(self, x: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Note the layer whose convolution comes next: the functions get no index."""
        self._layer, self._calls = (layer_idx, state_idx), count()
        return x

    def update_recurrent_state(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
        return state

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Note the layer of an attention, whose KV cache is elsewhere: layers may share a module."""
        self._attention_layer = layer_idx
        return key, value

    def attention_layer_of(self, module: Any) -> int:
        """The layer whose attention this module computes now."""
        return int(module.layer_idx) if _current.get() is None else self._attention_layer

    # The replacements of transformers' functions.

    def causal_conv1d_fn(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ) -> Tensor:
        """[1, C, T]"""
        tails = self._of_layer("conv", x, (weight.shape[1] - 1, len(weight)), x.dtype)
        return self._operators.causal_conv(x[0].T, weight, bias, activation, tails, self.slots).T[None]

    def torch_chunk_gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """[1, T, HV, DV]"""
        states = self._of_layer("scan", v, (v.shape[2], k.shape[3], v.shape[3]))
        inputs = q[0], k[0], v[0], g[0], beta[0]
        normalize = options.get("use_qk_l2norm_in_kernel", False)
        y = self._operators.gated_delta_rule(*inputs, states, self.slots, normalize=normalize)
        return y[None], _NO_STATE

    def mamba2_chunk_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """[1, T, H, P]"""
        d, bias = (None if tensor is None else tensor[:, None] for tensor in map(options.get, ("D", "dt_bias")))
        limit = options.get("dt_limit", _NO_LIMIT)
        inputs = StateSpace(x[0], dt[0, ..., None], a[:, None, None], b[0], c[0], d, None, bias, limit)
        return self._selective_scan(inputs)[None], _NO_STATE

    def mamba_selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """[1, I, T]: Mamba 2 with one head."""
        d, z, bias = map(options.get, ("D", "z", "delta_bias"))
        x, dt, b, c, z = (None if tensor is None else tensor.permute(2, 0, 1) for tensor in (x, dt, b, c, z))
        return self._selective_scan(StateSpace(x, dt, a[None], b, c, d, z, bias, _NO_LIMIT)).permute(1, 2, 0), _NO_STATE

    def _selective_scan(self, inputs: StateSpace) -> Tensor:
        states = self._of_layer("scan", inputs.x, (*inputs.x.shape[1:], inputs.b.shape[2]))
        y: Tensor = self._operators.selective_scan(inputs, states, self.slots)
        return y

    def _of_layer(self, kind: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """The states of this call in the layer, [slots, *shape]; one slot until `allocate`."""
        key = *self._layer, kind, next(self._calls)
        if key not in self._states:
            self._states[key] = like.new_empty(1, *shape, dtype=dtype)
        if self._states[key].shape[1:] != shape:  # the kernels write as many numbers as the shape says
            raise Unsupported("a recurrent layer has several states of one kind")
        return self._states[key]


def install_states(model: PreTrainedModel, kernels: CpuKernels | None = None) -> RecurrentStates | None:
    """Let states of ours replace those of a model's recurrent layers; None if it has none. Unsupported for others that
    keep more than a KV cache.
    """
    modules = [x for x in model.modules() if hasattr(x, "conv_kernel_size") and _CONV in _globals(x)]
    if not modules:
        if has_other_state(model):
            raise Unsupported(f"{type(model).__name__} keeps more than a KV cache, which is unknown here")
        return None
    for module in modules:
        functions = _globals(module)
        for name in _FUNCTIONS & functions.keys():
            functions[name] = _replaceable(functions[name], name)
        if isinstance(projection := getattr(module, "dt_proj", None), PackedLinear):
            projection.weight = WeightArgument(projection.gemm)
    argument = next(name for name in signature(model.forward).parameters if name in _CACHE_ARGUMENTS)
    return RecurrentStates(argument, kernels if model.dtype in DTYPES else None)


def unloaded_slot_bytes(model: PreTrainedModel) -> int:
    """The bytes of a sequence's states for a model on the meta device; 0 without recurrent layers. Unsupported as in
    `install_states`.
    """
    if not (states := install_states(model)):
        return 0
    arguments: dict[str, Any] = {"input_ids": torch.ones(1, 2, dtype=torch.int64, device="meta")}
    with states.using(torch.tensor([[-1, 0, -1]] * 2), arguments), torch.device("meta"), torch.inference_mode():
        model(use_cache=False, **arguments)
    return states.bytes_per_slot


def _globals(module: nn.Module) -> dict[str, Any]:
    """The names that the forward of a module uses."""
    names: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return names


def _replaceable(function: Any, name: str) -> Any:
    if hasattr(function, "replaced_in_steps"):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        states = _current.get()
        return function(*args, **kwargs) if states is None else getattr(states, name)(*args, **kwargs)

    call.replaced_in_steps = True  # type: ignore[attr-defined]
    return call


_FUNCTIONS = {_CONV, "torch_chunk_gated_delta_rule", "mamba2_chunk_scan", "mamba_selective_scan"}
