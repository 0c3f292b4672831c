"""Token histories on the device: always those of the sequences."""

import random

import torch
from sampling_oracle import make_row

from tgis.batcher.sequence import Sequence
from tgis.engines.host_memory import to_device
from tgis.engines.sampling.histories import HistorySlots
from tgis.ipc.request import SamplingParams

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
