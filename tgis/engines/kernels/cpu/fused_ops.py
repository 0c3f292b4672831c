"""Norms, rotary embeddings, activations and soft caps of transformers' models, each in one pass by elementwise.c.

Models write these in many ways. A module or function is replaced only if it computes what the kernel does (probes.py).
"""

import logging
from collections.abc import Callable, Collection, Iterator

from torch import nn
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.activations import as_activation, as_gated_mlp
from tgis.engines.kernels.cpu.library import DTYPES, CpuKernels
from tgis.engines.kernels.cpu.norms import as_norm
from tgis.engines.kernels.cpu.rotary import fuse_rotary
from tgis.engines.kernels.cpu.softcap import fuse_softcap

log = logging.getLogger(__name__)


def fuse(model: PreTrainedModel, kernels: CpuKernels | None, kinds: Collection[type] | None = None) -> int:
    """Replace norms, activations, rotary embeddings and soft caps of logits in a CPU model; how many were replaced.
    `kinds`: the classes of the modules that a pass calls; others, such as those of images, are left as they are.
    """
    if kernels is None or model.dtype not in DTYPES:
        return 0
    count = 0
    for replace in (as_gated_mlp, as_norm, as_activation):  # whole MLPs first: they contain the others
        replaced = list(_replacements(model, kernels, replace, kinds))
        for parent, name, module in replaced:
            setattr(parent, name, module)
        count += len(replaced)
    count += sum([fuse_rotary(module, kernels) for module in model.modules()])
    return count + fuse_softcap(model, kernels)


def _replacements(
    model: PreTrainedModel,
    kernels: CpuKernels,
    replace: Callable[[nn.Module, CpuKernels], nn.Module | None],
    kinds: Collection[type] | None,
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            try:
                module = replace(child, kernels) if kinds is None or type(child) in kinds else None
            except Exception as error:  # noqa: BLE001 - the code is the model's
                log.debug("%s.%s, %s, is not fused: %r", path, name, type(child).__name__, error)
                continue
            if module:
                yield parent, name, module
