"""One ONNX graph in onnxruntime: its inputs and outputs, and runs with bound tensors instead of copies.

The only file that imports onnxruntime; it knows nothing of batches or of what tensors mean.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tgis.errors import OutOfMemory, StartError

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_DTYPES = {  # onnxruntime's name: torch's dtype, and the number in ONNX
    "tensor(float)": (torch.float32, 1),
    "tensor(int32)": (torch.int32, 6),
    "tensor(int64)": (torch.int64, 7),
    "tensor(bool)": (torch.bool, 9),
    "tensor(float16)": (torch.float16, 10),
    "tensor(bfloat16)": (torch.bfloat16, 16),
}
_LOG_ERRORS_ONLY = 3
_OUT_OF_MEMORY_MESSAGES = ("Failed to allocate memory", "bad_alloc", "out of memory")


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or an output of a graph."""

    dtype: torch.dtype
    onnx_type: int  # the dtype's number in ONNX
    shape: tuple[int | None, ...]  # None: any

    def dim(self, axis: int) -> int:
        """Size of a fixed axis, which `Session.check_signature` has verified."""
        size = self.shape[axis]
        assert size is not None
        return size


class Session:
    """A graph, ready to run on a device."""

    def __init__(self, file: Path, device: torch.device, threads: int) -> None:
        self.file = file
        self._device = device
        self._session = _create_session(file, device, threads)
        self.inputs = {node.name: self._node_arg(node) for node in self._session.get_inputs()}
        self.outputs = {node.name: self._node_arg(node) for node in self._session.get_outputs()}

    def check_signature(self, inputs: Collection[str], outputs: Mapping[str, int]) -> None:
        """StartError unless all inputs are in `inputs` and the `outputs` have the given numbers of axes, the last one
        fixed.
        """
        if unknown := [name for name in self.inputs if name not in inputs]:
            raise StartError(f"{self.file} wants an input {unknown[0]!r:.80}, which this engine does not have")
        for name, axes in outputs.items():
            if name not in self.outputs:
                raise StartError(f"{self.file} has no output {name}")
            shape = self.outputs[name].shape
            if len(shape) != axes or shape[-1] is None:
                raise StartError(f"{self.file}: {name} has the shape {shape}, not {axes} axes, the last one fixed")

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        """Run on contiguous tensors of the device: uses the `inputs` that the graph takes, fills `outputs`."""
        tensors = {name: inputs[name].to(node.dtype) for name, node in self.inputs.items()}  # kept alive while bound
        binding, index = self._session.io_binding(), self._device.index or 0
        for bind, nodes, bound in (
            (binding.bind_input, self.inputs, tensors),
            (binding.bind_output, self.outputs, outputs),
        ):
            for name, tensor in bound.items():
                assert tensor.is_contiguous()
                bind(name, self._device.type, index, nodes[name].onnx_type, tuple(tensor.shape), tensor.data_ptr())
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # onnxruntime uses a separate stream
        self._run(binding)

    def _run(self, binding: Any) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # those of onnxruntime have no common base class
            if any(sign in str(error) for sign in _OUT_OF_MEMORY_MESSAGES):
                raise OutOfMemory("the device is out of memory in a pass of onnxruntime") from error
            raise

    def _node_arg(self, node: Any) -> NodeArg:
        if node.type not in _DTYPES:
            raise StartError(f"{self.file}: {node.name} is a {node.type}, which is not supported")
        dtype, number = _DTYPES[node.type]
        return NodeArg(dtype, number, tuple(size if isinstance(size, int) else None for size in node.shape))


def _create_session(file: Path, device: torch.device, threads: int) -> Any:
    try:
        import onnxruntime as runtime  # noqa: PLC0415 - an optional dependency
    except ModuleNotFoundError as error:
        raise StartError("the engine hf_optimum_ort needs onnxruntime: pip install '.[onnx]' in a checkout") from error
    options = runtime.SessionOptions()
    options.log_severity_level = _LOG_ERRORS_ONLY
    options.intra_op_num_threads = threads
    # Between runs the cores belong to the sampler.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    provider = _PROVIDERS[device.type]
    if provider not in runtime.get_available_providers():
        raise StartError("the onnxruntime installed has no CUDA: install onnxruntime-gpu, or set CUDA_VISIBLE_DEVICES=")
    selected = (provider, {"device_id": str(device.index or 0)}) if device.type == "cuda" else provider
    try:
        return runtime.InferenceSession(file, options, providers=[selected])
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise StartError(f"onnxruntime cannot load {file}: {reason:.300}") from error
