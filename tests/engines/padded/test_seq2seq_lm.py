"""Encoder-decoder models beyond greedy tokens: generation configs, penalties, prompt logprobs, limits."""

import math
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import engine_options, limits
from tiny_models import (
    DECODER_START,
    EOS,
    VOCAB_SIZE,
    generate_all,
    limits_of,
    make_config,
    make_model,
    make_model_from_config,
    outcomes,
)
from transformers import AutoModelForSeq2SeqLM

from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import StartError
from tgis.ipc.lookups import GrammarKind, GrammarSpec, Vocabulary
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import TokenTable

NEW_TOKENS = 12
GREEDY = SamplingParams()
Outputs = list[list[int]]


def prompts() -> Outputs:
    rng = random.Random(2)
    return [[rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 20))] for _ in range(6)]


def requests(sampling: SamplingParams = GREEDY, details: LogprobOptions | None = None) -> list[Request]:
    return [
        Request(n, prompt, NEW_TOKENS, False, sampling, details or LogprobOptions())
        for n, prompt in enumerate(prompts())
    ]


def generate(directory: Path, **settings: Any) -> Outputs:
    """What transformers generates for each prompt alone."""
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    settings |= {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    outputs = [model.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts()]
    assert {output[0] for output in outputs} == {DECODER_START}
    return [output[1:] for output in outputs]


def joined(directory: Path, wanted: list[Request], seed: int) -> Outputs:
    """What the engine generates for requests that arrive at random times."""
    engine = PaddedEngine(engine_options(directory, 6))
    return generate_all(engine, limits(100_000, max_batch_size=6, prefill_tokens=512), wanted, random.Random(seed))


def load(directory: Path) -> PaddedEngine:
    engine = PaddedEngine(engine_options(directory, 8))
    engine.warm_up()
    return engine


@pytest.mark.parametrize(
    ("name", "rule"), [("Marian", "forced_bos_token_id"), ("Marian", "suppress_tokens"), ("T5", "bad_words_ids")]
)
def test_the_generation_config_is_obeyed(name: str, rule: str, tmp_path: Path) -> None:
    # without the EOS that BART and others force on truncated outputs, which end by their length here
    plain = generate(make_model(name, tmp_path / "plain", forced_eos_token_id=None))
    first, second = (token for token, _ in Counter(chain(*plain)).most_common(2))
    values = {"forced_bos_token_id": 7, "bad_words_ids": [[first], [second]], "suppress_tokens": [first, second]}
    directory = make_model(name, tmp_path / "ruled", forced_eos_token_id=None, **{rule: values[rule]})
    expected = generate(directory)
    assert expected != plain, "the rule changes nothing"
    assert joined(directory, requests(), 3) == expected


FORCED, LETTERS = 7, {10: "a", 11: "b", 12: "c", 13: "d"}
TABLE = TokenTable(Vocabulary([LETTERS.get(id_, "").encode() for id_ in range(VOCAB_SIZE)]), VOCAB_SIZE, [EOS], FORCED)
ALLOWED = SamplingParams(allowed_token_ids=(*LETTERS, EOS))


@pytest.mark.parametrize(("name", "engine"), [("Marian", PaddedEngine), ("Bart", PagedEngine)])
@pytest.mark.parametrize(
    ("sampling", "is_allowed", "pattern"),
    [
        (
            GREEDY,
            lambda token, text: len(text) < 5 if token in LETTERS else len(text) > 2 and token == EOS,
            "[a-d]{3,5}",
        ),
        (ALLOWED, lambda token, _: token in (*LETTERS, EOS), None),
        (SamplingParams(bad_words=((FORCED,),)), lambda token, _: token != FORCED, None),
        (
            SamplingParams(stop_token_ids=(FORCED,), min_new_tokens=NEW_TOKENS),
            lambda token, _: token not in (EOS, FORCED),
            None,
        ),
    ],
)
def test_nothing_excludes_the_token_that_the_model_forces(
    sampling: SamplingParams, is_allowed: Any, pattern: str | None, name: str, engine: Any, tmp_path: Path
) -> None:
    """Each output is that token, and then the best of those that are left, as transformers scores them."""
    directory = make_model(name, tmp_path, forced_bos_token_id=FORCED)
    loaded = engine(engine_options(directory, 6))
    loaded.warm_up()

    def prepare(seq: Sequence) -> None:
        seq.grammar = compile_grammar(GrammarSpec(GrammarKind.REGEX, pattern), TABLE) if pattern else None

    assert loaded.info.forced_bos_token_id == FORCED
    bounds = limits(100_000, prefill_tokens=512) if loaded.info.padded else limits_of(loaded, 400)
    found = outcomes(loaded, bounds, requests(sampling), random.Random(1), prepare=prepare)[0]
    model = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    for prompt, outcome in zip(prompts(), found.values(), strict=True):
        assert outcome.tokens[0] == FORCED
        logits = model(
            torch.tensor([prompt]), decoder_input_ids=torch.tensor([[DECODER_START, *outcome.tokens]])
        ).logits
        for index, token in enumerate(outcome.tokens[1:], 1):
            left = [id_ for id_ in range(1, VOCAB_SIZE) if is_allowed(id_, outcome.tokens[1:index])]
            assert token == max(left, key=logits[0, index].tolist().__getitem__)
        assert outcome.tokens[-1] == EOS or len(outcome.tokens) == NEW_TOKENS


@pytest.mark.parametrize(("encoder", "decoder"), [(60, VOCAB_SIZE), (VOCAB_SIZE, 60)])
def test_inputs_are_of_the_vocabulary_of_the_encoder(encoder: int, decoder: int, tmp_path: Path) -> None:
    config = make_config("T5Gemma")
    config.encoder.vocab_size, config.decoder.vocab_size = encoder, decoder
    config.vocab_size = decoder
    info = load(make_model_from_config(config, tmp_path)).info
    assert (info.input_vocab_size, info.vocab_size) == (encoder, decoder)


@pytest.mark.parametrize("rule", ["forced_bos_token_id", "decoder_start_token_id"])
def test_a_generation_config_with_tokens_beyond_the_vocabulary(rule: str, tmp_path: Path) -> None:
    """Suppressing them changes nothing."""
    suppress = {"bad_words_ids": [[VOCAB_SIZE]], "suppress_tokens": [VOCAB_SIZE, 5000]}
    directory = make_model("T5", tmp_path / "suppressed", **suppress)
    assert joined(directory, requests(), 3) == joined(make_model("T5", tmp_path / "plain"), requests(), 3)
    with pytest.raises(StartError, match=rf"^{rule} {VOCAB_SIZE} is not in the model's vocabulary of {VOCAB_SIZE}$"):
        load(make_model("T5", tmp_path / "forced", **{rule: VOCAB_SIZE}))


def test_a_repetition_penalty_applies_to_the_output(tmp_path: Path) -> None:
    """As in generate, the start token counts and the input does not."""
    directory = make_model("Bart", tmp_path, forced_eos_token_id=None)
    expected = generate(directory, repetition_penalty=1.7)
    assert expected != generate(directory)
    assert joined(directory, requests(SamplingParams(repetition_penalty=1.7)), 4) == expected


def test_prompt_logprobs_are_empty(tmp_path: Path) -> None:
    engine = load(make_model("T5", tmp_path))
    plain, full = (
        LogprobOptions(input_tokens=True),
        LogprobOptions(input_tokens=True, logprobs=True, ranks=True, top_n_tokens=3),
    )
    asked = [*requests(details=plain)[:2], *requests(details=full)[2:4], *requests()[4:6]]
    found = engine.step(StepPlan.compute_all([Sequence(request, 0.0) for request in asked])).prompt_logprobs
    assert list(found) == [0, 1, 2, 3]
    for request in asked[:4]:
        facts = found[request.id]
        assert len(facts) == len(request.tokens)
        assert all(math.isnan(fact.logprob) == request.logprob_options.logprobs for fact in facts)
        assert {(fact.rank, len(fact.top_logprobs)) for fact in facts} == {(0, 0)}


@pytest.mark.parametrize(("name", "most"), [("Bart", 128), ("M2M100", 128), ("T5", 256)])
def test_position_embeddings_are_a_limit(name: str, most: int, tmp_path: Path) -> None:
    engine = load(make_model(name, tmp_path))  # for sequences of 256
    assert engine.info.max_positions == most
    assert engine.info.encoder_decoder
    seq = Sequence(Request(1, [5] * most, most, False, SamplingParams(), LogprobOptions()), 0.0)
    engine.step(StepPlan.compute_all([seq]))
    seq.tokens += [6] * (most - 1)  # as if generated; the last is to be computed
    seq.num_computed_tokens = 0
    engine.release([seq])
    engine.step(StepPlan.compute_all([seq]))
