"""`python -m benchmarks.transformers_generate` on a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import transformers_generate


def test_transformers_generate_times_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=list(range(16)),  # would end early without min_new_tokens
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    options = ["--dtype", "float32", "--sizes", "1,3", "--input-tokens", "4", "--output-tokens", "5"]
    assert transformers_generate.main([str(tmp_path), *options, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["size"] for entry in found["sizes"]] == [1, 3]
    for entry in found["sizes"]:
        assert len(entry["seconds"]) == 3
        expected = entry["size"] * 5 / np.median(entry["seconds"])
        assert entry["output_tokens_per_s"] == pytest.approx(expected)
