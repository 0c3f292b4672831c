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
from typing import Any, TypeAlias

import pytest
import torch
import transformers
import yaml
from batches import commit, engine_options, limits
from repository import REPOSITORY
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

_TABLE = yaml.safe_load((REPOSITORY / "tests/golden/architectures.yaml").read_text())
Settings: TypeAlias = dict[str, Any]
_NAMES = "TOKEN_IDS", "LLAMA_LIKE", "GPT2_LIKE", "T5_LIKE", "BART_LIKE"
TOKEN_IDS, LLAMA_LIKE, GPT2_LIKE, T5_LIKE, BART_LIKE = (_TABLE["shared"][name] for name in _NAMES)
RECURRENT: dict[str, Settings] = _TABLE["recurrent"]
ARCHITECTURES: dict[str, Settings] = _TABLE["architectures"] | RECURRENT
MORE_ARCHITECTURES: dict[str, Settings] = _TABLE["more_architectures"]
ENCODER_DECODERS: dict[str, Settings] = _TABLE["encoder_decoders"]
REFUSED_ENCODER_DECODERS: dict[str, Settings] = _TABLE["refused_encoder_decoders"]


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
