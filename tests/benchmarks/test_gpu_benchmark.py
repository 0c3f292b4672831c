"""`make bench-gpu` as far as it runs without a GPU."""

from pathlib import Path
from typing import Any

import pytest
from repository import run_python


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_parts_on_a_tiny_model(tmp_path: Path) -> None:
    """Twice: the second time with the model of the first."""
    model = tmp_path / "model"
    command = "-m", "benchmarks.gpu", "--shape", "tiny", "--cache", tmp_path
    report: dict[str, dict[str, Any]] = {}
    written = []
    for parts, quantize in (("smoke,alone,profile", "int8"), ("served", "none")):
        report |= run_python(*command, "--model", model, "--parts", parts, "--quantize", quantize)
        assert all("error" not in figures for figures in report.values())
        written.append((model / "model.safetensors").stat().st_mtime_ns)
    assert len(set(written)) == 1
    assert all("warnings" in report[part] for part in ("smoke", "alone", "profile", "served"))
    assert report["alone"].keys() > {"1 x (8, 16)", "4 x (32, 16)", "20 mixed"}
    steps = [report["profile"][f"{rows} decodes"] for rows in (1, 4)]
    assert all(step["kernels_ms"] > 0 and step["kernels"] for step in steps)
    assert report["served"].keys() > {"start_seconds", "1", "4"}
    assert report["served"]["4"]["output_tokens_per_s"] > 0
