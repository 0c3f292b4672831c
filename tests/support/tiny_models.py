"""Tiny models of many architectures, with random weights large enough that the best token is clear."""

import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import commit, engine_options, limits
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from tgis.batcher.batcher import Batcher
from tgis.batcher.capacity import BatchLimits
from tgis.batcher.sequence import Sequence as Row
from tgis.batcher.sequence import StepPlan
from tgis.engines.base import Engine
from tgis.engines.paged.engine import BLOCK_SIZE, PagedEngine
from tgis.engines.paged.self_check import dummy_sequence
from tgis.errors import OutOfMemory
from tgis.ipc.request import Request, TokenLogprobs
from tgis.prompts.store import LoadedAdapter

VOCAB_SIZE, EOS, DECODER_START = 97, 2, 3
NEAR_TIE = 1e-3  # a difference of the best two logits that may fall either way

TOKEN_IDS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OPT_LIKE = LLAMA_LIKE | {"ffn_dim": 48, "word_embed_proj_dim": 32}
FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
ROUTED_EXPERTS = {
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
FALCON_LIKE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2_LIKE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": LLAMA_LIKE,
    "Mistral": LLAMA_LIKE | {"sliding_window": 8},
    "Mixtral": LLAMA_LIKE | {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Qwen2": LLAMA_LIKE,
    "Qwen3": LLAMA_LIKE | {"head_dim": 8},
    "Gemma2": LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": False},
    "Phi": LLAMA_LIKE | {"num_key_value_heads": 4},
    "Granite": LLAMA_LIKE | {"logits_scaling": 2.0},
    "StableLm": LLAMA_LIKE,
    "GPTNeoX": LLAMA_LIKE,
    "OPT": OPT_LIKE,
    "GPT2": GPT2_LIKE,
    "GPTBigCode": GPT2_LIKE | {"multi_query": True},
    "CodeGen": GPT2_LIKE | {"n_ctx": 128, "rotary_dim": 4},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": FALCON_LIKE,
    "Falcon, alibi": FALCON_LIKE | {"alibi": True},
    "Falcon, 40b": FALCON_LIKE | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "GPTBigCode, many heads": GPT2_LIKE | {"multi_query": False},
    "OPT, galactica": OPT_LIKE
    | {
        "activation_function": "gelu",
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
    },
    "OPT, 350m": OPT_LIKE | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "GPTJ": GPT2_LIKE | {"rotary_dim": 4},
    "GPTNeo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "Phi3": LLAMA_LIKE,
    "Starcoder2": LLAMA_LIKE | {"sliding_window": 8},
    "Olmo2": LLAMA_LIKE,
    "Cohere": LLAMA_LIKE,
    "Gemma": LLAMA_LIKE | {"head_dim": 8},
    "Gemma3Text": LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8},
    "Qwen3Moe": LLAMA_LIKE | FEW_EXPERTS | {"head_dim": 8},
    "GptOss": LLAMA_LIKE | {"head_dim": 8, "sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
    "DeepseekV3": LLAMA_LIKE
    | ROUTED_EXPERTS
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "qk_nope_head_dim": 4,
    },
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
}
HYBRID = LLAMA_LIKE | {"layer_types": ["linear_attention", "full_attention"]}
DELTA = HYBRID | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DELTA_EXPERTS = DELTA | {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
STATE_SPACE = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
ONLY_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
SHARED_ATTENTION = LLAMA_LIKE | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "mamba_d_state": 8,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "Qwen3Next": DELTA_EXPERTS,
    "Qwen3_5Text": DELTA | {"head_dim": 8},
    "Qwen3_5MoeText": DELTA_EXPERTS,
    "OlmoHybrid": DELTA | {"linear_num_value_heads": 2},
    "GraniteMoeHybrid, H": LLAMA_LIKE
    | STATE_SPACE
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "time_step_limit": (0.01, 0.9)},
    "Bamba": LLAMA_LIKE | STATE_SPACE | {"attn_layer_indices": [1]},
    "FalconH1": LLAMA_LIKE | STATE_SPACE | {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "NemotronH": LLAMA_LIKE
    | {"hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "head_dim": 8}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2},
    "Mamba2": ONLY_STATES | {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "Zamba2": SHARED_ATTENTION | {"n_mamba_heads": 4, "num_mem_blocks": 1, "hybrid_layer_ids": [1, 3]},
    "Jamba": LLAMA_LIKE
    | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "Mamba": ONLY_STATES,
    "FalconMamba": ONLY_STATES,
    "Zamba": SHARED_ATTENTION | {"n_mamba_heads": 2},
    "Lfm2": LLAMA_LIKE | {"layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": LLAMA_LIKE
    | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
ARCHITECTURES |= RECURRENT
HEAD = LLAMA_LIKE | {"head_dim": 8}
SMALL_WINDOW = {"sliding_window": 8}
LOCAL_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
# tests find out which engine runs these, but run no batches of joining and leaving sequences
MORE_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Apertus": LLAMA_LIKE,
    "Arcee": LLAMA_LIKE,
    "BioGpt": LLAMA_LIKE,
    "BitNet": LLAMA_LIKE,
    "Cohere2": LLAMA_LIKE | SMALL_WINDOW,
    "DeepseekV2": ARCHITECTURES["DeepseekV3"],
    "Doge": LLAMA_LIKE,
    "DiffLlama": LLAMA_LIKE,
    "Ernie4_5": HEAD,
    "Exaone4": LLAMA_LIKE | SMALL_WINDOW,
    "GPTNeoXJapanese": FALCON_LIKE | {"intermediate_multiple_size": 2},
    "Gemma4Text": HEAD | SMALL_WINDOW | {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8},
    "Glm": HEAD,
    "Glm4": HEAD,
    "Glm4Moe": HEAD | ROUTED_EXPERTS,
    "GraniteMoe": LLAMA_LIKE | LOCAL_EXPERTS,
    "GraniteMoeShared": LLAMA_LIKE | LOCAL_EXPERTS | {"shared_intermediate_size": 16},
    "GraniteMoeHybrid": LLAMA_LIKE
    | {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope"}
    | {"shared_intermediate_size": 48, "mamba_n_heads": 8},
    "Helium": HEAD,
    "HunYuanDenseV1": HEAD,
    "JetMoe": LLAMA_LIKE | LOCAL_EXPERTS | {"kv_channels": 8},
    "Llama4Text": HEAD | LOCAL_EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 256},
    "MiniMax": HEAD | LOCAL_EXPERTS,
    "Ministral": HEAD | SMALL_WINDOW,
    "Ministral3": HEAD | SMALL_WINDOW,
    "Nemotron": LLAMA_LIKE,
    "Olmo": LLAMA_LIKE,
    "Olmo3": LLAMA_LIKE | SMALL_WINDOW,
    "Olmoe": LLAMA_LIKE | {"num_experts": 2, "num_experts_per_tok": 1},
    "Persimmon": LLAMA_LIKE,
    "Phimoe": LLAMA_LIKE | LOCAL_EXPERTS | {"sliding_window": 256},
    "Qwen2Moe": LLAMA_LIKE | FEW_EXPERTS | {"shared_expert_intermediate_size": 16},
    "RecurrentGemma": LLAMA_LIKE | {"lru_width": 32, "attention_window_size": 8},
    "Rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    "SeedOss": HEAD,
    "SmolLM3": LLAMA_LIKE,
    "VaultGemma": HEAD | SMALL_WINDOW,
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 128},
}

T5_LIKE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
BART_LIKE = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
GEMMA_LIKE = LLAMA_LIKE | TOKEN_IDS | {"head_dim": 8, "sliding_window": 8, "attn_logit_softcapping": 2.0}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "T5": T5_LIKE,
    "T5, flan": T5_LIKE | {"feed_forward_proj": "gated-gelu"},
    "MT5": T5_LIKE,
    "UMT5": T5_LIKE,
    "LongT5": T5_LIKE | {"local_radius": 4},
    "Bart": BART_LIKE,
    "MBart": BART_LIKE,
    "Marian": BART_LIKE,
    "Marian, two vocabularies": BART_LIKE | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 160},
    "M2M100": BART_LIKE,
    "Pegasus": BART_LIKE,
    "PegasusX": BART_LIKE | {"block_size": 8, "num_global_tokens": 4},
    "Blenderbot": BART_LIKE,
    "BlenderbotSmall": BART_LIKE,
    "PLBart": BART_LIKE,
    "Mvp": BART_LIKE,
    "T5Gemma": {"encoder": GEMMA_LIKE | {"sliding_window": 256}, "decoder": GEMMA_LIKE, "tie_word_embeddings": False},
}

# tests expect these to be refused
LED_LIKE = BART_LIKE | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
REFUSED_ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "LED": LED_LIKE | {"attention_window": 8},
    "SwitchTransformers": T5_LIKE | {"num_experts": 2},
    "ProphetNet": {"hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
}


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    kind = getattr(transformers, f"{name.split(',', maxsplit=1)[0]}Config")
    settings = (ARCHITECTURES | MORE_ARCHITECTURES).get(name)
    if settings is None:
        settings = {"decoder_start_token_id": DECODER_START} | (ENCODER_DECODERS | REFUSED_ENCODER_DECODERS)[name]
    return kind(**TOKEN_IDS | settings | changes)


def make_wide_config(name: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of this name with heads of 16, for which there are CPU kernels."""
    config = make_config(name, **changes)
    parts = config, getattr(config, "encoder", None), getattr(config, "decoder", None)
    for part in parts:
        for size in ("hidden_size", "head_dim", "word_embed_proj_dim", "cross_attention_hidden_size"):
            computed = isinstance(getattr(type(part), size, None), property)
            if getattr(part, size, None) and not computed:
                setattr(part, size, 2 * getattr(part, size))
    return config


# with heads that fit CPU kernels, for sequences of 512 tokens
LONG = {"max_position_embeddings": 512}
OWN_ATTENTION: dict[str, PreTrainedConfig] = {  # that does not go through AttentionInterface
    "BLOOM": make_wide_config("Bloom"),
    "MPT": make_wide_config("Mpt", max_seq_len=512, attn_config={"clip_qkv": 0.5}),
    "Falcon 7B": make_wide_config("Falcon"),
    "Falcon 40B": make_wide_config("Falcon, 40b"),
    "Falcon RW": make_wide_config("Falcon, alibi", multi_query=False, parallel_attn=False, bias=True),
    "GPT-J": make_wide_config("GPTJ", n_positions=512),
    "CodeGen": make_wide_config("CodeGen", n_positions=512, n_ctx=512),
    "GPT-Neo": make_wide_config("GPTNeo", **LONG, window_size=40),
}
EXPERTS: dict[str, PreTrainedConfig] = {  # more than a token chooses
    **{
        name: make_wide_config(name, **LONG, num_experts=8, num_experts_per_tok=3)
        for name in ("Qwen2Moe", "Qwen3Moe", "Olmoe")
    },
    "Glm4Moe": make_wide_config("Glm4Moe", **LONG, n_routed_experts=9, num_experts_per_tok=3),
    **{
        name: make_wide_config(name, **LONG, num_local_experts=8, num_experts_per_tok=3)
        for name in ("Mixtral", "GraniteMoe", "GptOss")
    },
}
_WIDER = {"head_dim": 16, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_ssm": 64, "linear_key_head_dim": 24}
_WIDER |= {"hidden_size": 64, "max_position_embeddings": 512}
WIDE_RECURRENT: dict[str, PreTrainedConfig] = {
    name: make_config(name, **{size: value for size, value in _WIDER.items() if size in settings})
    for name, settings in RECURRENT.items()
    if name != "Zamba"  # multiplies by a parameter for each head, with PyTorch
}
WIDE_RECURRENT["Mamba2"] = make_config("Mamba2", hidden_size=64, head_dim=16)
WIDE_ENCODER_DECODERS = {
    name: make_wide_config(name, **LONG) for name in ("T5", "T5, flan", "UMT5", "Bart", "M2M100", "Marian")
}


def make_model(name: str, directory: Path, **generation: Any) -> Path:
    """Save a model and its generation config to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for part, content in _files(name).items():
        (directory / part).write_bytes(content)
    if generation:
        file = directory / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    torch.manual_seed(0)
    return directory


@cache
def _files(name: str) -> dict[str, bytes]:
    """Making one takes a tenth of a second; hundreds of tests have the same few."""
    with tempfile.TemporaryDirectory() as directory:
        path = make_model_from_config(make_config(name), Path(directory))
        return {file.name: file.read_bytes() for file in path.iterdir()}


def make_model_from_config(config: PreTrainedConfig, directory: Path) -> Path:
    """Save a model of any configuration to `directory`."""
    torch.manual_seed(0)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config, dtype=torch.float32)
    if config.model_type == "umt5" and not model.get_decoder().block[0].layer[0].SelfAttention.is_causal:
        pytest.skip("tokens of UMT5's decoder see later ones in this release of transformers, such as 5.17")
    for path, weight in model.named_parameters():
        if weight.dim() > 1 or path.endswith((".A", ".bias")):  # which are zero in new models: they would do nothing
            torch.nn.init.normal_(weight, std=0.2)
        assert torch.isfinite(weight).all(), path
    if hasattr(model, "final_logits_bias"):
        torch.nn.init.normal_(model.final_logits_bias, std=0.05)
    model.generation_config.update(_from_model_config=False)
    model.save_pretrained(directory)
    return directory


def paged_engine(
    model: Path, rows: int = 4, *, async_decode: bool | None = None, block_size: int = BLOCK_SIZE, **options: Any
) -> PagedEngine:
    """An engine that is warm."""
    engine = PagedEngine(engine_options(model, rows, **options), async_decode=async_decode, block_size=block_size)
    engine.warm_up()
    return engine


def tgis_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own: those of libraries differ between machines."""
    ours = [record for record in caplog.records if record.name.startswith("tgis")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def logits_of_chunks(engine: PagedEngine, tokens: list[int], counts: Sequence[int]) -> torch.Tensor:
    """[len(tokens), V]: prompt chunks of these sizes, then decode steps."""
    seq, logits = dummy_sequence(tokens, 16, prompt_logprobs=True), []
    for count in counts:
        prefill = count > 1
        plan = StepPlan([seq], [count], [] if prefill else [seq], has_prefill=prefill)
        computed, slices = engine.runner.compute_logits(plan)
        logits.append((computed[slices[seq.id]] if prefill else computed[:1]).float().cpu().clone())
        seq.num_computed_tokens += count
    return torch.cat(logits)


def greedy_requests(count: int, new: int, draw: random.Random, longest: int = 30) -> list[Request]:
    """With random prompts."""
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    return [Request(number, prompt, new) for number, prompt in enumerate(prompts)]


def check_best(logits: torch.Tensor, tokens: list[int]) -> int:
    """Every token has the highest logit of its place; how many are no near tie. logits: [tokens, V]"""
    for scores, token in zip(logits, tokens, strict=True):
        assert scores.max() - scores[token] < NEAR_TIE
    top = logits.topk(2).values
    return int((top[:, 0] - top[:, 1] > 2 * NEAR_TIE).sum())


def check_greedy(model: Any, prompt: list[int], output: list[int]) -> int:
    """Every token of an output is the best one of a model of transformers or PEFT; how many are no near tie."""
    inputs = {"input_ids": torch.tensor([prompt + output])}
    if model.config.is_encoder_decoder:
        decoded = torch.tensor([[DECODER_START, *output]])
        inputs = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": decoded}
    with torch.no_grad():
        logits = model(**inputs).logits[0, -len(output) - 1 : -1].float()
    return check_best(logits, output)


def limits_of(engine: Engine, blocks: int, **changes: Any) -> BatchLimits:
    """Limits of batches of a paged engine with this number of KV blocks."""
    info = engine.info
    values = {
        name: getattr(info, name)
        for name in ("block_size", "max_batch_size", "lookahead", "drafted_tokens", "encoder_decoder", "state_slots")
    }
    return limits(blocks * info.block_size, padded=False, **values | changes)


@dataclass
class Outcome:
    """What a request gets."""

    tokens: list[int] = field(default_factory=list)
    facts: list[TokenLogprobs] = field(default_factory=list)  # about them
    inputs: list[TokenLogprobs] = field(default_factory=list)


def outcomes(
    engine: Engine,
    bounds: BatchLimits,
    requests: list[Request],
    rng: random.Random | None,
    adapters: Mapping[int, LoadedAdapter | None] = {},
    eos: int = EOS,
    cancelled: Mapping[int, int] = {},
    failures: tuple[type[Exception], ...] = (),
    prepare: Callable[[Row], object] = lambda _: None,
    check: Callable[[list[int], list[int]], None] = lambda *_: None,
) -> tuple[dict[int, Outcome], Counter[str]]:
    """By request, and counts of drafted tokens and preemptions. Requests come at random times in their order, or at
    once; some are cancelled after so many tokens. Steps that fail so are tried again, and no request is lost. `prepare`
    gets each sequence, `check` the tokens of a sequence and its draft.
    """
    found, counts = {request.id: Outcome() for request in requests}, Counter[str]()
    batcher, waiting = Batcher(bounds, eos_ids=[eos]), list(requests)
    while waiting or not batcher.idle:
        count = len(waiting) if rng is None else int(bool(waiting) and (batcher.idle or rng.random() < 0.4))
        for request in waiting[:count]:
            (seq,) = batcher.submit([request], 0.0)
            seq.adapter = adapters.get(seq.id)
            prepare(seq)
        waiting = waiting[count:]
        plan = batcher.plan(0.0)
        engine.release(plan.to_release)
        if not plan.seqs:
            continue
        try:
            result = engine.step(plan)
        except failures as error:
            lost = batcher.rollback(plan, out_of_memory=isinstance(error, OutOfMemory))
            assert lost == []
            continue
        commit(batcher, plan, result.tokens, verified=result.verified)
        batcher.cancel([seq.id for seq in plan.sampled if cancelled.get(seq.id, 1 << 30) <= seq.num_generated_tokens])
        logprobs = result.logprobs or [[]] * len(plan.sampled)
        for row, tokens, facts in zip(plan.sampled, result.tokens, logprobs, strict=True):
            assert len(facts) in (len(tokens), 0)
            own = found[row.id]
            new = row.num_generated_tokens - len(own.tokens)  # one of several tokens may be the end
            own.tokens += tokens[:new]
            own.facts += facts[:new]
            if row.id in plan.drafts:
                drafted = result.verified.get(row.id, [])
                counts.update(asked=plan.drafts[row.id], drafted=len(drafted), kept=len(tokens) - 1)
                check(row.tokens[: len(row.tokens) - new], drafted)
        for number, inputs in result.prompt_logprobs.items():
            assert not found[number].inputs
            found[number].inputs = inputs
        counts["preempted"] += sum(not row.finished for row in plan.to_release)
    return found, counts


def generate_all(engine: Engine, bounds: BatchLimits, requests: list[Request], rng: random.Random) -> list[list[int]]:
    """Generated tokens of each request, when they arrive at random steps."""
    engine.warm_up()
    return [one.tokens for one in outcomes(engine, bounds, requests, rng)[0].values()]
