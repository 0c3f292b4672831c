"""Models that draft: outputs are those without them, and drafts are what the models give;
which tokens of a step are kept.
"""

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cpu_kernels import CPU_ISA, kernels_of
from mlp_speculators import Weights, random_mlp, save_mlp
from proposers import ForcedDrafts, proposing
from random_requests import KINDS
from slow_cases import slow_except
from tiny_models import (
    LONG,
    VOCAB_SIZE,
    WIDE_RECURRENT,
    Outcome,
    limits_of,
    make_model_from_config,
    make_wide_config,
    outcomes,
    paged_engine,
)
from torch.nn.functional import gelu
from transformers import AutoModelForCausalLM, GPT2Config

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.self_check import dummy_adapter
from tgis.engines.speculation.proposals import keep_what_follows, with_proposals
from tgis.errors import StartError
from tgis.ipc.messages import FailureKind
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, TokenLogprobs

ROWS = 8
WIDTH, INNER = 64, 40
MLP: dict[str, Any] = {
    "model_type": "mlp_speculator",
    "vocab_size": VOCAB_SIZE,
    "emb_dim": WIDTH,
    "inner_dim": INNER,
    "n_predict": 3,
}
TIED = MLP | {"tie_weights": True, "scale_input": True}
MLPS = {"MLP": MLP, "tied MLP": TIED}
DRAFTERS = ["itself", "another", "tied MLP", "another, recurrent"]
DETAILS = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models by name: the large one, and what drafts for it."""
    target = make_model_from_config(make_wide_config("Llama", **LONG), tmp_path_factory.mktemp("target"))
    other = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    found = {"itself": target, "another": make_model_from_config(other, tmp_path_factory.mktemp("other"))}
    found["recurrent"] = make_model_from_config(WIDE_RECURRENT["Qwen3Next"], tmp_path_factory.mktemp("recurrent"))
    for name, config in MLPS.items():
        found[name] = save_mlp(tmp_path_factory.mktemp("mlp"), config, random_mlp(config))
    return found


def mlp_logits(
    config: dict[str, Any], weights: Weights, states: torch.Tensor, tokens: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The scores of each stage, [..., V], from hidden states [..., W] and the tokens after them; where `tokens` end,
    the best of one stage follows.
    """
    found: list[torch.Tensor] = []
    keep = 0.5 ** (0.5 / config["n_predict"])
    share = math.sqrt((1 - keep**2) * config["inner_dim"] / 2) / keep
    if config.get("scale_input"):
        states = normed(states) / 2**0.5
    for stage in range(config["n_predict"]):
        own, first = (0, min(stage, 1)) if config.get("tie_weights") else (stage, stage)
        token = tokens[stage] if stage < len(tokens) else found[-1].argmax(-1)
        states = states @ weights[f"speculator.proj.{first}.weight"].T
        states = normed(states + weights[f"speculator.emb.{own}.weight"][token] * share)
        states = gelu(states * weights[f"speculator.ln.{own}.weight"] + weights[f"speculator.ln.{own}.bias"])
        found.append(states @ weights[f"speculator.head.{own}.weight"].T)
    return found


def normed(states: torch.Tensor) -> torch.Tensor:
    return states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def load(paths: dict[str, Path], drafter: str, dtype: str = "bfloat16") -> PagedEngine:
    speculator = str(paths[drafter])
    return paged_engine(paths["itself"], ROWS, dtype=dtype, speculation="auto", speculator_path=speculator)


@pytest.fixture(scope="module", params=slow_except(["tied MLP", "another, recurrent"], DRAFTERS))
def engine(request: pytest.FixtureRequest, paths: dict[str, Path]) -> PagedEngine:
    kernels_of(CPU_ISA)
    drafter, _, target = request.param.partition(", ")
    return load(paths | {"itself": paths[target or "itself"]}, drafter)


def generated_by(
    engine: PagedEngine, asked: list[Request], drafted: int, blocks: int, draw: random.Random, **others: Any
) -> tuple[list[Outcome], Counter[str]]:
    how = {"prefix_cache": True, "proposed_tokens": 15, "drafted_tokens": drafted, "prefill_tokens": 50}
    bounds = limits_of(engine, blocks, **how)
    found, counts = outcomes(engine, bounds, asked, draw, **others)
    return [*found.values()], counts


def requests(draw: random.Random, sampling: list[SamplingParams]) -> list[Request]:
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([1, 9, 40, 90]))] for _ in sampling]
    prompts[0][:17] = prompts[-1][:17]
    seeded = [msgspec.structs.replace(each, seed=draw.getrandbits(64)) for each in sampling]
    details = DETAILS, msgspec.structs.replace(DETAILS, input_tokens=True)
    return [Request(at, prompt, 24, False, seeded[at], details[at % 4 == 2]) for at, prompt in enumerate(prompts)]


def test_drafts_change_nothing(engine: PagedEngine) -> None:
    """With every way to sample, few blocks, and prefixes of the cache."""
    draw = random.Random(4)
    asked = requests(draw, KINDS)
    expected, none = generated_by(engine, asked, 0, 100, draw)
    assert not none["asked"]
    for most, blocks in ((4, 14), (15, 100)):
        with proposing(ForcedDrafts):
            found, counts = generated_by(engine, asked, most, blocks, draw)
        for request, one, other in zip(asked, found, expected, strict=True):
            assert one == other, (most, request)
        assert counts["drafted"] > 100


def test_drafts_go_together_with_adapters(paths: dict[str, Path]) -> None:
    """Bits of rows with LoRA adapters depend on the batch: texts are the same where rounding decides nothing."""
    engine, draw = load(paths, "another", "float32"), random.Random(8)
    asked = requests(draw, [SamplingParams()] * 12)
    adapter = dummy_adapter(engine.info.lora_targets, torch.float32, torch.device("cpu"))
    adapters = dict.fromkeys(range(1, len(asked), 3), adapter)
    expected, _ = generated_by(engine, asked, 0, 100, draw, adapters=adapters)
    plain, _ = generated_by(engine, asked, 0, 100, draw)
    assert [one == other for one, other in zip(plain, expected, strict=True)].count(False) >= len(adapters)
    with proposing(ForcedDrafts):
        found, counts = generated_by(engine, asked, 4, 14, draw, adapters=adapters)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert counts["drafted"] > 50


def test_a_model_drafts_what_it_would_choose_itself(paths: dict[str, Path]) -> None:
    kernels_of(CPU_ISA)
    engine, draw = load(paths, "itself"), random.Random(5)
    warm, hot = SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.0, top_p=0.95, top_k=40)
    for sampling in ([SamplingParams(), SamplingParams(), warm, warm, hot, hot], KINDS):
        with proposing(ForcedDrafts):
            _, counts = generated_by(engine, requests(draw, [*sampling]), 5, 40, draw)
        assert counts["kept"] == counts["drafted"] > 50, sampling


@pytest.mark.parametrize("name", slow_except(["tied MLP"], MLPS))
def test_an_mlp_speculator_is_its_formula(paths: dict[str, Path], name: str) -> None:
    """Of the hidden states that transformers gives: with replayed steps, chunks, preemption and other drafts before."""
    config = MLPS[name]
    engine, draw, weights = load(paths, name, "float32"), random.Random(6), random_mlp(config)
    model, num_checked = AutoModelForCausalLM.from_pretrained(paths["itself"], dtype=torch.float32).eval(), 0

    def check(known: list[int], drafted: list[int]) -> None:
        nonlocal num_checked
        states = model.model(torch.tensor([known[:-1]])).last_hidden_state[0, -1]
        tokens = [*torch.tensor([known[-1], *drafted])]
        for scores, token in zip(mlp_logits(config, weights, states, tokens), drafted, strict=False):
            assert scores.max() - scores[token] < 1e-3
            num_checked += 1

    with proposing(ForcedDrafts):
        generated_by(engine, requests(draw, [*KINDS[:3], KINDS[4]] * 3), 3, 14, draw, check=check)
    assert num_checked > 50


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"vocab_size": 96}, "is for a vocabulary of 96, and the model has 97"),
        ({"emb_dim": 96}, "is for hidden states of 96, and the model has 64"),
        ({"n_predict": 64}, "config.json: Expected `int` <= 63 - at `$.n_predict`"),
        ({"n_predict": "3"}, "config.json: Expected `int`, got `str` - at `$.n_predict`"),
        ({"inner_dim": 41}, "has the shape [97, 40], not [97, 41]"),
        ({"tie_weights": False}, "tensors of an MLP speculator are missing, emb.1.weight for one"),
    ],
)
def test_a_speculator_that_does_not_fit_is_refused(
    paths: dict[str, Path], tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    paths = paths | {"broken": save_mlp(tmp_path, TIED | config, random_mlp(TIED))}
    with pytest.raises(StartError) as caught:
        load(paths, "broken")
    assert told in str(caught.value)


def test_a_draft_model_that_does_not_fit_is_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    other = make_model_from_config(make_wide_config("Llama", **LONG, vocab_size=98), tmp_path)
    with pytest.raises(StartError, match="has a vocabulary of 98, and LlamaForCausalLM one of 97"):
        load(paths | {"broken": other}, "broken")
    short = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=255)
    make_model_from_config(short, tmp_path)
    with pytest.raises(StartError, match="MAX_SEQUENCE_LENGTH 256 exceeds the 255 positions of"):
        load(paths | {"broken": tmp_path}, "broken")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(StartError, match=str(tmp_path)):
        load(paths | {"broken": tmp_path}, "broken")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(StartError, match=f"{tmp_path} is an encoder-decoder, which cannot draft"):
        load(paths | {"broken": tmp_path}, "broken")
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    with pytest.raises(StartError, match=str(tmp_path)):
        load(paths | {"broken": tmp_path}, "broken")
    unread = paged_engine(paths["itself"], ROWS, speculation="off", speculator_path=str(tmp_path))
    assert unread.info.drafted_tokens == 0


WHY = FailureKind.GRAMMAR, "no text matches"


@pytest.mark.parametrize(
    ("proposed", "chosen", "failed", "kept"),
    [
        ([], [5], [], [5]),
        ([5, 6], [5, 6, 7], [], [5, 6, 7]),
        ([5, 6], [5, 7, 8], [], [5, 7]),
        ([5, 6], [6, 6, 7], [], [6]),
        ([5, 6], [5, None, 7], [1], [5]),  # scores that are not finite
        ([5, 6], [5, 6, 7], [1], [5]),  # a grammar that could not say what may follow
        ([5, 6], [5, 6, 7], [2], [5, 6]),
        ([5, 6], [4, 6, 7], [1, 2], [4]),
        ([5, 6], [5, 6, 7], [0], None),
    ],
)
@pytest.mark.parametrize("details", [False, True])
def test_what_follows_is_kept(
    proposed: list[int], chosen: list[int | None], failed: list[int], kept: list[int] | None, details: bool
) -> None:
    """Beside a sequence before it and one behind, for which nothing is proposed."""
    options = LogprobOptions(generated_tokens=True, logprobs=details)
    seqs = [Sequence(Request(number, [1, 2], 9, logprob_options=options), 0.0) for number in range(3)]
    for seq in seqs:
        seq.num_computed_tokens = 1
    plan = replace(StepPlan.compute_all(seqs), proposals={1: proposed} if proposed else {})
    rows = with_proposals(plan)
    tokens = [3, *chosen, 4]
    assert [row.tokens for row in rows.seqs[1:-1]] == [[1, 2, *proposed[:count]] for count in range(len(chosen))]
    facts: list[Any] = [[TokenLogprobs(-float(token))] if token else [] for token in tokens] if details else []
    result = StepResult([[token] if token else [] for token in tokens], facts)
    result.failed = {rows.sampled[1 + row].id: WHY for row in failed}
    found = keep_what_follows(plan, rows, result)
    assert found.failed == ({} if kept else {1: WHY})
    assert (found.tokens[0], found.tokens[2]) == ([3], [4])
    if kept:
        assert found.tokens[1] == kept
        assert found.logprobs == [[TokenLogprobs(-float(token)) for token in own] for own in found.tokens] * details
