"""Norms, rotary embeddings, activations and soft caps of transformers' models, each in one pass by elementwise.c.

Models write these in many ways. A module or function is replaced only if it computes what the kernel does (probes.py).
"""

from collections.abc import Callable, Collection

from torch import nn
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.activations import as_activation, as_gated_mlp
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.norms import as_norm
from tgis.engines.kernels.cpu.probes import output_of
from tgis.engines.kernels.cpu.rotary import fuse_rotary
from tgis.engines.kernels.cpu.softcap import fuse_softcap

_Replace = Callable[[nn.Module, CpuKernels], nn.Module | None]
_REPLACEMENTS: tuple[_Replace, ...] = as_gated_mlp, as_norm, as_activation  # whole MLPs first: they contain the others


def fuse(model: PreTrainedModel, kernels: CpuKernels | None, called_classes: Collection[type] | None = None) -> int:
    """Replace norms, activations, rotary embeddings and soft caps of logits in a CPU model; how many were replaced.
    Only modules of `called_classes`, those that a pass calls, are tried: others, such as those of images, stay.
    """
    if kernels is None or model.dtype not in DTYPES:
        return 0
    count = 0
    for replace in _REPLACEMENTS:
        for path, parent in [*model.named_modules()]:
            for name, child in [*parent.named_children()]:
                if called_classes is not None and type(child) not in called_classes:
                    continue
                if module := output_of(replace, child, kernels, name=f"{path}.{name}, {type(child).__name__},"):
                    setattr(parent, name, module)
                    count += 1
    count += sum([fuse_rotary(module, kernels) for module in model.modules()])
    return count + fuse_softcap(model, kernels)
