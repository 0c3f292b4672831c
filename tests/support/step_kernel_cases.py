"""Test cases of the small Triton kernels of a step, on a GPU or interpreted: writes to the KV cache, and the argmax."""

import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")
ROWS = {
    "one token": [[0.5]],
    "equal scores": [[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0, -1.0]],
    "not finite": [[1.0, INF, INF], [1.0, NAN, 2.0], [-INF, -INF, -INF], [NAN, NAN, NAN], [-INF, 1.0, -INF]],
}
WRITES = {  # tokens, heads, sizes of keys and values, block size
    "one token": (1, 2, 16, 16, 16),
    "odd sizes": (7, 3, 24, 72, 8),
    "one head": (33, 1, 128, 64, 1),
    "Llama": (5, 8, 128, 128, 16),
}


def wrong_writes(name: str, device: str, dtype: torch.dtype) -> int:
    """With keys and values that are views of one tensor, as merged projections give them."""
    from tgis.engines.kernels.cuda.kv_cache import write_kv_cache

    tokens, heads, k_size, v_size, block_size = WRITES[name]
    generator = torch.Generator().manual_seed(0)
    merged = torch.randn(tokens, heads * (k_size + v_size), generator=generator).to(device, dtype)
    flat = merged.split([heads * k_size, heads * v_size], 1)
    k, v = (part.unflatten(1, (heads, -1)) for part in flat)
    num_blocks = 2 * tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:tokens].to(device)
    shape = num_blocks, block_size, heads
    keys, values = (torch.full((*shape, size), 7.0, device=device, dtype=dtype) for size in (k_size, v_size))
    wanted = [cache.flatten(0, 1).index_copy(0, slots, new) for cache, new in ((keys, k), (values, v))]
    write_kv_cache(k, v, keys, values, slots)
    pairs = zip((keys, values), wanted, strict=True)
    return sum(int((cache.flatten(0, 1) != expected).sum()) for cache, expected in pairs)


def wrong_choices(values: Tensor) -> int:
    """Count wrong ids, which must be those of a scan from the left, and wrong states."""
    from tgis.engines.kernels.cuda.sampling import best_token_table

    wrong = 0
    for row, (token, is_invalid, *others) in zip(values.cpu(), best_token_table(values).tolist(), strict=True):
        maximum = row.max()
        if maximum.isfinite():
            wrong += [token, is_invalid, *others] != [row.tolist().index(maximum.item()), 0, 0, 0, 0]
        else:
            wrong += is_invalid != 1 or token not in range(len(row))
    return wrong


def errors(device: str, dtypes: list[torch.dtype]) -> dict[str, int]:
    """For each case how many numbers are not what PyTorch makes them."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for dtype in dtypes:
        for name in WRITES:
            found[f"write, {name}, {dtype}"] = wrong_writes(name, device, dtype)
        rows = {name: torch.tensor(values) for name, values in ROWS.items()}
        rows["several blocks"] = torch.randint(50, (3, 9000), generator=generator).float()
        rows["a view"] = torch.randn(4, 5000, generator=generator)[:, 7:4200]
        for name, values in rows.items():
            found[f"argmax, {name}, {dtype}"] = wrong_choices(values.to(device, dtype))
    return found
