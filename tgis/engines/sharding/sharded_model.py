"""Tensor parallelism: each rank loads its part of a model's weights, and adds up or gathers what layers give.

Transformers reads the parts of plain layers from the files. What it makes of them is undone: the ranks have plain
layers with fewer outputs or inputs, as optimizations expect them, and communicate in hooks.
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

_GATHERED_INPUT = "colwise_of_gathered_input"  # all inputs of some outputs
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep", _GATHERED_INPUT})
_SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_ROWWISE = frozenset({"rowwise", *_SPLIT_INPUT})
_ADDED = frozenset({"moe_tp_experts", "all_reduce", *_ROWWISE})
_ROWS = frozenset({"embedding_rowwise", *_GATHERED})  # as many on each rank
_PARTS = frozenset({"packed_colwise", "packed_rowwise", "embedding_rowwise"})  # of parameters
_WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce", "local_params", "mla_kv_a_proj"})
_WORDS = frozenset({"colwise", BY_GROUPS, BY_HEADS, IN_BLOCKS, *_GATHERED, *_ADDED, *_PARTS, *_WHOLE})
_QKV = frozenset({"q", "q_proj", "query_key_value", "c_attn", "Wqkv"})  # names of layers of attention modules
_COUNTS = ("num_heads", "n_heads", "embed_dim", "split_size")  # attributes of these modules, in proportion to heads
_BIASED = frozenset({"query_key_value", "Wqkv"})  # those of modules that take biases
_BIASES = ("alibi", "position_bias", "attention_mask")  # arguments, made for the heads of all ranks


class Sharding:
    """How a model is shared among the ranks."""

    def __init__(
        self, model: PreTrainedModel, collectives: TorchCollectives | CpuCollectives, *, is_quantized: bool = False
    ) -> None:
        """From a model on the meta device, whose files may be quantized. StartError if its plan has words that are not
        known here.
        """
        self.collectives = collectives
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._plan: Plan = plan_of(model)
        self._counts = has_own_counts(model)
        self._is_quantized = is_quantized
        self._heads: int = model.config.get_text_config(decoder=True).num_attention_heads
        self._kv_heads = num_kv_heads(model.config)
        self._shapes = {
            name: _shape(module) for name, module, _ in self._layers(model) if isinstance(module, (nn.Linear, Conv1D))
        }
        if unknown := sorted({*self._plan.values()} - _WORDS):
            raise StartError(f"NUM_SHARD={self._count}: layers of {type(model).__name__} that are {unknown[0]}")
        self._hooks: list[Any] = []
        self._cut = {name for name, _, word in self._layers(model) if self._is_cut_here(model, name, word)}

    @property
    def loading(self) -> DistributedConfig:
        """What transformers is told. What it has no word for is loaded as a whole, as layers with `all_reduce` are."""
        plain = {name: "colwise" if word == BY_GROUPS else word for name, word in self._plan.items()}
        whole = dict.fromkeys(map(replace_layer_number_by_wildcard, self._cut), "all_reduce")
        return DistributedConfig(tp_size=self._count, tp_plan=plain | whole)

    def cut(self, model: PreTrainedModel) -> None:
        """Leave plain layers with this rank's part."""
        _undo_transformers(model)
        self._keep_groups(model)
        parts: dict[nn.Parameter, nn.Parameter] = {}  # some weights are those of several layers
        for name, module, word in [*self._layers(model)]:
            if name in self._cut:
                self._cut_layer(module, name, word, parts)
            self._adapt(module, word)
            if word in _ROWS:
                _lengthen(module, -(-_size(module) // self._count))
            if word == "embedding_rowwise":
                self._mask_foreign(module)
            if word in _ADDED and self._rank:
                self._forget_bias(module)
        for parent in _attention_modules(self._plan, model):
            self._adapt_counts(parent)

    def connect(self, model: PreTrainedModel) -> None:
        """Let layers communicate: anew, after they have been replaced by faster ones."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for _, module, word in self._layers(model):
            if word in _SPLIT_INPUT:
                self._hooks.append(module.register_forward_pre_hook(self._split_input))
            if word == _GATHERED_INPUT:
                self._hooks.append(module.register_forward_pre_hook(self._gather_input))
            if word in _ADDED:
                self._hooks.append(module.register_forward_hook(self._add_up))
            if word in _GATHERED:
                self._hooks.append(module.register_forward_hook(self._gather))

    def whole_shape(self, name: str) -> tuple[int, int] | None:
        """Inputs and outputs that a layer has on all ranks together; None if each rank has all of it."""
        return self._shapes.get(name)

    def own_factors(self, name: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of what changes a layer: [any, inputs], [any, outputs]."""
        word = self._plan.get(replace_layer_number_by_wildcard(name))
        if word in _ROWWISE:
            return down[:, self._own_outputs(name, word, down.shape[1])], up
        if word in ("colwise", BY_GROUPS, IN_BLOCKS, *_GATHERED):
            return down, up[:, self._own_outputs(name, word, up.shape[1])]
        return down, up

    def _layers(self, model: nn.Module) -> Iterator[tuple[str, Any, str]]:
        for name, module in model.named_modules():
            word = self._plan.get(replace_layer_number_by_wildcard(name))
            if word is not None:
                yield name, module, word

    def _is_cut_here(self, model: nn.Module, name: str, word: str) -> bool:
        by_kv_heads = word == BY_GROUPS or _is_key_or_value(name, word)
        module = model.get_submodule(name)
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D) if self._is_quantized else Conv1D):
            return word not in _WHOLE
        is_ragged = word in _ROWS and _size(module) % self._count > 0  # which transformers 5.17 refuses
        return is_ragged or word in (IN_BLOCKS, BY_HEADS) or (by_kv_heads and self._kv_heads % self._count > 0)

    def _keep_groups(self, model: PreTrainedModel) -> None:
        """Share the outputs of quantized layers in which groups have inputs of several ranks (act-order). StartError if
        other groups would be cut.
        """
        quantized = [name for name, module in model.named_modules() if hasattr(module, "quantized")]
        weights = dict[str, Any]()
        for pattern, name in _one_of_each_kind(quantized, self._plan).items():
            module: Any = model.get_submodule(name)
            module.quantized = module.quantized.in_memory()
            weights[name] = module.quantized.read()
            if weights[name].order is not None:
                splits = self._plan[pattern] in _SPLIT_INPUT
                self._plan[pattern] = "colwise_gather_output" if splits else _GATHERED_INPUT
        check_groups(weights, model.config, self._count)

    def _cut_layer(self, module: Any, name: str, word: str, parts: dict[nn.Parameter, nn.Parameter]) -> None:
        is_input = word in _ROWWISE or word == BY_HEADS
        weight, dim = module.weight, int(is_input != isinstance(module, Conv1D))
        own = self._own_outputs(name, word, weight.shape[dim]).to(weight.device)
        if weight not in parts:  # a placeholder takes no memory
            part = weight.index_select(dim, own) if any(weight.stride()) else weight.narrow(dim, 0, len(own))
            parts[weight] = nn.Parameter(part, requires_grad=False)
        module.weight = parts[weight]
        if hasattr(module, "quantized"):
            module.quantized = module.quantized.part(own, dim)
        if not is_input and getattr(module, "bias", None) is not None:
            module.bias = nn.Parameter(module.bias[own], requires_grad=False)

    def _own_outputs(self, name: str, word: str, size: int) -> Tensor:
        """The indices of this rank's outputs, or inputs, of a layer."""
        every, rank, count = torch.arange(size), self._rank, self._count
        if word in _ROWS:  # what is gathered beyond the last is left out
            return (every[: -(-size // count)] + rank * -(-size // count)).clamp(max=size - 1)
        if word == IN_BLOCKS:
            return every.view(3, count, -1)[:, rank].flatten()
        if word != BY_GROUPS and not _is_key_or_value(name, word):
            return every.split(-(-size // count))[rank]
        if self._kv_heads % count == 0:
            return every.view(count, -1)[rank]
        sharing = count // self._kv_heads  # the ranks that have the same key and value
        head = every.view(self._kv_heads, -1)[rank // sharing]
        if word != BY_GROUPS:
            return head
        group = head.view(self._heads // self._kv_heads + 2, -1)
        return torch.cat([group[:-2].view(sharing, -1)[rank % sharing], group[-2:].flatten()])

    def _adapt(self, module: Any, word: str) -> None:
        """Let a layer know its sizes, but that of the vocabulary, of which no rank knows but a part."""
        if isinstance(module, Conv1D):
            module.nx, module.nf = module.weight.shape
        elif isinstance(module, nn.Linear) and word not in _GATHERED:
            module.out_features, module.in_features = module.weight.shape
        elif word == BY_HEADS:
            module.embedding_dim = module.weight.shape[1]

    def _mask_foreign(self, module: Any) -> None:
        """Let an embedding give zeros for ids of other ranks."""
        kind, rows = type(module), len(module.weight)
        own = torch.arange(module.num_embeddings)[:, None] - self._rank * rows
        is_own = (own >= 0) & (own < rows)
        module.register_buffer("own_rows", own * is_own, persistent=False)
        module.is_own = nn.Parameter(is_own.to(module.weight.dtype), requires_grad=False)  # converted as the weight is
        module.padding_idx = None  # which PyTorch would not find in a part
        module.sharding = self
        module.__class__ = type(kind.__name__, (kind,), {"forward": _embed_own})

    def _forget_bias(self, module: nn.Module) -> None:
        """The first rank adds it."""
        for name, parameter in module.named_parameters():
            if name in ("bias", "down_proj_bias"):
                parameter.data = torch.zeros_like(parameter)

    def _adapt_counts(self, module: Any) -> None:
        kv_heads = max(self._kv_heads // self._count, 1)
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = self._heads // self._count // kv_heads
        if not self._counts:
            return
        for name in _COUNTS:
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) // self._count)
        if hasattr(module, "num_kv_heads"):
            module.num_kv_heads = kv_heads
        module.slow_but_exact = False  # BLOOM's, which slices weights
        if any(hasattr(module, name) for name in _BIASED):
            module.register_forward_pre_hook(self._own_biases, with_kwargs=True)

    def _own_biases(self, _: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        found = {name: arguments[name] for name in _BIASES if arguments.get(name) is not None}
        return args, arguments | {name: self._own_bias(bias) for name, bias in found.items()}

    def _own_bias(self, bias: Tensor) -> Tensor:
        """From [rows * heads, ...] or [rows, heads, ...]; what is not by heads, or this rank's already, as it is."""
        dim = bias.dim() - 3
        if dim < 0 or bias.shape[dim] % self._heads:
            return bias
        return (
            bias.unflatten(dim, (-1, self._count, self._heads // self._count))
            .select(dim + 1, self._rank)
            .flatten(dim, dim + 1)
        )

    def _split_input(self, module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        first = self._rank * -(-args[0].shape[-1] // self._count)
        return (args[0][..., first : first + module.in_features],)

    def _gather_input(self, module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        x, longest = args[0], -(-module.in_features // self._count)
        return (self.collectives.all_gather(pad(x, (0, longest - x.shape[-1])))[..., : module.in_features],)

    def _add_up(self, _module: Any, _args: Any, output: Tensor) -> Tensor:
        return self.collectives.all_reduce(output.contiguous())

    def _gather(self, module: Any, _: Any, output: Tensor) -> Tensor:
        return self.collectives.all_gather(output)[..., : module.out_features]


def check_quantized(model: PreTrainedModel, layers: Iterable[QuantizedLayer], num_shards: int) -> None:
    """StartError where a start would refuse these layers of a model, which may be on the meta device."""
    by_name = {layer.name: layer for layer in layers}
    quantized = [name for name, _ in model.named_modules() if name in by_name]
    names = _one_of_each_kind(quantized, plan_of(model)).values()
    check_groups({name: by_name[name].checked() for name in names}, model.config, num_shards)


def _one_of_each_kind(names: Iterable[str], plan: Plan) -> dict[str, str]:
    """The last name for each pattern of the plan whose layers share their inputs."""
    patterns = {replace_layer_number_by_wildcard(name): name for name in names}
    return {pattern: name for pattern, name in patterns.items() if plan.get(pattern) in _ROWWISE}


def _undo_transformers(model: nn.Module) -> None:
    plain: dict[nn.Parameter, nn.Parameter] = {}  # some are those of several layers
    for module in model.modules():
        vars(module).pop("forward", None)
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if isinstance(parameter, DTensor):
                own = nn.Parameter(parameter.detach().to_local(), requires_grad=False)
                setattr(module, name, plain.setdefault(parameter, own))


def _attention_modules(plan: Plan, model: nn.Module) -> list[nn.Module]:
    words = ("colwise", BY_GROUPS, IN_BLOCKS)
    names = [name for name, word in plan.items() if name.rpartition(".")[2] in _QKV and word in words]
    parents = {name.rpartition(".")[0] for name in names}
    return [module for name, module in model.named_modules() if replace_layer_number_by_wildcard(name) in parents]


def _is_key_or_value(name: str, word: str) -> bool:
    return word == "colwise" and name.rpartition(".")[2] in KEYS_AND_VALUES


def _shape(module: Any) -> tuple[int, int]:
    outputs, inputs = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape[:2]
    return inputs, outputs


def _size(module: Any) -> int:
    """The number of outputs of all ranks together."""
    return int(module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features)


def _lengthen(module: nn.Module, rows: int) -> None:
    """Give the layer as many outputs as that of the first rank has."""
    for parameter in module.parameters(recurse=False):
        if len(parameter) < rows:
            parameter.data = pad(parameter.data, (0, 0) * (parameter.dim() - 1) + (0, rows - len(parameter)))


def _embed_own(module: Any, ids: Tensor) -> Tensor:
    """The embeddings of ids, of which this rank may have none. Tables say so, since look-ups can be recorded."""
    kind: Any = type(module).__base__
    found = kind.forward(module, embedding(ids, module.own_rows)[..., 0]) * embedding(ids, module.is_own)
    embedded: Tensor = module.sharding.collectives.all_reduce(found)
    return embedded
