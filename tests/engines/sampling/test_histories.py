"""Token histories on the device: always those of the sequences, and a join writes its own row only."""

import random
from typing import Any

import torch
from sampling_oracle import make_row
from torch.utils._python_dispatch import TorchDispatchMode

from tgis.batcher.sequence import Sequence
from tgis.engines.host_memory import to_device
from tgis.engines.sampling.draws import SamplingOps
from tgis.engines.sampling.histories import HistorySlots
from tgis.engines.sampling.sampler import BatchSampler
from tgis.ipc.request import SamplingParams

CPU = torch.device("cpu")
PENALIZED = SamplingParams(repetition_penalty=1.3)
VOCAB_SIZE = 1000


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


class Writes(TorchDispatchMode):  # type: ignore[misc]
    """Counts the tokens that are written to histories."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_put_.default and args[0].dtype == torch.int32:
            self.count += args[2].numel()
        return func(*args, **kwargs or {})


def test_a_join_writes_one_history() -> None:
    """The others append one token; rows without a penalty have no history."""
    sampler = BatchSampler(VOCAB_SIZE, [], CPU, lambda seq: seq.tokens, SamplingOps())
    seqs = [make_row(PENALIZED if n < 4 else SamplingParams(), prompt=range(500)) for n in range(64)]

    def tokens_written() -> int:
        with Writes() as counted:
            result = sampler.sample_and_wait(seqs, torch.randn(len(seqs), VOCAB_SIZE))
        for seq, tokens in zip(seqs, result.tokens, strict=True):
            seq.tokens += tokens
        return int(counted.count)

    assert [tokens_written() for _ in range(3)] == [4 * 500, 4, 4]
    seqs.append(make_row(SamplingParams(), prompt=range(500)))
    assert tokens_written() == 4
    seqs.append(make_row(PENALIZED, prompt=range(500)))
    assert tokens_written() == 4 + 500
    del seqs[0]
    assert tokens_written() == 4
