"""`make bench-gpu`: what tgis_native gives on one GPU, with a model of random weights that is made here.

The engine alone with static batches and a mixed load, then the server with streams. It needs no network and nothing
that is not in the tree; the last line is one JSON object. `--shape tiny` tries all of it out on any machine.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from tgis.bench.mixed import load, options_of
from tgis.bench.serving import serving
from tgis.bench.suite import load as load_server
from tgis.simulate import Job, Simulation, lognormal


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and how much is asked of it: rows at once, tokens in and out."""

    config: dict[str, int]
    rows: tuple[int, ...]
    tokens: int  # in; half as many out
    mixed: int  # requests


LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TINY = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
SHAPES = {
    "llama-3.1-8b": Shape(LLAMA, (1, 8, 64, 256), 512, 1000),
    "tiny": Shape(TINY, (1, 4), 32, 20),
}
SEED = 1


def make_model(shape: Shape, directory: Path) -> None:
    """Random weights, and a tokenizer with as many tokens as the model has."""
    config = LlamaConfig(**shape.config, tie_word_embeddings=False, bos_token_id=0, eos_token_id=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    _tokenizer(config.vocab_size).save(str(directory / "tokenizer.json"))


def _tokenizer(size: int) -> Tokenizer:
    """Bytes, and words of several of them, merged from nothing: none is ever found in a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(ord("a") + n) for n in range(26)]
    words = ("".join(word) for length in (3, 4) for word in product(letters, repeat=length))
    pieces = [*alphabet, *(word for word, _ in zip(words, range(size - len(alphabet)), strict=False))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def alone(shape: Shape, model: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The engine without a server: by name, what `Simulation` tells."""
    machine, limits = load(options_of("tgis_native", model, "bfloat16", max(shape.rows)))
    cases = {
        f"{rows} x ({shape.tokens}, {shape.tokens // 2})": _alike(rows, shape.tokens, shape) for rows in shape.rows
    }
    most = max(shape.rows)
    cases[f"{most} x (32, {shape.tokens // 2})"] = _alike(most, 32, shape)
    cases[f"{shape.mixed} mixed"] = list(lognormal(shape.mixed, 1.0, SEED))
    Simulation(limits, machine, cases[f"{most} x (32, {shape.tokens // 2})"], clients=most).run()  # does not count
    for name, jobs in cases.items():
        summary = Simulation(limits, machine, jobs, clients=len(jobs)).run().summary()
        print(f"{name:<24}{summary['tokens_per_second']:>10,.0f} tokens/s", file=sys.stderr, flush=True)
        yield name, summary


def _alike(rows: int, tokens: int, shape: Shape) -> list[Job]:
    return [Job(0.0, tokens, shape.tokens // 2)] * rows


def served(shape: Shape, model: Path, cache: Path) -> dict[str, Any]:
    """Streams of the server, by concurrency."""
    levels: dict[str, Any] = {}
    options = ("--max-batch-size", str(max(shape.rows)), "--deployment-framework", "tgis_native")
    with serving(model, cache, *options, "--max-concurrent-requests", "512") as server:
        levels["start_seconds"] = round(server.start_seconds, 1)
        for rows in shape.rows:
            level = load_server(server.target, rows, 2 * rows, shape.tokens, shape.tokens // 2)
            levels[str(rows)] = level
            speed, first = level["output_tokens_per_s"], level["ttft_ms"]["p50"]
            print(f"served, {rows:>4} streams   {speed:>10,.0f} tokens/s, TTFT p50 {first:,.0f} ms", file=sys.stderr)
    return levels


def main(arguments: list[str]) -> int:
    """Make the model, and measure the engine in a process of its own, then the server."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--alone", type=Path, metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    shape = SHAPES[args.shape]
    if args.alone:
        print(json.dumps(dict(alone(shape, args.alone))))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        model, started = Path(directory), time.monotonic()
        make_model(shape, model)
        print(f"made the model in {time.monotonic() - started:.0f} s", file=sys.stderr)
        command = [sys.executable, "-m", "tgis.bench.gpu", "--shape", args.shape, "--alone", directory]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        report = {"shape": asdict(shape), "alone": json.loads(done.stdout.splitlines()[-1])}
        report["served"] = served(shape, model, args.cache)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
