"""Draws: which token a seed chooses; the ends and histories that samplers know. kernels/test_cpu_sampling.py compares
the C kernel with the draws.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sampling_oracle as oracle
import torch
from config_parsing import read
from sampling_oracle import make_row
from sampling_steps import PLAIN_OPS, by_row, sample_batch
from tokenizers import pre_tokenizers

from demo.fake_model import EOS, make_fake_model
from tgis.batcher.sequence import Sequence
from tgis.engines.host_memory import to_device
from tgis.engines.sampling.histories import HistorySlots
from tgis.engines.sampling.sampler import BatchSampler
from tgis.ipc.request import SamplingParams
from tgis.prepare import prepare


def sample(sampling: list[SamplingParams], generated: list[int], logits: torch.Tensor) -> list[int]:
    rows = [make_row(own, generated=count) for own, count in zip(sampling, generated, strict=True)]
    return sample_batch(rows, logits, [[0]] * len(rows)).tokens


@pytest.mark.parametrize(
    ("seed", "vocabulary", "filters"),
    [
        (0, 7, {}),
        (2**64 - 1, 700, {}),
        (1, 256, {"top_k": 5}),
        (2**32, 700, {"top_p": 0.8}),
        (2**63, 256, {"top_p": 0.9, "typical_p": 0.9}),
        (5, 700, {"min_p": 0.3, "temperature": 2.0}),
    ],
)
def test_the_least_noise_over_p_is_drawn(seed: int, vocabulary: int, filters: dict[str, float]) -> None:
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(seed % 1000)) * 1.5
    sampling = SamplingParams(**{"temperature": 0.9, "seed": seed} | filters)  # type: ignore[arg-type]
    sampled = sample([sampling] * 40, list(range(40)), logits)
    for step, found in enumerate(sampled):
        expected = oracle.process(logits[step].tolist(), sampling, step, [], [])
        token, certain = expected.draw(seed, step)
        assert found == token
        assert certain


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
        (SamplingParams(length_penalty=(2, 9.0)), [1], 3),  # not before the third token
        (SamplingParams(min_new_tokens=9), [1], 2),
        (SamplingParams(), [1], 3),
    ],
)
def test_penalties_on_ends(params: SamplingParams, config_eos: list[int], expected: int) -> None:
    row = make_row(params, generated=2)
    sampler = BatchSampler(4, [1, 3], torch.device("cpu"), lambda seq: [0], PLAIN_OPS, config_eos)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    assert by_row(sampler.sample_and_wait([row], logits), [row]).tokens == [expected]


CPU = torch.device("cpu")
PENALIZED = SamplingParams(repetition_penalty=1.3)


def test_histories_are_those_of_the_sequences() -> None:
    """Sequences that come, go and come back, with several tokens at once or the newest one on the device only."""
    rng, slots, seqs = random.Random(1), HistorySlots(CPU), list[Sequence]()
    for _ in range(600):
        seqs = [seq for seq in seqs if rng.random() < 0.95]
        if rng.random() < 0.2:
            seqs.append(make_row(PENALIZED, prompt=[rng.randrange(99)] * rng.randint(1, 200)))
        batch = rng.sample(seqs, rng.randint(0, len(seqs)))
        lookahead = rng.randint(0, 1)
        newest = [rng.randrange(99) for _ in batch]
        if not batch:
            continue
        slots.release(seq.id for seq in rng.sample(seqs, len(seqs) // 20))
        indices, lengths = slots.update(batch, lambda seq: seq.tokens, lookahead)
        if lookahead:
            rows = to_device([indices, [0] * len(batch), lengths], torch.int64, CPU)
            slots.append(rows, torch.tensor(newest))
        for seq, index, length, token in zip(batch, indices, lengths, newest, strict=True):
            assert slots.ids[index, :length].tolist() == [*seq.tokens, token][: len(seq.tokens) + lookahead]
            failed = rng.random() < 0.1  # the host does not get the token
            seq.tokens += [] if failed else [token, *[rng.randrange(99) for _ in range(rng.choice([0, 0, 3]))]]
