"""The EOS of the tokenizer ends an output alongside the config's ids, which alone a length penalty makes likelier."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_parsing import read
from sampling_oracle import make_row
from sampling_steps import PLAIN_OPS, by_row
from tokenizers import pre_tokenizers

from demo.fake_model import EOS, make_fake_model
from tgis.engines.sampling.sampler import BatchSampler
from tgis.ipc.request import SamplingParams
from tgis.prepare import prepare

B = sorted(pre_tokenizers.ByteLevel.alphabet()).index("b")  # its id


@pytest.mark.parametrize(
    ("config_eos", "eos_token", "eos_ids"),
    [(EOS, "b", (EOS, B)), ([EOS, 1], "b", (EOS, 1, B)), (EOS, "</s>", (EOS,)), (1, None, (1,)), ([], "b", (B,))],
)
def test_ends_of_a_model(config_eos: Any, eos_token: str | None, eos_ids: tuple[int, ...], tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"eos_token_id": config_eos}
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    preparation = prepare(read(MODEL_NAME=str(model), DEPLOYMENT_FRAMEWORK="fake", CACHE_DIR=str(tmp_path)))
    options = preparation.engine_options()
    assert preparation.eos_ids == options.eos_ids == eos_ids
    assert [*options.config_eos_ids] == (config_eos if isinstance(config_eos, list) else [config_eos])


@pytest.mark.parametrize(
    ("params", "config_eos", "expected"),
    [
        (SamplingParams(length_penalty=(0, 9.0)), [1], 1),
        (SamplingParams(length_penalty=(0, 9.0)), [], 3),  # the config names none
        (SamplingParams(min_new_tokens=9), [1], 2),
        (SamplingParams(), [1], 3),
    ],
)
def test_penalties_on_ends(params: SamplingParams, config_eos: list[int], expected: int) -> None:
    row = make_row(params, generated=2)
    sampler = BatchSampler(4, [1, 3], torch.device("cpu"), lambda seq: [0], PLAIN_OPS, config_eos)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert by_row(sampler.sample_and_wait([row], logits), [row]).tokens == [expected]
