"""The padded cache against a list of keys for each sequence."""

import random

import pytest
import torch

from tgis.engines.memory.capacity import KVCacheCost
from tgis.engines.padded.kv_cache import PaddedKVCache, padded_cost

HEADS, SIZE, LAYERS = 2, 3, 2


class Model:
    """Feeds the cache as a model would, and keeps each row's keys in a list beside it."""

    def __init__(self, max_slots: int = 64) -> None:
        self.cache = PaddedKVCache(max_slots)
        self.keys: list[torch.Tensor] = []  # per row: [tokens, HEADS, SIZE] of layer 0
        self.generator = torch.Generator().manual_seed(0)

    def states(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, HEADS, columns, SIZE, generator=self.generator)

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in range(LAYERS):
            seen = self.cache.past_key_values.update(keys + layer, values - layer, layer)
        return seen[0] - (LAYERS - 1), seen[1] + (LAYERS - 1)

    def join(self, lengths: list[int], piece: int) -> None:
        first = len(self.keys)
        self.cache.append(lengths)
        width = max(lengths)
        keys = self.states(len(lengths), width)
        for start in range(0, width, piece):
            stop = min(width, start + piece)
            self.cache.view(first, start, stop)
            part = keys[:, :, start:stop]
            seen_keys, seen_values = self.update(part, -part)
        assert torch.allclose(seen_keys, -seen_values)
        self.keys += [keys[i, :, width - length :] for i, length in enumerate(lengths)]
        self.check(seen_keys, first)

    def decode(self) -> None:
        keys = self.states(len(self.keys), 1)
        self.cache.view_decode()
        seen, values = self.update(keys, -keys)
        self.keys = [torch.cat([row, keys[i]], 1) for i, row in enumerate(self.keys)]
        assert torch.allclose(seen, -values)
        self.check(seen, 0)

    def leave(self, row: int) -> None:
        self.cache.remove(row)
        self.keys[row] = self.keys[-1]
        self.keys.pop()

    def check(self, seen: torch.Tensor, first: int) -> None:
        rows = self.keys[first:]
        width = max(row.shape[1] for row in rows)
        mask = self.cache.attention_mask(first, width)
        assert seen.shape == (len(rows), HEADS, width, SIZE)
        assert self.cache.seq_lens[first:] == [row.shape[1] for row in rows]
        for i, row in enumerate(rows):
            assert mask[i].tolist() == [False] * (width - row.shape[1]) + [True] * row.shape[1]
            assert torch.allclose(seen[i, :, width - row.shape[1] :], row, atol=1e-5)
        assert torch.isfinite(seen).all()


@pytest.mark.parametrize("seed", range(5))
def test_sequences_keep_their_keys_while_others_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    model = Model()
    for _ in range(150):
        action = rng.random()
        if not model.keys or (action < 0.15 and len(model.keys) < 60):
            lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 4))]
            model.join(lengths, piece=rng.choice([5, 100]))
        elif action < 0.3:
            model.leave(rng.randrange(len(model.keys)))
        else:
            model.decode()


def test_freed_slots_are_zeroed() -> None:
    model = Model()
    model.join([10], piece=100)
    poison = torch.full((1, HEADS, 1, SIZE), float("nan"))
    model.cache.view_decode()
    model.update(poison, poison)
    model.leave(0)
    model.join([20, 3], piece=100)  # `check` looks at the padding too


def test_copies_of_a_layer_and_a_quarter_more_rows_and_columns_are_counted() -> None:
    assert padded_cost([60, 100], 3) == KVCacheCost(320 * 1.25**2, 2 * 320 * 64 * 3)
