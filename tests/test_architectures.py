"""The padded engine on many architectures: rows that join and leave at random give what transformers gives alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from batches import engine_options, limits
from tiny_models import (
    ARCHITECTURES,
    BART_LIKE,
    ENCODER_DECODERS,
    EOS,
    SMALL,
    START,
    T5_LIKE,
    VOCABULARY,
    make_model,
    run,
)
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tgis.batcher.weights import Limits
from tgis.engines.base import Engine
from tgis.engines.hf_transformers import TransformersEngine
from tgis.engines.tgis_native import PagedEngine
from tgis.errors import StartError, Unsupported
from tgis.messages import Details, Request, Sampling

NEW_TOKENS = 12
NEAR_TIE = 1e-3  # a difference of the best two logits that may fall either way


class Reference:
    """What transformers says, in one plain pass over all tokens of one row."""

    def __init__(self, directory: Path) -> None:
        self.encoder_decoder = transformers.AutoConfig.from_pretrained(directory).is_encoder_decoder
        family = AutoModelForSeq2SeqLM if self.encoder_decoder else AutoModelForCausalLM
        self.model: PreTrainedModel = family.from_pretrained(directory, dtype=torch.float32).eval()

    def logits(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """Those that choose the token after the prompt, and after each of the others: [1 + tokens, V]."""
        with torch.no_grad():
            if self.encoder_decoder:
                outputs = torch.tensor([[START, *tokens]])
                return self.model(torch.tensor([prompt]), decoder_input_ids=outputs).logits[0].float()
            return self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 :].float()


# their attention does not go through transformers' interface
PADDED_ONLY = ("CodeGen", "Bloom", "Falcon", "Falcon, 40b", "Falcon, alibi", "GPTJ", "GPTNeo", "Mpt")


@pytest.mark.parametrize("name", [*ARCHITECTURES, *ENCODER_DECODERS])
def test_padded_rows_joining_at_random_equal_solo_runs(name: str, tmp_path: Path) -> None:
    directory = make_model(name, tmp_path)
    engine = TransformersEngine(engine_options(directory, 6, threads=1))
    check(directory, engine, limits(100_000, max_batch_size=6, prefill_tokens=512))


@pytest.mark.parametrize("name", [*ARCHITECTURES, "T5", "Bart"])
def test_paged_rows_joining_at_random_equal_solo_runs(name: str, tmp_path: Path) -> None:
    """In chunks of any size, with so few blocks that rows are preempted, and with cached prefixes."""
    directory = make_model(name, tmp_path)
    options = engine_options(directory, 6, threads=1)
    if name in PADDED_ONLY or name in ENCODER_DECODERS:
        with pytest.raises(Unsupported):
            PagedEngine(options)
        return
    bounds = limits(80, padded=False, block_size=16, prefix_cache=True, max_batch_size=6, prefill_tokens=7)
    check(directory, PagedEngine(options), bounds)


def check(directory: Path, engine: Engine, bounds: Limits) -> None:
    """Prompts that come at random times get what transformers gives each alone."""
    reference = Reference(directory)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    prompts += [prompts[-1][:9] + prompts[0][:9], prompts[-1] + prompts[0]]
    requests = [Request(n, p, NEW_TOKENS, False, Sampling(), Details()) for n, p in enumerate(prompts)]
    generated = run(engine, bounds, requests, rng)
    clear = [assert_greedy(reference, prompt, tokens) for prompt, tokens in zip(prompts, generated, strict=True)]
    assert sum(clear) > 0.8 * sum(map(len, generated))
    assert_context_matters(reference, prompts, generated)


LED_LIKE = BART_LIKE | {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2}, "keep more than a KV cache"),
    ("LED", LED_LIKE | {"attention_window": 8}, "sees padding"),
    ("SwitchTransformers", T5_LIKE | {"num_experts": 2}, "shares experts among rows"),
    ("ProphetNet", {"hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}, "sees padding"),
]


@pytest.mark.parametrize(("name", "settings", "reason"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_model_whose_rows_cannot_join_and_leave_is_refused(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL, decoder_start_token_id=START, **settings)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    family.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(StartError, match=reason):
        TransformersEngine(engine_options(tmp_path, 6, threads=1))


def test_a_model_without_a_start_token_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(**SMALL | {"bos_token_id": None}, **T5_LIKE)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(StartError, match="decoder_start_token_id of a model of type t5 must be one token, not None"):
        TransformersEngine(engine_options(tmp_path, 6, threads=1))


def assert_context_matters(reference: Reference, prompts: list[list[int]], generated: list[list[int]]) -> None:
    """A model that looks at the last token only would pass whatever became of the others."""
    first = [best(reference, prompt, []) != best(reference, prompt[-1:], []) for prompt in prompts]
    assert sum(first) >= len(prompts) / 4
    if reference.encoder_decoder:
        pairs = list(zip(prompts, generated, strict=True))
        last = [best(reference, prompt, tokens[:8]) != best(reference, prompt, tokens[7:8]) for prompt, tokens in pairs]
        assert sum(last) >= len(prompts) / 4


def best(reference: Reference, prompt: list[int], tokens: list[int]) -> int:
    return int(reference.logits(prompt, tokens)[-1].argmax())


def assert_greedy(reference: Reference, prompt: list[int], tokens: list[int]) -> int:
    """Every token is the best one after those before it; of how many no other could have passed."""
    logits = reference.logits(prompt, tokens)[:-1]
    assert len(tokens) == NEW_TOKENS or tokens[-1] == EOS
    for scores, token in zip(logits, tokens, strict=True):
        assert scores.max() - scores[token] < NEAR_TIE
    best = logits.topk(2).values
    return int((best[:, 0] - best[:, 1] > 2 * NEAR_TIE).sum())
