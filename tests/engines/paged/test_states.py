"""States of recurrent layers on the paged engine: conversations go on from snapshots, failed steps begin again."""

import random
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from batches import engine_options
from step_failures import Failing, check, requests, run
from tiny_models import (
    LLAMA_LIKE,
    RECURRENT,
    TOKEN_IDS,
    VOCAB_SIZE,
    WIDE_RECURRENT,
    limits_of,
    logits_of_chunks,
    make_model,
    make_model_from_config,
    paged_engine,
)

from tgis import engines
from tgis.batcher.batcher import Batcher
from tgis.engines.paged.engine import describe_memory
from tgis.engines.paged.self_check import dummy_sequence, step_logits
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.request import Request


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_from_config(WIDE_RECURRENT["GraniteMoeHybrid, H"], tmp_path_factory.mktemp("model"))


def answer(batcher: Batcher, engine: Any, prompt: list[int]) -> tuple[list[int], int]:
    """The answer to a prompt, and how many tokens were computed for it."""
    (seq,) = batcher.submit([Request(len(prompt), prompt, 9)], 0.0)
    computed = 0
    while not batcher.idle:
        plan = batcher.plan(0.0)
        engine.release(plan.to_release)
        if plan.seqs:
            computed += sum(plan.num_scheduled_tokens)
            batcher.commit(plan, engine.step(plan).tokens, 0.0)
    return seq.tokens[len(prompt) :], computed


def test_each_turn_of_a_conversation_computes_only_what_is_new(granite: Path) -> None:
    engine, draw = paged_engine(granite, 1, cpu_isa="auto"), random.Random(0)  # with two slots
    cached, uncached = (Batcher(limits_of(engine, 90, prefix_cache=on), [2]) for on in (True, False))
    prompt: list[int] = []
    for _ in range(5):
        known = max(len(prompt) - 1, 0) // 16 * 16
        prompt += [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(5, 40))]
        expected, _ = answer(uncached, engine, prompt)
        output, computed = answer(cached, engine, prompt)
        assert output == expected
        assert computed == len(prompt) + len(output) - 1 - known
        prompt += output


def test_sequences_of_failed_steps_begin_again(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged_engine(granite, 8)
    limits = limits_of(engine, 40, prefix_cache=True)
    expected = run(engine, requests(), limits)
    failing: Any = Failing(engine._sampler.sample, OutOfMemory("none left"), {4, 7})  # once the states have changed
    monkeypatch.setattr(engine._sampler, "sample", failing)
    check(run(engine, requests(), limits), expected)


def test_a_failed_recording_leaves_no_trace(granite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is computed again when it cannot be recorded."""
    engine = paged_engine(granite, 4)

    def logits() -> list[list[float]]:
        seq = dummy_sequence([*range(3, 33)], 16)
        return [step_logits(engine.runner.compute_logits, seq, [count]).tolist() for count in (20, *[1] * 10)]

    expected = logits()
    monkeypatch.setattr(engine.runner, "dummy_logits", lambda: None)  # so that the first steps are these
    engine.runner.record_steps(engine.info)
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert logits() == expected


def test_check_knows_the_bytes_of_states(granite: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = paged_engine(granite, 4, speculation="lookup", speculation_max_tokens=5)
    lines = describe_memory(engine_options(granite, 4, engine="tgis_native"))
    assert any("states of recurrent layers: 8 slots" in line for line in lines)
    assert (engine.info.state_slots, engine.info.proposed_tokens) == (8 + 5, 5)
    assert engine.runner.states is not None
    assert {len(states) for states in engine.runner.states._states.values()} == {13}
    assert "MAX_BATCH_SIZE" not in caplog.text
    blocks = engine.info.token_capacity // 16
    assert engine.kv_cache_bytes == engine.info.kv_cache_bytes // blocks * (blocks + 1)  # one for padding
    engine.find_peak(runner := mock.Mock())
    runner.paged_peak.assert_called_once_with(256, blocks + 1)


def test_what_cannot_keep_states_is_refused(granite: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"has recurrent layers: NUM_SHARD must be 1, and the device a CPU$"):
        paged_engine(granite, 4, num_shards=2)
    with pytest.raises(StartError, match=r"keep more than a KV cache \(granitemoehybrid\) are not supported$"):
        engines.describe_memory(engine_options(granite, 4))
    llama = make_model("Llama", tmp_path)
    options: dict[str, Any] = {"speculation": "auto", "speculation_max_tokens": 3, "speculator_path": str(granite)}
    with pytest.raises(StartError, match="cannot draft: states of recurrent layers cannot be taken back"):
        paged_engine(llama, 4, **options)


IMAGES: dict[str, Any] = {
    "Mistral3": ({"model_type": "mistral", "head_dim": 8, "sliding_window": None}, {"model_type": "pixtral"}),
    "Llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 16}),
    "Lfm2Vl": (
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"model_type": "siglip2_vision_model"},
    ),
    "Qwen3_5": (RECURRENT["Qwen3_5Text"], {"depth": 1, "num_heads": 2, "out_hidden_size": 32}),
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14, "num_patches": 16}


@pytest.mark.parametrize("name", IMAGES)
def test_the_text_model_of_a_checkpoint_with_images_is_served(name: str, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    text, vision = IMAGES[name]
    config = getattr(transformers, f"{name}Config")(
        text_config=LLAMA_LIKE | TOKEN_IDS | text, vision_config=VISION | vision
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path)
    tokens = [*range(3, 33)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(
        logits_of_chunks(paged_engine(tmp_path), tokens, [13, 1, 16]), expected, atol=1e-4, rtol=0
    )
    kind = rf"{config.model_type} is served as \w+ForCausalLM, without its other parts"
    assert any(re.fullmatch(kind, message) for message in caplog.messages) == (name != "Qwen3_5")  # which has a class
