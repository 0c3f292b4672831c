"""Soft prompts in both engines, of every kind of model: what PEFT or the tokens of their embeddings generate."""

import math
import random
import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from adapter_batches import ENGINES, PLACEHOLDER, AdapterRequest, EngineSetup, check_mixed, generate_all, make_setup
from peft import PeftModelForCausalLM, PromptTuningConfig
from slow_cases import slow_except
from tiny_models import DECODER_START, EOS, VOCAB_SIZE, check_best, make_model
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tgis.batcher.sequence import Sequence
from tgis.engines.padded.model import MAX_PREFILL_TOKENS, TransformersModel
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.request import LogprobOptions, Request
from tgis.prompts.soft_prompt import SoftPrompt


@pytest.fixture(scope="module", params=ENGINES)
def setup(request: pytest.FixtureRequest, glassllm_dir: Path) -> EngineSetup:
    return make_setup(request.param, glassllm_dir)


@pytest.fixture(scope="module")
def glassllm(glassllm_dir: Path) -> Any:
    """The model in transformers."""
    return AutoModelForCausalLM.from_pretrained(glassllm_dir, dtype=torch.float32).eval()


def embeddings_of(reference: Any, tokens: list[int], version: int = 1) -> SoftPrompt:
    """A soft prompt of the embeddings of these tokens."""
    return SoftPrompt(version, reference.get_input_embeddings().weight.detach()[tokens])


def test_placeholders_are_no_history_of_a_repetition_penalty() -> None:
    seq, engine = Sequence(Request(1, [0, 0, 5, 6], 9, adapter=AdapterRef("p", 2, 0, 1, 1)), 0.0), mock.Mock()
    assert TransformersModel.token_history(engine, seq) == [5, 6]


def test_a_prompt_of_token_embeddings_equals_these_tokens(setup: EngineSetup, glassllm: Any) -> None:
    """The logprobs of the real tokens are the same, too."""
    words, tokens = [40, 41, 300, 7, 99], [500, 62, 17, 300]
    details = LogprobOptions(input_tokens=True, logprobs=True, ranks=True)
    jobs = [
        AdapterRequest(tokens, embeddings_of(glassllm, words), 12, details),
        AdapterRequest(words + tokens, None, 12, details),
    ]
    generated, (ours, real) = generate_all(setup, jobs)
    assert generated[0] == generated[1]
    assert len(ours) == len(real) == len(words) + len(tokens)
    assert math.isnan(ours[0].logprob)  # as for any first token
    for one, other in zip(ours[len(words) :], real[len(words) :], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.rank == other.rank


def test_cached_blocks_are_not_shared_between_prompts(setup: EngineSetup, glassllm: Any) -> None:
    """All sequences have the same ids, enough to fill blocks: placeholders, and real tokens of the same id."""
    tokens = [500, 62, 17, 300]
    draw = random.Random(3)
    words = [[draw.randrange(4, 1024) for _ in range(40)] for _ in range(3)]
    prompts = [embeddings_of(glassllm, some, version) for version, some in enumerate(words, 1)]
    bare = [AdapterRequest(some + tokens, None, 8) for some in [*words, [PLACEHOLDER] * 40]]
    expected, _ = generate_all(setup, bare)
    assert len({tuple(some) for some in expected}) == 4
    jobs = [*(AdapterRequest(tokens, prompt, 8) for prompt in prompts), bare[3]]
    generated, _ = generate_all(setup, jobs * 3, seed=5)
    assert generated == expected * 3


# what the models do to embeddings: nothing, scale them in two ways, norm them, add positions
MODELS = ["Llama", "Gemma", "Gemma3Text", "Bloom", "GPT2", "OPT"]
FAST = [("Gemma", "paged"), ("Bloom", "padded"), ("OPT", "paged")]


@pytest.mark.parametrize(("name", "kind"), slow_except(FAST, product(MODELS, ENGINES)))
def test_every_kind_of_model_generates_what_peft_generates(name: str, tmp_path: Path, kind: str) -> None:
    tiny = make_model(name, tmp_path)
    setup = make_setup(kind, tiny)
    bare = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    adapted = [with_prompt(tiny, length) for length in (1, 4, 9)]
    assert check_mixed(setup, [bare, *adapted], [None, *map(soft_prompt_of, adapted)]) >= 2


@pytest.mark.parametrize("kind", slow_except(["paged"], ENGINES))
def test_embeddings_narrower_than_the_model(tmp_path: Path, kind: str) -> None:
    """OPT projects them; PEFT cannot train prompts for such a model, but TGIS served them."""
    model = make_model("OPT, 350m", tmp_path)
    setup = make_setup(kind, model)
    assert setup.engine.info.embedding_size == 16
    soft = SoftPrompt(1, torch.randn((3, 16), generator=torch.Generator().manual_seed(0)))
    tokens = [5, 9, 11, 40]
    (generated,), _ = generate_all(setup, [AdapterRequest(tokens, soft, 8)], eos=EOS)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    table = reference.get_input_embeddings()
    with torch.no_grad():
        assert soft.decoder is not None
        embedded = torch.cat([soft.decoder, table(torch.tensor(tokens + generated))])
        logits = reference(inputs_embeds=embedded[None]).logits[0, -len(generated) - 1 : -1]
    assert generated == logits.argmax(-1).tolist()


def with_prompt(model: Path, length: int) -> Any:
    """A PEFT model with a random prompt, large enough to matter."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from PEFT, about deprecations in transformers
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=length, num_attention_heads=4)
        adapted = PeftModelForCausalLM(base, config)
    torch.nn.init.normal_(adapted.prompt_encoder["default"].embedding.weight, std=0.7)
    return adapted.eval()


def soft_prompt_of(adapted: Any) -> SoftPrompt:
    return SoftPrompt(1, adapted.get_prompt_embedding_to_save("default"))


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_except(
        [("T5", "padded"), ("Marian", "paged")],
        product(("T5", "Bart", "Marian", "T5Gemma", "M2M100", "Pegasus"), ENGINES),
    ),
)
def test_prompts_of_the_encoder_the_decoder_and_both(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch; the decoder's prompts are computed in chunks, and some inputs contain the padding token."""
    monkeypatch.setitem(MAX_PREFILL_TOKENS, "cpu", 6)
    model = make_model(name, tmp_path)
    reference = AutoModelForSeq2SeqLM.from_pretrained(model, dtype=torch.float32).eval()
    setup, rng = make_setup(kind, model), random.Random(2)
    draw = torch.Generator().manual_seed(1)
    first, second, third = (torch.randn((rows, 32), generator=draw) for rows in (4, 2, 7))
    prompts = [
        None,
        SoftPrompt(1, None, first, encoder_decoder=True),
        SoftPrompt(2, second, None, encoder_decoder=True),
        SoftPrompt(3, third, second, encoder_decoder=True),
    ]
    assert [prompt.length for prompt in prompts if prompt] == [4, 3, 10]  # as TGIS counts, with the start token
    tokens = [[rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(3, 16))] for _ in range(16)]
    for n in (4, 8):
        tokens[n][1] = PLACEHOLDER
    details = LogprobOptions(input_tokens=True, logprobs=True)
    generated, inputs = generate_all(
        setup, [AdapterRequest(tokens[n], prompts[n % 4], 10, details) for n in range(16)], eos=EOS
    )
    clear = [check_answer(reference, tokens[n], prompts[n % 4], generated[n]) for n in range(16)]
    assert sum(clear) > 0.8 * sum(map(len, generated))
    assert [len(inputs[n]) - len(tokens[n]) for n in range(4)] == [0, 4, 0, 2]  # the encoder's virtual tokens
    bare, _ = generate_all(setup, [AdapterRequest(some, None, 10) for some in tokens], eos=EOS)
    for n in (1, 2, 3):
        assert generated[n::4] != bare[n::4]


def seen(model: Any, tokens: list[int], prompt: SoftPrompt | None, output: list[int]) -> torch.Tensor:
    """The logits of one forward pass with the prompts before the embeddings, [1 + output, V]."""
    encoder, decoder = model.get_encoder(), model.get_decoder()
    given: dict[str, torch.Tensor] = {"input_ids": torch.tensor([tokens]), "attention_mask": torch.ones(1, len(tokens))}
    if prompt is not None and prompt.encoder is not None:
        rest = encoder.get_input_embeddings()(torch.tensor(tokens))
        given = {"inputs_embeds": torch.cat([prompt.encoder, rest])[None]}
    outputs = torch.tensor([DECODER_START, *output])
    if prompt is not None and prompt.decoder is not None:
        rest = decoder.get_input_embeddings()(outputs)
        given["decoder_inputs_embeds"] = torch.cat([prompt.decoder, rest])[None]
    else:
        given["decoder_input_ids"] = outputs[None]
        given["decoder_attention_mask"] = torch.ones(1, len(outputs))
    with torch.no_grad():
        logits: torch.Tensor = model(**given).logits[0, -1 - len(output) :].float()
    return logits


def check_answer(model: Any, tokens: list[int], prompt: SoftPrompt | None, output: list[int]) -> int:
    """Every token has the highest logit; how many of them are no near tie. Behind a padding token the positions of
    M2M100 are others in a single pass.
    """
    output = output[: [*output, PLACEHOLDER].index(PLACEHOLDER) + 1]
    return check_best(seen(model, tokens, prompt, output)[: len(output)], output)
