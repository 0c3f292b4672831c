"""`python -m benchmarks.quantization_quality`: how far quantized models are from the plain one.

Every variant of a model computes the logits of the same texts, the project's own documents, in chunks on tgis_native
in float32. Told are the mean KL divergence from the plain model's distribution of the next token to the variant's, in
nats, its largest tenth's mean, and how often both choose the same token first. The last line is JSON.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.engines import engine_options
from benchmarks.serving import cpu_name
from demo.fetch import ensure
from tgis.batcher.sequence import StepPlan
from tgis.engines.paged.engine import PagedEngine
from tgis.engines.paged.self_check import dummy_sequence

DOCS = Path(__file__).parents[1] / "docs"
LENGTH, CHUNKS = 500, (200, 200, 100)  # tokens of a text, and of the steps that compute it
VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int8 with logits": {"quantize": "int8", "quantize_logits": True},
    "int8, plain activations": {"quantize": "int8", "quantize_activations": "none"},
    "int4": {"quantize": "int4"},
    "int4, plain activations": {"quantize": "int4", "quantize_activations": "none"},
    "KV int8": {"kv_cache_dtype": "int8"},
}


def texts(model: Path, count: int) -> list[list[int]]:
    """Token ids of documents, one after the other, in pieces of one length."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = []
    for file in sorted(DOCS.glob("*.md")):
        ids += tokenizer.encode(file.read_text()).ids
    assert len(ids) >= count, f"the documents have {len(ids)} tokens"
    return [ids[start : start + LENGTH] for start in range(0, count, LENGTH)]


def log_probabilities(model: Path, options: dict[str, Any], tokens: list[list[int]], cache: Path) -> Tensor:
    """The log probabilities of each next token, float32 [all tokens, V]."""
    plain = engine_options("tgis_native", model, "float32", 8, cache)
    engine = PagedEngine(msgspec.structs.replace(plain, **options))
    engine.warm_up()
    found = []
    for ids in tokens:
        seq = dummy_sequence(ids, engine.info.block_size, prompt_logprobs=True)
        for count in CHUNKS:
            logits, slices = engine.runner.compute_logits(StepPlan([seq], [count], [], has_prefill=True))
            found.append(logits[slices[seq.id]].float().log_softmax(-1))
            seq.num_computed_tokens += count
    return torch.cat(found)


def compare(plain: Tensor, found: Tensor) -> dict[str, float]:
    divergences = (plain.exp() * (plain - found)).sum(-1)
    worst = divergences.sort(descending=True).values[: max(len(divergences) // 10, 1)]
    same = (plain.argmax(-1) == found.argmax(-1)).float().mean()
    figures = {"kl": divergences.mean(), "kl_worst_tenth": worst.mean(), "same_first": same}
    return {name: round(float(figure), 5) for name, figure in figures.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization_quality", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the demo model")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--checkpoint", type=Path, action="append", default=[], metavar="DIR", help="quantized, too")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    model = args.model or ensure("smollm2", args.cache)
    tokens = texts(model, args.tokens)
    reference = log_probabilities(model, {}, tokens, args.cache)
    figures = {}
    cases = {name: (model, VARIANTS[name]) for name in args.variants} | {
        path.name: (path, {}) for path in args.checkpoint
    }
    for name, (path, options) in cases.items():
        figures[name] = compare(reference, log_probabilities(path, options, tokens, args.cache))
        print(f"{name:<28}", *(f"{key} {figure:.5f}" for key, figure in figures[name].items()), flush=True)
    report = {"cpu": cpu_name(), "model": model.name, "tokens": len(reference), "variants": figures}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
