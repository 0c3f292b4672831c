"""What choosing tokens costs beside computing them: real logits of 64 SmolLM2 rows, on this machine's processor.

`python -m benchmarks.sampling_time MODEL` prints a table of medians and last one line of JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import msgspec
import torch
from transformers import AutoModelForCausalLM

from tgis.batcher.sequence import Sequence
from tgis.engines.kernels.cpu.linear import pack_linears
from tgis.engines.padded.attention import use_gqa_attention
from tgis.engines.padded.kv_cache import PaddedCache
from tgis.engines.sampling.sampler import Sampler
from tgis.ipc.messages import LogprobOptions, Request, SamplingParams

ROWS, WIDTH, REPEATS = 64, 128, 30
FACTS = LogprobOptions(generated_tokens=True, logprobs=True, ranks=True, top_n_tokens=5)
ALL = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, length_penalty=(5, 1.1)
)
CASES: dict[str, tuple[SamplingParams, LogprobOptions]] = {
    "greedy": (SamplingParams(), LogprobOptions()),
    "greedy, logprob, rank, top 5": (SamplingParams(), FACTS),
    "temperature": (SamplingParams(temperature=0.8), LogprobOptions()),
    "temperature, top_k, top_p, typical_p, penalties, seeds": (ALL, LogprobOptions()),
    "the same, logprob, rank, top 5": (ALL, FACTS),
    "top_p alone": (SamplingParams(temperature=1.0, top_p=0.9), LogprobOptions()),
    "typical_p alone": (SamplingParams(temperature=1.0, typical_p=0.9), LogprobOptions()),
}


def real_step(path: str, dtype: str) -> tuple[torch.Tensor, float]:
    """Logits [rows, vocabulary] of a decode step in the padded cache, and the milliseconds that it takes."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True).eval()
    use_gqa_attention(model)
    pack_linears(model)
    cache = PaddedCache(ROWS)
    cache.append([WIDTH - row % 9 for row in range(ROWS)])
    cache.view_prefill(0, 0, WIDTH)
    ids = torch.randint(model.config.vocab_size, (ROWS, WIDTH), generator=torch.Generator().manual_seed(0))

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        mask = cache.attention_mask(0, cache.width)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        states = {"past_key_values": cache.past_key_values, "use_cache": True, "logits_to_keep": 1}
        output = model(input_ids=tokens, attention_mask=mask, position_ids=positions, **states)
        last: torch.Tensor = output.logits[:, -1]
        return last

    logits = forward(ids)

    def decode() -> None:
        nonlocal logits
        cache.view_decode()
        logits = forward(logits.argmax(-1)[:, None])

    return logits, milliseconds(decode)


def milliseconds(action: Callable[[], object]) -> float:
    """The median of some runs, after two that do not count."""
    times = []
    for _ in range(REPEATS + 2):
        started = time.perf_counter()
        action()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[2:])


def choosing(logits: torch.Tensor, sampling: SamplingParams, details: LogprobOptions) -> float:
    """Milliseconds to choose a token for every row."""
    rows = [
        Sequence(
            Request(row, [1, 2, 3], 100, False, msgspec.structs.replace(sampling, seed=row), details), arrival_time=0.0
        )
        for row in range(ROWS)
    ]
    context = torch.randint(logits.shape[1], (ROWS, 2 * WIDTH), generator=torch.Generator().manual_seed(1))
    sampler = Sampler(logits.shape[1], [2], torch.device("cpu"))
    sampler.set_seqs(rows)
    return milliseconds(lambda: sampler.sample_and_wait(logits.clone(), context))


def main(arguments: list[str]) -> int:
    """Measure every case against the step."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling_time", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    args = parser.parse_args(arguments)
    torch.set_grad_enabled(False)
    logits, step = real_step(args.model, args.dtype)
    print(f"a step of {ROWS} rows: {step:.1f} ms")
    report = {name: choosing(logits, *case) for name, case in CASES.items()}
    for name, cost in report.items():
        print(f"{name:<56}{cost:6.1f} ms {cost / step:6.1%}")
    print(json.dumps({"dtype": args.dtype, "step_ms": round(step, 2)} | {n: round(c, 2) for n, c in report.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
