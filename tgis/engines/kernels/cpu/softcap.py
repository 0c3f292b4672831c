"""Soft caps of logits (Gemma) as kernels: passes with an operator of PyTorch cannot be recorded for prompts."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tgis.engines.kernels.cpu.activations import Activation
from tgis.engines.kernels.cpu.library import CpuKernels
from tgis.engines.kernels.cpu.probes import inputs_of_all_sizes, output_of, rows_close

_SOFTCAP = "final_logit_softcapping"  # name in configurations


def fuse_softcap(model: PreTrainedModel, kernels: CpuKernels) -> int:
    """Let a hook cap logits in place of the model's own code; how many modules were changed."""
    config = model.config.get_text_config(decoder=True)
    cap = getattr(config, _SOFTCAP, None)
    if not cap or not _computes_logits(model, lambda x: cap * torch.tanh(x / cap)):
        return 0
    setattr(config, _SOFTCAP, None)
    if not _computes_logits(model, lambda x: x):
        setattr(config, _SOFTCAP, cap)
        return 0
    model.get_output_embeddings().register_forward_hook(SoftCap(cap, kernels))
    return 1


class SoftCap(Activation):
    """cap * tanh(x / cap), as a hook of the layer that gives x."""

    def __init__(self, cap: float, kernels: CpuKernels) -> None:
        super().__init__(nn.Tanh(), "tanh", kernels)
        self._cap = cap

    def __call__(self, _layer: nn.Module, _inputs: object, x: Tensor) -> Tensor:
        return self.forward(x / self._cap) * self._cap


class _ModelOutput:
    """The output of a model without its head, as far as logits depend on it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _: str) -> None: ...


def _computes_logits(model: PreTrainedModel, formula: Callable[[Tensor], Tensor]) -> bool:
    """Whether the model makes logits from the output of its last layer by this formula."""
    x = inputs_of_all_sizes()[None]
    probe, body = copy.copy(model), copy.copy(model.base_model)
    body.forward = lambda **_: _ModelOutput(x)
    probe._modules = model._modules | {model.base_model_prefix: body, "lm_head": lambda hidden: hidden}
    return rows_close(formula(x), output_of(lambda: probe().logits))
