"""`python -m benchmarks.encoder_decoders` on a tiny model, and its parts without CTranslate2 and near ties."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import encoder_decoders
from benchmarks.encoder_decoders import CTRANSLATE2, NATIVE, REFERENCE, SYSTEMS, Figures, compare, summarize_rounds
from benchmarks.peer_engine import CTranslate2, run_load
from benchmarks.random_models import ENCODER_DECODERS, OPUS_MT, Load, Model, step_weights

SMALL = {"vocab_size": 512, "pad_token_id": 511, "decoder_start_token_id": 511, "d_model": 16}
SMALL |= {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("layers", 1), ("ffn_dim", 32))}
TINY = Model("Marian", OPUS_MT | SMALL, Load(input_tokens=9, output_tokens=5, streams=(1, 3)))


def test_a_round_on_a_tiny_model(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = 512 * 16 + 6 * 16 * 16 + 2 * 16 * 32 + 32 + 16 + 4 * 16 + 2 * 16 + 6 * 16  # matrices, biases, norms
    assert step_weights(TINY.config()) == weights
    monkeypatch.setitem(ENCODER_DECODERS, "tiny", TINY)
    monkeypatch.setattr(encoder_decoders, "measure_machine", lambda *_: {"cpu": "any", "read_gb_s": 10.0})
    options = ["--models", "tiny", "--systems", REFERENCE, NATIVE, "--rounds", "1", "--cache", str(cache_dir)]
    assert encoder_decoders.main([*options, "--json", str(tmp_path / "raw.json")]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [row for row in report["rows"] if row["system"] == REFERENCE]
    assert [(row["model"], row["streams"], row["rounds"]) for row in rows] == [("tiny", 1, 1), ("tiny", 3, 1)]
    for row in rows:
        assert row["output_tokens_per_s"] == pytest.approx(5 * row["requests_per_s"])
        assert row["limit"] == pytest.approx(row["streams"] * 10e9 / (4 * weights * 5))
        assert row["peak_mb"] > 50
    assert all(counts["same"] == 4 + 6 for counts in report["outputs"].values())
    (raw,) = json.loads((tmp_path / "raw.json").read_text())["rounds"]
    assert raw["tiny"][REFERENCE]["loads"].keys() == {"1", "3"}


def test_disturbed_rounds_do_not_count_unless_there_is_no_other() -> None:
    def a_round(ours: tuple[float, float], theirs: tuple[float, float]) -> Figures:
        fixed = {"output_tokens_per_s": 1.0, "latency_ms": {"p50": 1.0}}
        return {
            name: {"peak_mb": 1.0, "loads": {"8": fixed | {"requests_per_s": rate, "taken_cores": taken}}}
            for name, (rate, taken) in ((NATIVE, ours), (REFERENCE, theirs))
        }

    disturbed, another = a_round((4.0, 1.0), (1.0, 0.0)), a_round((4.0, 0.5), (2.0, 0.0))
    rounds = {"none": [disturbed, another], "one": [disturbed, a_round((9.0, 0.1), (3.0, 0.0)), another]}
    loads = Model("Bloom", {}, Load(1, 1, (8,)))
    for name, (rate, ratio) in {"none": (4.0, 2.0), "one": (9.0, 3.0)}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ENCODER_DECODERS, "any", loads)
            row, _ = summarize_rounds([{"any": each} for each in rounds[name]], {"any": dict.fromkeys(SYSTEMS, 1.0)})
        assert (row["rounds"], row["requests_per_s"], row["ratios"]) == (1, rate, {REFERENCE: ratio})


def test_outputs_are_the_same_a_near_tie_or_different(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    scores = torch.tensor([1.0, 1.00001, 0.9])

    def next_logits(_: Path) -> Any:
        def logits(*given: list[int]) -> torch.Tensor:
            asked.append(given)
            return scores

        return logits

    monkeypatch.setattr(encoder_decoders, "_next_logits", next_logits)
    outputs = {REFERENCE: [([7], [0, 0, 0])] * 3, CTRANSLATE2: [([7], [0, 0, 0]), ([7], [0, 1, 2]), ([7], [0, 0, 2])]}
    assert compare(Path(), outputs) == {CTRANSLATE2: {"same": 1, "near tie": 1, "different": 1}}
    assert asked == [([7], [0]), ([7], [0, 0])]


def test_ctranslate2_computes_what_waits_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[list[str]]] = []

    def translate_batch(inputs: list[list[str]], **options: int) -> list[SimpleNamespace]:
        assert options == {"beam_size": 1, "min_decoding_length": 3, "max_decoding_length": 3}
        batches.append(inputs)
        return [SimpleNamespace(hypotheses=[3 * tokens[:1]]) for tokens in inputs]

    translator = SimpleNamespace(translate_batch=translate_batch)
    monkeypatch.setitem(sys.modules, "ctranslate2", SimpleNamespace(Translator=lambda *_, **__: translator))
    load = {"streams": 2, "output_tokens": 3, "prompts": [[5, 1], [6], [7]]}
    assert run_load(CTranslate2("model", "2"), 1, load)["outputs"] == [[5, 5, 5], [6, 6, 6], [7, 7, 7]]
    assert batches == [[["5", "1"], ["6"]], [["7"]]]
