"""The padded engine on many architectures: rows that join and leave at random give what transformers gives alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import engine_options, limits
from transformers import AutoModelForCausalLM, PreTrainedModel

from tgis.batcher.batcher import Batcher
from tgis.batcher.weights import Limits
from tgis.engines.base import Engine
from tgis.engines.hf_transformers import TransformersEngine
from tgis.engines.tgis_native import PagedEngine
from tgis.errors import StartError, Unsupported
from tgis.messages import Details, Request, Sampling

VOCABULARY, NEW_TOKENS = 97, 12
NEAR_TIE = 1e-3  # a difference of the best two logits that may fall either way

SMALL = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
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
    "OPT": LLAMA_LIKE | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "GPT2": GPT2_LIKE,
    "GPTBigCode": GPT2_LIKE | {"multi_query": True},
    "CodeGen": GPT2_LIKE | {"n_ctx": 128, "rotary_dim": 4},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
}


PADDED_ONLY = ("CodeGen", "Bloom", "Falcon", "Mpt")  # their attention does not go through transformers' interface


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model_dir(architecture: str, tmp_path: Path) -> Path:
    """A tiny model with random weights, large enough for clear choices."""
    config = getattr(transformers, f"{architecture}Config")(**SMALL, **ARCHITECTURES[architecture])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
        assert torch.isfinite(weight).all(), name
    model.save_pretrained(tmp_path)
    return tmp_path


def test_padded_rows_joining_at_random_equal_solo_runs(model_dir: Path) -> None:
    check(model_dir, TransformersEngine(engine_options(model_dir, 6, threads=None)), limits(100_000, max_batch_size=6))


def test_paged_rows_joining_at_random_equal_solo_runs(architecture: str, model_dir: Path) -> None:
    """In chunks of any size, with so few blocks that rows are preempted, and with cached prefixes."""
    options = engine_options(model_dir, 6, threads=None)
    if architecture in PADDED_ONLY:
        with pytest.raises(Unsupported):
            PagedEngine(options)
        return
    bounds = limits(80, padded=False, block_size=16, prefix_cache=True, max_batch_size=6, prefill_tokens=7)
    check(model_dir, PagedEngine(options), bounds)


def check(model_dir: Path, engine: Engine, bounds: Limits) -> None:
    """Prompts that come at random times get what transformers gives each alone."""
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    prompts += [prompts[-1][:9] + prompts[0][:9], prompts[-1] + prompts[0]]
    assert_context_matters(reference, prompts)
    engine.warm_up()
    generated = run(engine, bounds, prompts, rng)
    for prompt, tokens in zip(prompts, generated, strict=True):
        assert_greedy(reference, prompt, tokens)


def test_a_model_without_a_kv_cache_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(StartError, match="mamba"):
        TransformersEngine(engine_options(tmp_path, 6, threads=None))


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(StartError, match="decoder-only"):
        TransformersEngine(engine_options(tmp_path, 6, threads=None))


def run(engine: Engine, bounds: Limits, prompts: list[list[int]], rng: random.Random) -> list[list[int]]:
    """What the engine generates when the prompts come at random times."""
    batcher = Batcher(bounds, eos_ids=[2])
    waiting = [Request(n, p, NEW_TOKENS, False, Sampling(), Details()) for n, p in enumerate(prompts)]
    done: dict[int, list[int]] = {}
    while len(done) < len(prompts):
        if waiting and (batcher.idle or rng.random() < 0.4):
            batcher.submit([waiting.pop(0)], 0.0)
        plan = batcher.plan(0.0)
        if plan is None:
            continue
        engine.release(plan.preempted)
        result = engine.step(plan)
        ended = batcher.commit(plan, result.tokens, 0.0)
        engine.release(ended)
        done |= {row.id: row.tokens[row.prompt_length :] for row in ended}
    return [done[n] for n in range(len(prompts))]


def assert_context_matters(reference: PreTrainedModel, prompts: list[list[int]]) -> None:
    """A model that looks at the last token only would pass whatever became of the others."""
    with torch.no_grad():
        differs = [best_next(reference, prompt) != best_next(reference, prompt[-1:]) for prompt in prompts]
    assert sum(differs) >= len(prompts) / 4


def best_next(reference: PreTrainedModel, prompt: list[int]) -> int:
    return int(reference(torch.tensor([prompt])).logits[0, -1].argmax())


def assert_greedy(reference: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the best one after those before it, in one plain pass over all of them."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    assert len(tokens) == NEW_TOKENS or tokens[-1] == 2
    for scores, token in zip(logits, tokens, strict=True):
        assert scores.max() - scores[token] < NEAR_TIE
    best = logits.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * NEAR_TIE  # where only one token can pass
    assert clear.float().mean() > 0.8
