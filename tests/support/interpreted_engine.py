"""The engine with Triton's kernels, interpreted on a CPU: a process that sets TRITON_INTERPRET=1. Prints one line of
JSON: the tokens that it generates on the model given, and the kernels that have passed their self-tests.
"""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from batches import engine_options, limits
from tiny_models import generate_all, greedy_requests

from tgis.engines.paged import attention
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.sampling import draws

ROWS = 3
REQUESTS = greedy_requests(5, 5, random.Random(5))


def generated(model: Path) -> tuple[list[list[int]], PagedEngine]:
    """With chunked prompts beside decodes."""
    options = engine_options(model, ROWS, cpu_isa="none")
    engine = PagedEngine(options)
    bounds = limits(400, padded=False, block_size=16, max_batch_size=ROWS, prefill_tokens=16)
    return generate_all(engine, bounds, REQUESTS, random.Random(1)), engine


def main() -> None:
    from interpreted_kernels import repair  # the tests of machines without Triton import this module

    repair()
    properties = SimpleNamespace(multi_processor_count=2)
    with (
        mock.patch.object(attention, "has_kernels", return_value=True),
        mock.patch.object(draws, "has_kernels", return_value=True),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        tokens, engine = generated(Path(sys.argv[1]))
    sampling: Any = engine._sampler._ops
    tried = dict(engine.runner.attention._self_test._passed)
    for operation in (sampling.best_tokens, sampling.draw, sampling.draw_filtered):
        (self_test,) = operation.args
        tried |= self_test._passed
    passed = {kernel.__name__ for (kernel, _), fit in tried.items() if fit}
    print(json.dumps({"tokens": tokens, "kernels": sorted(passed)}))


if __name__ == "__main__":
    main()
