"""Many architectures: which engine runs them, and that rows which join and leave at random get what they get alone."""

import dataclasses
import random
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from batches import engine_options, limits
from repository import REPOSITORY
from slow_cases import slow_except
from tiny_models import (
    ARCHITECTURES,
    BART_LIKE,
    ENCODER_DECODERS,
    EOS,
    GPT2_LIKE,
    LLAMA_LIKE,
    MORE_ARCHITECTURES,
    RECURRENT,
    REFUSED_ENCODER_DECODERS,
    T5_LIKE,
    TOKEN_IDS,
    VOCAB_SIZE,
    check_greedy,
    generate_all,
    limits_of,
    make_config,
    make_model,
    make_model_from_config,
)
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODEL_FOR_CAUSAL_LM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as MODEL_FOR_SEQ_TO_SEQ,
)

from tgis.batcher.capacity import BatchLimits
from tgis.engines import load_engine
from tgis.engines.base import Engine
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.paged.engine import PagedEngine
from tgis.errors import StartError, Unsupported
from tgis.ipc.request import Request

NEW_TOKENS = 12
# kinds of attention, positions, heads and layers that no other fast test has
FAST = {"Mistral", "OPT, 350m", "GPTBigCode", "Falcon, 40b", "GptOss", "DeepseekV3", "T5", "Bart", "M2M100"}
FAST |= {"Qwen3Next", "GraniteMoeHybrid, H", "Jamba", "Lfm2", "T5Gemma", "Zamba2"}


def read_table() -> dict[str, tuple[str, str]]:
    """By class: the engine, and why not tgis_native."""
    rows = re.findall(
        r"^\| (\w+) \| .+? \| (\w+) \| (.*?) ?\|$", (REPOSITORY / "docs/models.md").read_text(), re.MULTILINE
    )
    return {name: (engine, why) for name, engine, why in rows if name != "Class"}


TABLE = read_table()
MESSAGES = {  # for each reason in the table
    "custom mask: the logits do not agree": "does not give the model's own (attention|logits)",
    "custom attention": "0 of 2 layers use replaceable attention",
    "difference of two attentions: the logits do not agree": "does not give the model's own (attention|logits)",
    "custom cross-attention": r"the cross-attention of \w+ForConditionalGeneration has no hook",
    "unsupported recurrent state": r"keep more than a KV cache \([a-z]\w+\) are not supported",
    "padding changes results": "sees padding",
    "sequences compete for experts": "shares experts among rows",
}


def class_name(name: str) -> str:
    """That transformers loads a model of this name as."""
    config = make_config(name)
    names: dict[str, str] = MODEL_FOR_SEQ_TO_SEQ if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM
    return names[config.model_type]


def not_native(names: Iterable[str]) -> list[str]:
    return [name for name in names if TABLE[class_name(name)][0] != "tgis_native"]


BATCHED = [*ARCHITECTURES, *ENCODER_DECODERS]


@pytest.mark.parametrize(
    "name", slow_except(["Llama", *not_native(BATCHED)], [name for name in BATCHED if name not in RECURRENT])
)
def test_padded_rows_joining_at_random_equal_solo_runs(name: str, tmp_path: Path) -> None:
    directory = make_model(name, tmp_path)
    engine = PaddedEngine(engine_options(directory, 6))
    check(directory, engine, limits(100_000, max_batch_size=6, prefill_tokens=512))


@pytest.mark.parametrize("name", slow_except(FAST, BATCHED))
def test_paged_rows_joining_at_random_equal_solo_runs(name: str, tmp_path: Path) -> None:
    """In chunks of any size, with so few blocks that rows are preempted, and with cached prefixes."""
    directory = make_model(name, tmp_path)
    options = engine_options(directory, 6)
    engine, why = TABLE[class_name(name)]
    if engine != "tgis_native":
        with pytest.raises(Unsupported, match=MESSAGES[why]):
            PagedEngine(options)
        return
    bounds = limits(80, padded=False, block_size=16, prefix_cache=True, max_batch_size=6, prefill_tokens=7)
    kind = (
        {"state_slots": 9}
        if name in RECURRENT
        else {"proposed_tokens": 3, "encoder_decoder": make_config(name).is_encoder_decoder}
    )
    check(directory, PagedEngine(options), dataclasses.replace(bounds, **kind))


def check(directory: Path, engine: Engine, bounds: BatchLimits) -> None:
    """Prompts that come at random times get what transformers gives each alone."""
    family = AutoModelForSeq2SeqLM if engine.info.encoder_decoder else AutoModelForCausalLM
    model, rng = family.from_pretrained(directory, dtype=torch.float32).eval(), random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    prompts += [prompts[-1][:9] + prompts[0][:9], prompts[-1] + prompts[0]]
    requests = [Request(n, prompt, NEW_TOKENS) for n, prompt in enumerate(prompts)]
    generated = generate_all(engine, bounds, requests, rng)
    assert all(len(tokens) == NEW_TOKENS or tokens[-1] == EOS for tokens in generated)
    clear = [check_greedy(model, prompt, tokens) for prompt, tokens in zip(prompts, generated, strict=True)]
    assert sum(clear) > 0.8 * sum(map(len, generated))


NOT_BATCHED = [*MORE_ARCHITECTURES, *REFUSED_ENCODER_DECODERS]


@pytest.mark.parametrize("name", slow_except(not_native(NOT_BATCHED), NOT_BATCHED))
def test_models_run_where_the_table_says(name: str, tmp_path: Path) -> None:
    engine, why = TABLE[class_name(name)]
    options = engine_options(make_model(name, tmp_path), 6)
    if engine == "none":
        with pytest.raises(StartError, match=MESSAGES[why]):
            load_engine(msgspec.structs.replace(options, engine="auto"), sys.exit, print)
    elif engine == "hf_transformers":
        with pytest.raises(Unsupported, match=MESSAGES[why]):
            PagedEngine(options)
        PaddedEngine(options).warm_up()
    else:
        PagedEngine(options).warm_up()


def test_the_table_lists_what_was_tried() -> None:
    tried = [*ARCHITECTURES, *MORE_ARCHITECTURES, *ENCODER_DECODERS, *REFUSED_ENCODER_DECODERS]
    assert TABLE.keys() == {class_name(name) for name in tried}


@pytest.mark.parametrize("name", ["Llama4Text", "Phimoe"])
def test_layers_that_keep_their_windows_to_themselves_are_not_paged_for_longer_texts(name: str, tmp_path: Path) -> None:
    """The models see 256 tokens."""
    options = engine_options(make_model(name, tmp_path), 6)
    PagedEngine(msgspec.structs.replace(options, max_sequence_length=256))
    with pytest.raises(Unsupported, match=r"256 do not pass it to their attention function$"):
        PagedEngine(msgspec.structs.replace(options, max_sequence_length=257))


DECODERS = ["Bart", "BlenderbotSmall", "Blenderbot", "MBart", "Marian", "Mvp", "PLBart", "Pegasus", "TrOCR"]
BERT_LIKE = LLAMA_LIKE | TOKEN_IDS
# a batch size of 1 where positions would count padding
FALLING_BACK: list[tuple[str, Any]] = [
    ("XLMRobertaForCausalLM", transformers.XLMRobertaConfig(**BERT_LIKE, is_decoder=True)),
    *((f"{name}ForCausalLM", getattr(transformers, f"{name}Config")(**BART_LIKE | TOKEN_IDS)) for name in DECODERS),
]


def save_model(kind: str, config: Any, directory: Path) -> None:
    """A model of this class with random weights."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.generation_config.update(_from_model_config=False)
    model.save_pretrained(directory)


@pytest.mark.parametrize(
    ("kind", "config"),
    slow_except(FALLING_BACK[:2], FALLING_BACK),
    ids=lambda value: str(value).split()[0],
)
def test_decoders_that_count_padding_get_one_sequence_at_a_time(
    kind: str, config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.is_encoder_decoder, config.is_decoder = False, True
    save_model(kind, config, tmp_path)
    options = engine_options(tmp_path, 6, engine="auto", max_sequence_length=128)
    engine, reason = load_engine(options, sys.exit, print)
    assert reason.startswith("not tgis_native: ")
    assert engine.info.max_batch_size == 1
    assert f"MAX_BATCH_SIZE is 1: positions of {kind} count padding" in caplog.text
    check(tmp_path, engine, limits(100_000, max_batch_size=1, prefill_tokens=512))


@pytest.mark.parametrize(
    ("kind", "config", "error"),
    [
        ("RobertaForCausalLM", transformers.RobertaConfig(**BERT_LIKE), "a KV cache does not give the logits of R"),
        ("OpenAIGPTLMHeadModel", transformers.OpenAIGPTConfig(**GPT2_LIKE, **TOKEN_IDS), ".* be run: RuntimeError: "),
    ],
)
def test_what_the_last_engine_cannot_run_either(kind: str, config: Any, error: str, tmp_path: Path) -> None:
    """Attention to later tokens, and a model without a cache: each is refused in one line."""
    save_model(kind, config, tmp_path)
    with pytest.raises(StartError, match=f"^{error}.*$"):
        load_engine(engine_options(tmp_path, 6, engine="auto"), sys.exit, print)


def test_the_text_part_of_a_model_of_images_and_text(tmp_path: Path) -> None:
    """Gemma 3 pools images by a module without parameters, which fails on any text."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = make_config("Gemma3Text").to_dict()
    images = sizes | {"image_size": 28, "patch_size": 7}
    config = transformers.Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4, **TOKEN_IDS)
    directory = make_model_from_config(config, tmp_path)
    engine = load_engine(engine_options(directory, 6, engine="tgis_native"), sys.exit, print)[0]
    check(directory, engine, limits_of(engine, 80))


def test_a_model_without_a_start_token_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(**TOKEN_IDS | {"bos_token_id": None}, **T5_LIKE)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(StartError, match="decoder_start_token_id of an encoder-decoder must be one token, not None"):
        PaddedEngine(engine_options(tmp_path, 6))
