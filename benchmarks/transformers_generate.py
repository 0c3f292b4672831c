"""Times transformers' `generate` with static batches, which `make bench` compares tgis with.

`python -m benchmarks.transformers_generate MODEL` runs as its own process: it imports torch, `tgis bench` never does.
Every sequence has the same number of random input tokens, so that no time goes into padding.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch size: the seconds of each repeat, and the rate of the median one."""

    size: int
    seconds: list[float]
    output_tokens_per_s: float


def load(path: str, dtype: str, device: str) -> torch.nn.Module:
    """Load a model from a local directory, with SDPA where it has that."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_pretrained(path, local_files_only=True, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def time_generate(model: torch.nn.Module, inputs: torch.Tensor, tokens: int) -> float:
    """Seconds to continue `inputs` [B, S] greedily by exactly `tokens` each."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, use_cache=True
    )
    start = time.perf_counter()
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    if output.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    given = 1 if model.config.is_encoder_decoder else inputs.shape[1]
    assert output.shape == (inputs.shape[0], given + tokens)
    return seconds


def measure(model: torch.nn.Module, size: int, input_tokens: int, output_tokens: int, repeats: int) -> Timing:
    """Time `repeats` batches of `size` sequences, after a short warm-up."""
    rng = torch.Generator().manual_seed(size)
    vocabulary = model.config.get_text_config().vocab_size
    inputs = torch.randint(vocabulary, (size, input_tokens), generator=rng).to(model.device)
    time_generate(model, inputs, min(WARMUP_TOKENS, output_tokens))
    seconds = [time_generate(model, inputs, output_tokens) for _ in range(repeats)]
    return Timing(size, seconds, size * output_tokens / statistics.median(seconds))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.transformers_generate", description="time transformers alone"
    )
    made.add_argument("model", metavar="MODEL", help="model directory")
    made.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N", help="CPU threads")
    made.add_argument("--sizes", default="1,8,32", metavar="N,...", help="rows of a batch")
    made.add_argument("--input-tokens", type=int, default=128, metavar="N")
    made.add_argument("--output-tokens", type=int, default=128, metavar="N")
    made.add_argument("--repeats", type=int, default=3, metavar="N", help="number of runs; the median is reported")
    made.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    return made


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    torch.set_num_threads(args.threads)
    model = load(args.model, args.dtype, args.device)
    timings = []
    for size in map(int, args.sizes.split(",")):
        timings.append(measure(model, size, args.input_tokens, args.output_tokens, args.repeats))
        if not args.json:
            print(f"size {size:4d}: {timings[-1].output_tokens_per_s:9.1f} output tokens/s", flush=True)
    settings = {name: value for name, value in vars(args).items() if name not in ("sizes", "json")}
    print(json.dumps({"settings": settings, "sizes": [asdict(timing) for timing in timings]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
