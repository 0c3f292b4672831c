"""Hooks for models whose attention does not go through transformers' AttentionInterface.

Projections, rotary embeddings and biases stay those of the model's own code: a hook replaces the method of a module
that computes attention, or a `forward` that does so inline. The self-check compares what each module gives with and
without its hook.
"""

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from tgis.engines.kernels.attention_inputs import BIAS_PADDING
from tgis.engines.paged.attention import PagedAttention
from tgis.engines.sharding.collectives import own_part
from tgis.errors import Unsupported

_Params = dict[str, Any]  # keyword arguments of PagedAttention.__call__
_Output = tuple[Tensor, None]


class _Hook(NamedTuple):
    method: str  # method of the module's class that is replaced
    function: Callable[..., tuple[Tensor | None, ...]]
    params: Callable[[nn.Module], _Params]
    # Makes the bias for a number of positions.
    bias: Callable[[PreTrainedModel, int], _Params] = lambda _model, _positions: {}


def cross_attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's modules that attend to the encoded input; Unsupported if they have no hook."""
    modules = model.get_decoder().named_modules()
    attentions = [module for name, module in modules if name.rpartition(".")[2] in _CROSS_ATTENTION]
    if not attentions or type(attentions[0]).__name__ not in _HOOKS:
        raise Unsupported(f"the cross-attention of {type(model).__name__} has no hook")
    return attentions


def hooked_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules that need a hook."""
    return [module for module in model.modules() if type(module).__name__ in _HOOKS]


def install_hooks(model: PreTrainedModel, attention: PagedAttention, num_positions: int) -> None:
    """Make these modules call `attention`, for good. Sequences have at most `num_positions` tokens."""
    modules = hooked_modules(model)
    if not modules:
        return
    plain = type(modules[0])
    hook = _HOOKS[plain.__name__]
    bias = hook.bias(model, num_positions)
    # What follows the output is nothing, where T5 may want it twice.
    hooked = type(plain.__name__, (plain,), {hook.method: hook.function, "attend": _attend, "no_others": (None,)})
    for module in modules:
        module.layer_idx = module.layer_id if hasattr(module, "layer_id") else module.layer_idx
        module.paged_attention, module.attention_params = attention, hook.params(module) | bias
        vars(module).pop(hook.method, None)
        module.__class__ = hooked  # not a method of each module, for which torch.compile would compile each anew
    model.config._attn_implementation = attention.name  # transformers makes no masks for this name
    if hook.function is _mpt:  # _mpt converts the mask that it expects
        no_mask = torch.zeros(1, dtype=torch.bool)
        AttentionMaskInterface.register(attention.name, lambda **_: no_mask)
    if hasattr(plain, "compute_bias"):
        _set_relative_biases(model, attention, num_positions)


def repeats_of_keys(config: PreTrainedConfig) -> int:
    """How often transformers caches the keys and values that a hook keeps once: Falcon 40B's for each head."""
    grouped = getattr(config, "new_decoder_architecture", False)
    return int(config.num_attention_heads // config.num_kv_heads) if grouped else 1


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output [1, tokens, heads, size] of queries, keys and values [1, heads, tokens, size]."""
    attention: PagedAttention = module.paged_attention
    return attention(module, q.to(v.dtype), k.to(v.dtype), v, None, **module.attention_params)[0]


def _method(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_masks: Any) -> _Output:
    return module.attend(query, key, value).transpose(1, 2), None


def _bloom(module: nn.Module, hidden_states: Tensor, residual: Tensor, **_: Any) -> _Output:
    fused = module.query_key_value(hidden_states)
    output = module.attend(*_split(fused, module.num_heads, module.head_dim))
    return module.dense(output.flatten(2)) + residual, None


def _falcon(
    module: nn.Module,
    hidden_states: Tensor,
    position_embeddings: Any = None,  # cosines and sines
    **_: Any,
) -> _Output:
    q, k, v = _split(module.query_key_value(hidden_states), module.num_kv_heads, module.head_dim)
    if not module.config.alibi:
        q, k = module.apply_rotary(q, k, *position_embeddings)
    return module.dense(module.attend(q, k, v).flatten(2)), None


def _mpt(module: nn.Module, hidden_states: Tensor, **_: Any) -> _Output:
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (each.unflatten(2, (module.n_heads, -1)).transpose(1, 2) for each in fused.chunk(3, 2))
    return module.out_proj(module.attend(q, k, v).flatten(2)), None


def _projecting(*names: str, size: str = "head_dim") -> Callable[..., tuple[Tensor | None, ...]]:
    """A `forward` with projections of these names: to queries, keys and values with heads of `size`, and to the
    output.
    """

    def forward(
        module: nn.Module,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        encoded = key_value_states if encoder_hidden_states is None else encoder_hidden_states
        states = hidden_states if encoded is None else encoded
        to_q, to_k, to_v, to_output = (getattr(module, name) for name in names)
        projected = to_q(hidden_states), to_k(states), to_v(states)
        q, k, v = (_heads(each, getattr(module, size)) for each in projected)
        return to_output(module.attend(q, k, v).flatten(2)), *module.no_others

    return forward


def _heads(x: Tensor, size: int) -> Tensor:
    """[1, heads, tokens, size] of [1, tokens, heads * size], which may have no tokens."""
    return x.unflatten(2, (x.shape[2] // size, size)).transpose(1, 2)


def _split(fused: Tensor, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that are fused by KV head: its queries, its key, its value."""
    heads = fused.unflatten(2, (kv_heads, -1, size))  # [1, T, K, G + 2, D]
    q, k, v = heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _gptj_params(module: nn.Module) -> _Params:
    module._get_embed_positions = lambda _: module.embed_positions[None]  # transformers copies this table in each layer
    return {"scaling": 1 / module.scale_attn}


def _gpt_neo_params(module: nn.Module) -> _Params:
    window = module.config.window_size if module.attention_type == "local" else None
    return {"scaling": 1.0, "sliding_window": window}


def _falcon_params(module: nn.Module) -> _Params:
    module.apply_rotary = module.forward.__globals__["apply_rotary_pos_emb"]  # a CPU kernel may have taken its place
    return {"scaling": module.inv_norm_factor}


def _t5gemma_params(module: nn.Module) -> _Params:
    return {"scaling": module.scaling, "softcap": module.attn_logit_softcapping}


def _t5_params(module: nn.Module) -> _Params:
    shares_bias = "position_bias" in inspect.signature(type(module).forward).parameters
    module.no_others = (None, None) if shares_bias else (None,)
    return {"scaling": 1.0}


def _set_relative_biases(model: PreTrainedModel, attention: PagedAttention, num_positions: int) -> None:
    """Give self-attention T5's biases by distance; those of a layer that has none are those of the layer before."""
    for part in (model.get_encoder(), model.get_decoder()):
        bias: _Params = {}
        for module in hooked_modules(part):
            if module.has_relative_attention_bias:
                bias = _relative_bias(module, num_positions)
            if module not in attention.cross_modules:
                module.attention_params |= bias


def _relative_bias(module: nn.Module, num_positions: int) -> _Params:
    """The biases of one query for all keys around it, or for those before it in a decoder."""
    before = num_positions - 1
    row = module.compute_bias(1, num_positions + (0 if module.is_decoder else before), past_seen_tokens=before)
    return {"bias_table": pad(_exact(row[0, :, 0]), (0, BIAS_PADDING)), "bias_origin": before}


def _alibi(model: PreTrainedModel, num_positions: int) -> Tensor:
    """BLOOM's and Falcon's own biases by the position of the key, which they round to the model's dtype or bfloat16."""
    build = sys.modules[type(model).__module__].build_alibi_tensor
    mask = torch.ones(1, num_positions + BIAS_PADDING, dtype=torch.int64, device=model.device)
    bias: Tensor = build(mask, model.config.num_attention_heads, model.dtype).squeeze(1)
    return own_part(bias, model)


def _exact(bias: Tensor) -> Tensor:
    """The bias in float32, or in float64 for a model of that dtype."""
    return bias.to(torch.promote_types(bias.dtype, torch.float32))


def _falcon_bias(model: PreTrainedModel, num_positions: int) -> _Params:
    if not model.config.alibi:
        return {}
    config, model.base_model.use_alibi = model.config, False  # so that no step makes biases
    scale = math.sqrt(config.hidden_size // config.num_attention_heads)
    return {"bias_table": _exact(_alibi(model, num_positions) / scale)}


def _bloom_bias(model: PreTrainedModel, num_positions: int) -> _Params:
    bias, mask = _exact(_alibi(model, num_positions)), torch.ones(1, dtype=torch.bool, device=model.device)
    base = model.base_model
    base.build_alibi_tensor = lambda *_args, **_others: None  # so that no step makes biases, as it does without a mask
    base.register_forward_pre_hook(lambda _, args, others: (args, others | {"attention_mask": mask}), with_kwargs=True)
    return {"bias_table": bias}


def _mpt_bias(model: PreTrainedModel, num_positions: int) -> _Params:
    """Biases by distance: the last column that the model makes is that of a token's own key."""
    bias = model.base_model.build_mpt_alibi_tensor(model.config.n_heads, num_positions, device=model.device)
    model.base_model.build_mpt_alibi_tensor = lambda *_args, **_others: None  # so that no step makes biases
    return {"bias_table": pad(own_part(bias.squeeze(1), model), (0, BIAS_PADDING)), "bias_origin": num_positions - 1}


_CROSS_ATTENTION = ("cross_attn", "EncDecAttention", "encoder_attn")  # names of modules
_LIKE_BART = ("Bart", "MBart", "Marian", "M2M100", "Pegasus", "Blenderbot", "BlenderbotSmall", "PLBart")
_QKV = "q_proj", "k_proj", "v_proj"
_HOOKS = {
    "GPTJAttention": _Hook("_attn", _method, _gptj_params),
    "GPTNeoSelfAttention": _Hook("_attn", _method, _gpt_neo_params),
    "CodeGenAttention": _Hook("_attn", _method, lambda module: {"scaling": 1 / module.scale_attn}),
    "BloomAttention": _Hook("forward", _bloom, lambda module: {"scaling": module.inv_norm_factor}, _bloom_bias),
    "MptAttention": _Hook("forward", _mpt, lambda module: {"scaling": module.softmax_scale}, _mpt_bias),
    "FalconAttention": _Hook("forward", _falcon, _falcon_params, _falcon_bias),
    "T5GemmaCrossAttention": _Hook("forward", _projecting(*_QKV, "o_proj"), _t5gemma_params),
    **dict.fromkeys(
        (f"{name}Attention" for name in _LIKE_BART),
        _Hook("forward", _projecting(*_QKV, "out_proj"), lambda module: {"scaling": module.scaling}),
    ),
    **dict.fromkeys(
        ("T5Attention", "MT5Attention", "UMT5Attention"),
        _Hook("forward", _projecting("q", "k", "v", "o", size="key_value_proj_dim"), _t5_params),
    ),
}
