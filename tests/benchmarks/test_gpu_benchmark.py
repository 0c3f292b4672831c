"""`make bench-gpu` as far as it runs without a GPU: a failed part does not stop the others, JSON comes last."""

from pathlib import Path
from typing import Any

import pytest
from repository import run_python

from benchmarks.gpu import run_part_process

PART = """
import json
print("as it goes")
print(json.dumps({"first": {"tokens_per_second": 1.5}}), flush=True)
print(json.dumps({"second": 2}), flush=True)
raise SystemExit(7)
"""


def test_a_failed_part_keeps_its_figures(capfd: pytest.CaptureFixture[str]) -> None:
    figures = run_part_process("-c", PART, seconds=20)
    assert figures["first"] == {"tokens_per_second": 1.5}
    assert figures["second"] == 2
    assert figures["error"].startswith("ended with exit code 7 after ")
    output = capfd.readouterr()
    assert output.out == ""
    assert "as it goes\n" in output.err


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
