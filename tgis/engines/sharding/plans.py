"""Which layers of a model are sharded, and how: tensor-parallel plans with the styles of transformers and three more.

Transformers has plans for most decoders. The table here has those of the others, by the last part of a layer's name.
The layers of the vocabulary are looked up in the model.
"""

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from tgis.engines.quantization.weight import QuantizedWeight
from tgis.errors import StartError

Plan = dict[str, str]  # style by name of a layer or parameter, with * for the numbers in it

BY_GROUPS = "qkv_by_groups"  # layout: for each key-value head its queries, its key and its value
IN_BLOCKS = "qkv_in_blocks"  # all queries, all keys, all values
BY_HEADS = "by_heads"  # one column for each head
KEYS_AND_VALUES = frozenset({"k_proj", "v_proj"})
_LIKE_BLOOM = {
    "query_key_value": BY_GROUPS,
    "dense": "rowwise",
    "dense_h_to_4h": "colwise",
    "dense_4h_to_h": "rowwise",
}
_ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise")
_LIKE_BART = _ATTENTION | {"out_proj": "rowwise", "fc1": "colwise", "fc2": "rowwise"}
_LIKE_GPT2 = {"c_attn": IN_BLOCKS, "c_proj": "rowwise", "c_fc": "colwise"}
_LIKE_T5 = dict.fromkeys(("q", "k", "v", "wi", "wi_0", "wi_1"), "colwise") | {
    "o": "rowwise",
    "wo": "rowwise",
    "relative_attention_bias": BY_HEADS,
}
_GPT_OSS = _ATTENTION | {
    "o_proj": "rowwise",
    "sinks": "colwise",
    "experts": "moe_tp_experts",
    "gate_up_proj": "rowwise",  # experts have [inputs, outputs]
    "gate_up_proj_bias": "rowwise",
    "down_proj": "colwise",
}
_OURS: dict[str, Plan] = {
    "bloom": _LIKE_BLOOM,
    "falcon": _LIKE_BLOOM,
    "gpt2": _LIKE_GPT2,
    "gpt_bigcode": _LIKE_GPT2 | {"c_attn": BY_GROUPS},
    "gpt_oss": _GPT_OSS,
    "mpt": {"Wqkv": IN_BLOCKS, "out_proj": "rowwise", "up_proj": "colwise", "down_proj": "rowwise"},
    **dict.fromkeys(("opt", "bart", "mbart", "m2m_100", "marian", "pegasus", "plbart"), _LIKE_BART),
    **dict.fromkeys(("blenderbot", "blenderbot-small"), _LIKE_BART),
    **dict.fromkeys(("t5", "mt5", "umt5"), _LIKE_T5),
}
_GROUPED = frozenset({"falcon", "gpt_oss"})  # grouped-query attention
_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def check_plan(config: PreTrainedConfig, num_shards: int) -> None:
    """StartError if the model has no plan, or its heads do not divide."""
    text = config.get_text_config(decoder=True)
    if not text.base_model_tp_plan and text.model_type not in _OURS:
        raise StartError(f"NUM_SHARD={num_shards}: there is no tensor-parallel plan for {text.model_type}")
    fitting = fitting_shards(text)
    if num_shards not in fitting:
        raise StartError(
            f"NUM_SHARD={num_shards} does not divide the model's {max(_heads(text))} attention and"
            f" {num_kv_heads(text)} key-value heads; these would do: {', '.join(map(str, fitting))}"
        )


def fitting_shards(config: PreTrainedConfig) -> list[int]:
    """The numbers of ranks that divide the heads of a model."""
    heads, kv_heads = _heads(config), num_kv_heads(config)
    dividing = [shards for shards in range(1, max(heads) + 1) if all(count % shards == 0 for count in heads)]
    return [shards for shards in dividing if kv_heads % shards == 0 or shards % kv_heads == 0]


def check_groups(weights: Mapping[str, QuantizedWeight], config: PreTrainedConfig, num_shards: int) -> None:
    """StartError if the inputs of a rank would begin within a group. `weights` has unsharded weights by name of layer;
    those with act-order are sharded by outputs.
    """
    groups = {
        name: (weight.codes.shape[1], weight.alignment) for name, weight in weights.items() if weight.order is None
    }

    def cut(shards: int) -> list[str]:
        return [name for name, (inputs, size) in groups.items() if shards > 1 and -(-inputs // shards) % size]

    for name in cut(num_shards)[:1]:
        inputs, size = groups[name]
        fitting = ", ".join(str(shards) for shards in fitting_shards(config) if not cut(shards))
        raise StartError(
            f"NUM_SHARD={num_shards} cuts groups of {size} of the {inputs} inputs of {name}; these would do: {fitting}"
        )


def _heads(config: PreTrainedConfig) -> list[int]:
    text = config.get_text_config(decoder=True)
    return [getattr(text, name) for name in _HEADS if getattr(text, name, None)]


def num_kv_heads(config: PreTrainedConfig) -> int:
    """The key-value heads of a layer on all ranks together."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    if text.model_type in _OURS and text.model_type not in _GROUPED:  # other fields may mislead
        return int(text.num_attention_heads)
    names = "num_key_value_heads", "num_kv_heads", "num_attention_heads"
    return int(next(heads for name in names if (heads := getattr(text, name, None))))


def plan_of(model: PreTrainedModel) -> Plan:
    """The plan of a model, which may be on the meta device."""
    styles = _OURS.get(model.config.get_text_config(decoder=True).model_type)
    if styles is None:
        return dict(model.tp_plan)
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    plan = {name: styles[name.rpartition(".")[2]] for name in names if name.rpartition(".")[2] in styles}
    plan |= dict(_vocabulary(model))
    return {replace_layer_number_by_wildcard(name): style for name, style in plan.items()}


def has_own_counts(model: PreTrainedModel) -> bool:
    """Whether attention modules have head counts to divide: transformers has no plan for the model."""
    return model.config.get_text_config(decoder=True).model_type in _OURS


def _vocabulary(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    parts = [model, model.get_encoder(), model.get_decoder()] if model.config.is_encoder_decoder else [model]
    embeddings = [part.get_input_embeddings() for part in parts]
    for name, module in model.named_modules():
        if module is model.get_output_embeddings():
            yield name, "colwise_gather_output"
        elif module in embeddings:
            yield name, "embedding_rowwise"
