"""Models that draft: outputs are those without them, and drafts are what the models give."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options, limits
from cpu_kernels import CPU_ISA, kernels_of
from proposers import ForcedDrafts, proposing
from random_requests import KINDS
from safetensors.torch import save_file
from tiny_models import SHAPE_OF_512, VOCAB_SIZE, make_model_from_config, run_steps
from torch.nn.functional import cross_entropy, gelu
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.self_check import dummy_adapter
from tgis.errors import StartError
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.prompts.lora import LoraAdapter

ROWS = 8
WIDTH, INNER = SHAPE_OF_512["hidden_size"], 40
MLP = {"model_type": "mlp_speculator", "vocab_size": VOCAB_SIZE, "emb_dim": WIDTH, "inner_dim": INNER, "n_predict": 3}
TIED = MLP | {"tie_weights": True, "scale_input": True}
Weights = dict[str, torch.Tensor]
DETAILS = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=3)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models by name: the large one, and what drafts for it."""
    target = make_model_from_config(LlamaConfig(**SHAPE_OF_512), tmp_path_factory.mktemp("target"))
    other = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=256)
    found = {"itself": target, "another": make_model_from_config(other, tmp_path_factory.mktemp("other"))}
    for name, config in (("MLP", MLP), ("tied MLP", TIED)):
        found[name] = save_mlp(tmp_path_factory.mktemp("mlp"), config, random_mlp(config))
    return found


def random_mlp(config: dict[str, Any]) -> Weights:
    """Weights by the names that fms-extras gives them."""
    draw, weights = torch.Generator().manual_seed(0), {}
    for stage in range(2 if config.get("tie_weights") else config["n_predict"]):
        sizes = {"emb": (VOCAB_SIZE, INNER), "head": (VOCAB_SIZE, INNER), "ln": (INNER,)}
        if stage and config.get("tie_weights"):
            sizes = {}
        sizes["proj"] = INNER, INNER if stage else WIDTH
        for name, size in sizes.items():
            weights[f"speculator.{name}.{stage}.weight"] = torch.randn(size, generator=draw) * 0.5 + (name == "ln")
        if "ln" in sizes:
            weights[f"speculator.ln.{stage}.bias"] = torch.randn(INNER, generator=draw) * 0.1
    return weights


def save_mlp(path: Path, config: dict[str, Any], weights: Weights) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")
    return path


def mlp_logits(
    config: dict[str, Any], weights: Weights, state: torch.Tensor, tokens: list[int | None]
) -> list[torch.Tensor]:
    """The scores of each stage after the first of `tokens`; the best of one follows where the next is None."""
    found: list[torch.Tensor] = []
    keep = 0.5 ** (0.5 / config["n_predict"])
    if config.get("scale_input"):
        state = state / (state.square().mean() + 1e-6).sqrt() / 2**0.5
    for stage in range(config["n_predict"]):
        own, first = (0, min(stage, 1)) if config.get("tie_weights") else (stage, stage)
        token = tokens[stage] if stage < len(tokens) else None
        token = int(found[-1].argmax()) if token is None else token
        state = weights[f"speculator.proj.{first}.weight"] @ state
        state = state + weights[f"speculator.emb.{own}.weight"][token] * math.sqrt((1 - keep**2) * INNER / 2) / keep
        state = state / (state.square().mean() + 1e-6).sqrt()
        state = gelu(state * weights[f"speculator.ln.{own}.weight"] + weights[f"speculator.ln.{own}.bias"])
        found.append(weights[f"speculator.head.{own}.weight"] @ state)
    return found


def load(paths: dict[str, Path], drafter: str, dtype: str = "bfloat16") -> PagedEngine:
    options = msgspec.structs.replace(engine_options(paths["itself"], ROWS, threads=2), dtype=dtype)
    options = msgspec.structs.replace(options, speculation="auto", speculator_path=str(paths[drafter]))
    engine = PagedEngine(options)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module", params=["itself", "another", "tied MLP"])
def engine(request: pytest.FixtureRequest, paths: dict[str, Path]) -> PagedEngine:
    kernels_of(CPU_ISA)
    return load(paths, request.param)


def outcomes(
    engine: PagedEngine,
    asked: list[Request],
    drafted: int,
    blocks: int,
    draw: random.Random,
    check: Callable[[list[int], list[int]], None] = lambda *_: None,
    adapters: Mapping[int, LoraAdapter] = {},
) -> tuple[list[Any], Counter[str]]:
    bounds = limits(
        blocks * 16,
        prefix_cache=True,
        proposed_tokens=15,
        drafted_tokens=drafted,
        padded=False,
        block_size=16,
        prefill_tokens=50,
        max_batch_size=ROWS,
    )
    found: dict[int, Any] = {request.id: ([], []) for request in asked}
    counts: Counter[str] = Counter()
    for plan, result, _ in run_steps(engine, bounds, asked, draw, adapters):
        logprobs = result.logprobs or [[]] * len(plan.sampled)
        for row, tokens, facts in zip(plan.sampled, result.tokens, logprobs, strict=True):
            kept = row.num_generated_tokens - len(found[row.id][0])
            found[row.id][0].extend(tokens[:kept])
            found[row.id][1].extend(facts[:kept])
            if row.id in plan.drafts:
                counts["asked"] += plan.drafts[row.id]
                counts["drafted"] += len(plan.proposals.get(row.id, []))
                counts["kept"] += len(tokens) - 1
                known = row.tokens[: row.num_computed_tokens - kept + 1]
                if not row.finished and row.id in plan.proposals:
                    check(known, plan.proposals[row.id])
        counts["preempted"] += sum(not row.finished for row in plan.to_release)
    return [found[request.id] for request in asked], counts


def requests(draw: random.Random, sampling: list[SamplingParams]) -> list[Request]:
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([1, 9, 40, 90]))] for _ in sampling]
    prompts[0][:17] = prompts[-1][:17]
    seeded = [msgspec.structs.replace(each, seed=draw.getrandbits(64)) for each in sampling]
    return [Request(at, prompt, 24, False, seeded[at], DETAILS) for at, prompt in enumerate(prompts)]


def test_drafts_change_nothing(engine: PagedEngine) -> None:
    """With every way to sample, few blocks, and prefixes of the cache."""
    draw = random.Random(4)
    asked = requests(draw, [*KINDS, *KINDS])
    expected, none = outcomes(engine, asked, 0, 100, draw)
    assert not none["asked"]
    preempted = 0
    for most, blocks in ((1, 100), (4, 14), (4, 16), (15, 100)):
        with proposing(ForcedDrafts):
            found, counts = outcomes(engine, asked, most, blocks, draw)
        for request, one, other in zip(asked, found, expected, strict=True):
            assert one == other, (most, request)
        assert counts["drafted"] > 100
        preempted += counts["preempted"]
    assert preempted


def test_drafts_go_together_with_adapters(paths: dict[str, Path]) -> None:
    """Bits of rows with LoRA adapters depend on the batch: texts are the same where rounding decides nothing."""
    engine, draw = load(paths, "another", "float32"), random.Random(8)
    asked = requests(draw, [SamplingParams()] * 12)
    adapter = dummy_adapter(engine.info.lora_targets, torch.float32, torch.device("cpu"))
    adapters = dict.fromkeys(range(1, len(asked), 3), adapter)
    expected, _ = outcomes(engine, asked, 0, 100, draw, adapters=adapters)
    plain, _ = outcomes(engine, asked, 0, 100, draw)
    assert [one == other for one, other in zip(plain, expected, strict=True)].count(False) >= len(adapters)
    with proposing(ForcedDrafts):
        found, counts = outcomes(engine, asked, 4, 14, draw, adapters=adapters)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert counts["drafted"] > 50


def test_a_model_drafts_what_it_would_choose_itself(paths: dict[str, Path]) -> None:
    kernels_of(CPU_ISA)
    engine, draw = load(paths, "itself"), random.Random(5)
    warm, hot = SamplingParams(temperature=0.7, top_p=0.9), SamplingParams(temperature=1.0, top_p=0.95, top_k=40)
    for sampling in ([SamplingParams()] * 6, [warm] * 3 + [hot] * 3, KINDS):
        with proposing(ForcedDrafts):
            _, counts = outcomes(engine, requests(draw, [*sampling]), 5, 40, draw)
        assert counts["kept"] == counts["drafted"] > 80, sampling


@pytest.mark.parametrize(("name", "config"), [("MLP", MLP), ("tied MLP", TIED)])
def test_an_mlp_speculator_is_its_formula(paths: dict[str, Path], name: str, config: dict[str, Any]) -> None:
    """Of the hidden states that transformers gives: with replayed steps, chunks, preemption and other drafts before."""
    engine, draw, weights = load(paths, name, "float32"), random.Random(6), random_mlp(config)
    model, num_checked = AutoModelForCausalLM.from_pretrained(paths["itself"], dtype=torch.float32).eval(), 0

    def check(known: list[int], drafted: list[int]) -> None:
        nonlocal num_checked
        states = model.model(torch.tensor([known[:-1]])).last_hidden_state[0, -1]
        for scores, token in zip(mlp_logits(config, weights, states, [known[-1], *drafted]), drafted, strict=False):
            assert scores.max() - scores[token] < 1e-3
            num_checked += 1

    with proposing(ForcedDrafts):
        outcomes(engine, requests(draw, [*KINDS[:3], KINDS[4]] * 3), 3, 14, draw, check)
    assert num_checked > 50


def test_a_trained_mlp_speculator_is_right_as_often_as_in_training(paths: dict[str, Path], tmp_path: Path) -> None:
    """By heart, for what the model generates for some prompts."""
    draw, model = random.Random(7), AutoModelForCausalLM.from_pretrained(paths["itself"], dtype=torch.float32).eval()
    asked = requests(draw, [SamplingParams()] * 4)
    weights = {name: weight.requires_grad_() for name, weight in random_mlp(MLP).items()}
    optimizer, samples = torch.optim.Adam(weights.values(), lr=0.02), []
    with torch.no_grad():
        for each in asked:
            whole = model.generate(torch.tensor([each.tokens]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
            states = model.model(whole).last_hidden_state[0]
            first = len(each.tokens)
            samples += [(states[at - 1], whole[0, at : at + 4].tolist()) for at in range(first, first + 21)]
    for _ in range(15):
        with torch.enable_grad():
            for state, tokens in samples:
                scores = torch.stack(mlp_logits(MLP, weights, state, tokens[:3]))
                cross_entropy(scores, torch.tensor(tokens[1:])).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = 0
        for state, tokens in samples:
            chain = [int(own.argmax()) for own in mlp_logits(MLP, weights, state, [*tokens[:1]])]
            right += next((at for at in range(3) if chain[at] != tokens[1 + at]), 3)
    share = right / 3 / len(samples)
    paths = paths | {"trained": save_mlp(tmp_path, MLP, {name: each.detach() for name, each in weights.items()})}
    with proposing(ForcedDrafts):
        _, counts = outcomes(load(paths, "trained", "float32"), asked, 3, 40, draw)
    assert 0.7 < share == pytest.approx(counts["kept"] / counts["drafted"], abs=0.15)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"vocab_size": 96}, "is for a vocabulary of 96, and the model has 97"),
        ({"emb_dim": 64}, "is for hidden states of 64, and the model has 96"),
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
    other = make_model_from_config(LlamaConfig(**SHAPE_OF_512 | {"vocab_size": 98}), tmp_path)
    with pytest.raises(StartError, match="has a vocabulary of 98, and LlamaForCausalLM one of 97"):
        load(paths | {"broken": other}, "broken")
    short = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=255)
    make_model_from_config(short, tmp_path)
    with pytest.raises(StartError, match="MAX_SEQUENCE_LENGTH 256 exceeds the 255 positions of"):
        load(paths | {"broken": tmp_path}, "broken")
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(StartError, match=str(tmp_path)):
        load(paths | {"broken": tmp_path}, "broken")
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    with pytest.raises(StartError, match=str(tmp_path)):
        load(paths | {"broken": tmp_path}, "broken")
