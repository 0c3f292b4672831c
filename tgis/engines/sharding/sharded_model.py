"""Tensor parallelism: each rank loads its part of a model's weights, and layers all-reduce or gather their outputs.

Transformers reads the parts of plain layers from the files. Its wrappers are undone: the ranks have plain layers with
fewer outputs or inputs, as optimizations expect them, and communicate in hooks.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, pad
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard
from transformers.pytorch_utils import Conv1D

from tgis.engines.kernels.cpu.collectives import CpuCollectives
from tgis.engines.quantization.checkpoint import QuantizedLayer
from tgis.engines.sharding.collectives import TorchCollectives
from tgis.engines.sharding.plans import (
    BY_GROUPS,
    BY_HEADS,
    IN_BLOCKS,
    KEYS_AND_VALUES,
    Plan,
    check_groups,
    has_own_counts,
    num_kv_heads,
    plan_of,
)
from tgis.errors import StartError

# Some outputs of all inputs, which are gathered first.
_GATHERED_INPUT = "colwise_of_gathered_input"
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep", _GATHERED_INPUT})
_SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_ROWWISE = frozenset({"rowwise", *_SPLIT_INPUT})
_REDUCED = frozenset({"moe_tp_experts", "all_reduce", *_ROWWISE})
# The vocabulary and other gathered outputs: each rank has the same number of rows, some of them padding.
_VOCAB = frozenset({"embedding_rowwise", *_GATHERED})
_PARAM_STYLES = frozenset({"packed_colwise", "packed_rowwise", "embedding_rowwise"})
_REPLICATED = frozenset({"replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj"})
_STYLES = frozenset({"colwise", BY_GROUPS, BY_HEADS, IN_BLOCKS, *_GATHERED, *_REDUCED, *_PARAM_STYLES, *_REPLICATED})
_QKV = frozenset({"q", "q_proj", "query_key_value", "c_attn", "Wqkv"})
# Attributes of attention modules that are proportional to the number of heads.
_HEAD_COUNTS = ("num_heads", "n_heads", "embed_dim", "split_size")
# Attention modules with these layers take biases as arguments, which are made for the heads of all ranks.
_QKV_WITH_BIASES = frozenset({"query_key_value", "Wqkv"})
_BIASES = ("alibi", "position_bias", "attention_mask")


class Sharding:
    """How a model is shared among the ranks."""

    def __init__(
        self, model: PreTrainedModel, collectives: TorchCollectives | CpuCollectives, *, is_quantized: bool = False
    ) -> None:
        """`model` is on the meta device. StartError if its plan has unknown styles."""
        self.collectives = collectives
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._plan: Plan = plan_of(model)
        self._divides_counts = has_own_counts(model)
        self._is_quantized = is_quantized
        self._heads: int = model.config.get_text_config(decoder=True).num_attention_heads
        self._kv_heads = num_kv_heads(model.config)
        # Inputs and outputs of layers on all ranks together.
        self.whole_shapes = {
            name: _shape(module) for name, module, _ in self._layers(model) if isinstance(module, (nn.Linear, Conv1D))
        }
        if unknown := sorted({*self._plan.values()} - _STYLES):
            raise StartError(f"NUM_SHARD={self._count}: layers of {type(model).__name__} that are {unknown[0]}")
        self._hooks: list[Any] = []
        self._sharded_here = {name for name, _, style in self._layers(model) if self._shards_here(model, name, style)}

    @property
    def loading(self) -> DistributedConfig:
        """The plan for transformers. Layers that are sharded here are loaded in full, as with style all_reduce."""
        plain = {name: "colwise" if style == BY_GROUPS else style for name, style in self._plan.items()}
        full = dict.fromkeys(map(replace_layer_number_by_wildcard, self._sharded_here), "all_reduce")
        return DistributedConfig(tp_size=self._count, tp_plan=plain | full)

    def shard(self, model: PreTrainedModel) -> None:
        """Reduce layers to this rank's part."""
        _undo_transformers(model)
        self._keep_groups(model)
        # Layers may share a weight.
        parts: dict[nn.Parameter, nn.Parameter] = {}
        for name, module, style in [*self._layers(model)]:
            if name in self._sharded_here:
                self._shard_layer(module, name, style, parts)
            self._update_sizes(module, style)
            if style in _VOCAB:
                _pad_rows(module, -(-_size(module) // self._count))
            if style == "embedding_rowwise":
                self._mask_other_rows(module)
            if style in _REDUCED and self._rank:
                self._zero_bias(module)
        for parent in _attention_modules(self._plan, model):
            self._divide_counts(parent)

    def install_collectives(self, model: PreTrainedModel) -> None:
        """Install the hooks in which layers communicate; again after layers have been replaced by faster ones."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for _, module, style in self._layers(model):
            if style in _SPLIT_INPUT:
                self._hooks.append(module.register_forward_pre_hook(self._split_input))
            if style == _GATHERED_INPUT:
                self._hooks.append(module.register_forward_pre_hook(self._all_gather_input))
            if style in _REDUCED:
                self._hooks.append(module.register_forward_hook(self._all_reduce))
            if style in _GATHERED:
                self._hooks.append(module.register_forward_hook(self._all_gather))

    def own_factors(self, name: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of an adapter's factors for a layer: [any, inputs], [any, outputs]."""
        style = self._plan.get(replace_layer_number_by_wildcard(name))
        if style in _ROWWISE:
            return down[:, self._local_indices(name, style, down.shape[1])], up
        if style in ("colwise", BY_GROUPS, IN_BLOCKS, *_GATHERED):
            return down, up[:, self._local_indices(name, style, up.shape[1])]
        return down, up

    def _layers(self, model: nn.Module) -> Iterator[tuple[str, Any, str]]:
        for name, module in model.named_modules():
            style = self._plan.get(replace_layer_number_by_wildcard(name))
            if style is not None:
                yield name, module, style

    def _shards_here(self, model: nn.Module, name: str, style: str) -> bool:
        by_kv_heads = style == BY_GROUPS or _is_key_or_value(name, style)
        module = model.get_submodule(name)
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D) if self._is_quantized else Conv1D):
            return style not in _REPLICATED
        is_ragged = style in _VOCAB and _size(module) % self._count > 0  # refused by transformers 5.17
        return is_ragged or style in (IN_BLOCKS, BY_HEADS) or (by_kv_heads and self._kv_heads % self._count > 0)

    def _keep_groups(self, model: PreTrainedModel) -> None:
        """Shard quantized layers with act-order, whose groups have inputs of several ranks, by outputs."""
        quantized = [name for name, module in model.named_modules() if hasattr(module, "quantized")]
        for pattern, name in _one_of_each_kind(quantized, self._plan).items():
            module: Any = model.get_submodule(name)
            if module.quantized.checked().order is not None:
                splits = self._plan[pattern] in _SPLIT_INPUT
                self._plan[pattern] = "colwise_gather_output" if splits else _GATHERED_INPUT

    def _shard_layer(self, module: Any, name: str, style: str, parts: dict[nn.Parameter, nn.Parameter]) -> None:
        is_input = style in _ROWWISE or style == BY_HEADS
        weight, dim = module.weight, int(is_input != isinstance(module, Conv1D))
        indices = self._local_indices(name, style, weight.shape[dim]).to(weight.device)
        if weight not in parts:  # a placeholder takes no memory
            part = weight.index_select(dim, indices) if any(weight.stride()) else weight.narrow(dim, 0, len(indices))
            parts[weight] = nn.Parameter(part, requires_grad=False)
        module.weight = parts[weight]
        if hasattr(module, "quantized"):
            module.quantized = module.quantized.part(indices, dim)
        if not is_input and getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(module.bias[indices], requires_grad=False)

    def _local_indices(self, name: str, style: str, size: int) -> Tensor:
        """The indices of this rank's outputs, or inputs, of a layer."""
        indices, rank, count = torch.arange(size), self._rank, self._count
        if style in _VOCAB:  # the padding repeats the last one
            return (indices[: -(-size // count)] + rank * -(-size // count)).clamp(max=size - 1)
        if style == IN_BLOCKS:
            return indices.view(3, count, -1)[:, rank].flatten()
        if style != BY_GROUPS and not _is_key_or_value(name, style):
            return indices.split(-(-size // count))[rank]
        if self._kv_heads % count == 0:
            return indices.view(count, -1)[rank]
        sharing = count // self._kv_heads  # ranks with the same key-value head
        head = indices.view(self._kv_heads, -1)[rank // sharing]
        if style != BY_GROUPS:
            return head
        group = head.view(self._heads // self._kv_heads + 2, -1)
        return torch.cat([group[:-2].view(sharing, -1)[rank % sharing], group[-2:].flatten()])

    def _update_sizes(self, module: Any, style: str) -> None:
        """Set the sizes of a layer. A gathered layer keeps the number of outputs of all ranks."""
        if isinstance(module, Conv1D):
            module.nx, module.nf = module.weight.shape
        elif isinstance(module, nn.Linear) and style not in _GATHERED:
            module.out_features, module.in_features = module.weight.shape
        elif style == BY_HEADS:
            module.embedding_dim = module.weight.shape[1]

    def _mask_other_rows(self, module: Any) -> None:
        """Have an embedding return zeros for ids of other ranks."""
        kind, size = type(module), len(module.weight)
        rows = torch.arange(module.num_embeddings)[:, None] - self._rank * size
        is_local = (rows >= 0) & (rows < size)
        module.register_buffer("local_rows", rows * is_local, persistent=False)
        # A parameter, to be converted like the weight.
        module.is_local = nn.Parameter(is_local.to(module.weight.dtype), requires_grad=False)
        module.padding_idx = None  # it may be beyond the local rows
        module.sharding = self
        module.__class__ = type(kind.__name__, (kind,), {"forward": _embed_local})

    def _zero_bias(self, module: nn.Module) -> None:
        """Set biases to 0, since only the first rank adds them."""
        for name, parameter in module.named_parameters():
            if name in ("bias", "down_proj_bias"):
                parameter.data = torch.zeros_like(parameter)

    def _divide_counts(self, module: Any) -> None:
        kv_heads = max(self._kv_heads // self._count, 1)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = self._heads // self._count // kv_heads
        if not self._divides_counts:
            return
        for name in _HEAD_COUNTS:
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // self._count)
        if hasattr(module, "num_kv_heads"):
            module.num_kv_heads = kv_heads
        module.slow_but_exact = False  # this option of BLOOM slices weights
        if any(hasattr(module, name) for name in _QKV_WITH_BIASES):
            module.register_forward_pre_hook(self._slice_biases, with_kwargs=True)

    def _slice_biases(self, _: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        biases = {name: arguments[name] for name in _BIASES if arguments.get(name) is not None}
        return args, arguments | {name: self._slice_bias(bias) for name, bias in biases.items()}

    def _slice_bias(self, bias: Tensor) -> Tensor:
        """This rank's heads of [rows * heads, ...] or [rows, heads, ...]; a bias with other sizes is unchanged."""
        dim = bias.dim() - 3
        if dim < 0 or bias.shape[dim] % self._heads:
            return bias
        by_rank = bias.unflatten(dim, (-1, self._count, self._heads // self._count))
        return by_rank.select(dim + 1, self._rank).flatten(dim, dim + 1)

    def _split_input(self, module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        first = self._rank * -(-args[0].shape[-1] // self._count)
        return (args[0][..., first : first + module.in_features],)

    def _all_gather_input(self, module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        x, longest = args[0], -(-module.in_features // self._count)
        return (self.collectives.all_gather(pad(x, (0, longest - x.shape[-1])))[..., : module.in_features],)

    def _all_reduce(self, _module: Any, _args: Any, output: Tensor) -> Tensor:
        return self.collectives.all_reduce(output.contiguous())

    def _all_gather(self, module: Any, _: Any, output: Tensor) -> Tensor:
        return self.collectives.all_gather(output)[..., : module.out_features]


def check_quantized(model: PreTrainedModel, layers: Iterable[QuantizedLayer], num_shards: int) -> None:
    """StartError if these layers of a model, which may be on the meta device, cannot be sharded."""
    by_name = {layer.name: layer for layer in layers}
    quantized = [name for name, _ in model.named_modules() if name in by_name]
    names = _one_of_each_kind(quantized, plan_of(model)).values()
    check_groups({name: by_name[name].checked() for name in names}, model.config, num_shards)


def _one_of_each_kind(names: Iterable[str], plan: Plan) -> dict[str, str]:
    """The last name for each pattern of the plan whose layers are sharded by inputs."""
    patterns = {replace_layer_number_by_wildcard(name): name for name in names}
    return {pattern: name for pattern, name in patterns.items() if plan.get(pattern) in _ROWWISE}


def _undo_transformers(model: nn.Module) -> None:
    plain: dict[nn.Parameter, nn.Parameter] = {}  # layers may share a parameter
    for module in model.modules():
        vars(module).pop("forward", None)
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if isinstance(parameter, DTensor):
                local = nn.Parameter(parameter.detach().to_local(), requires_grad=False)
                setattr(module, name, plain.setdefault(parameter, local))


def _attention_modules(plan: Plan, model: nn.Module) -> list[nn.Module]:
    styles = ("colwise", BY_GROUPS, IN_BLOCKS)
    names = [name for name, style in plan.items() if name.rpartition(".")[2] in _QKV and style in styles]
    parents = {name.rpartition(".")[0] for name in names}
    return [module for name, module in model.named_modules() if replace_layer_number_by_wildcard(name) in parents]


def _is_key_or_value(name: str, style: str) -> bool:
    return style == "colwise" and name.rpartition(".")[2] in KEYS_AND_VALUES


def _shape(module: Any) -> tuple[int, int]:
    return (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)


def _size(module: Any) -> int:
    """The number of outputs of all ranks together."""
    return int(module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features)


def _pad_rows(module: nn.Module, rows: int) -> None:
    """Pad the parameters with zeros to this number of rows."""
    for parameter in module.parameters(recurse=False):
        if len(parameter) < rows:
            parameter.data = pad(parameter.data, (0, 0) * (parameter.dim() - 1) + (0, rows - len(parameter)))


def _embed_local(module: Any, ids: Tensor) -> Tensor:
    """The embeddings of ids, summed over ranks. Tables mask ids of other ranks, because look-ups can be recorded."""
    kind: Any = type(module).__base__
    local = kind.forward(module, embedding(ids, module.local_rows)[..., 0]) * embedding(ids, module.is_local)
    embedded: Tensor = module.sharding.collectives.all_reduce(local)
    return embedded
