"""`python -m benchmarks.encoder_decoders` on a tiny model, and its parts without CTranslate2 and near ties."""

import json
from pathlib import Path

import pytest

from benchmarks import encoder_decoders
from benchmarks.encoder_decoders import NATIVE, REFERENCE
from benchmarks.random_models import ENCODER_DECODERS, OPUS_MT, Load, Model, step_weights

SMALL = {"vocab_size": 512, "pad_token_id": 511, "decoder_start_token_id": 511, "d_model": 16}
SMALL |= {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("layers", 1), ("ffn_dim", 32))}
TINY = Model("Marian", OPUS_MT | SMALL, Load(input_tokens=9, output_tokens=5, streams=(1, 3)))


@pytest.mark.slow
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
