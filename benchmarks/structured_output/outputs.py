"""`python -m benchmarks.structured_output.outputs [MODEL]`: do outputs with a JSON schema validate?

A server generates at temperature 1, for the schemas of a category in turn, until enough outputs have ended with
EOS_TOKEN; jsonschema validates each. Without MODEL, one with random weights and a byte-level BPE is made, which prefers
no token: only the grammar makes its outputs valid. The last line is JSON.
"""

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.draws import make_model
from benchmarks.serving import running_server
from benchmarks.structured_output.schemas import SCHEMAS
from benchmarks.structured_output.suite import accepted_schemas
from benchmarks.structured_output.validation import problem_of
from demo.fetch import ensure
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

VOCAB_SIZE, END = 1000, "<|end|>"
AT_ONCE = 64
MAX_INPUT_TOKENS = 256
ATTEMPTS = 10  # at most, per wanted output


@dataclass(slots=True)
class Outcome:
    """The results of one category."""

    category: str
    schemas: int
    attempts: int = 0
    finished: int = 0
    tokens: int = 0
    failed: list[str] = field(default_factory=list)  # statuses and messages
    invalid: list[str] = field(default_factory=list)  # the output, and why


def make_random_model(directory: Path) -> Path:
    """Save a model with random weights and a byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=[END], vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(map(json.dumps, SCHEMAS.values()), trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(directory)
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        eos_token_id=backend.token_to_id(END),
        bos_token_id=None,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    return make_model(config, directory)


async def generate_all(
    target: str, categories: dict[str, list[Any]], wanted: int, max_new_tokens: int, seed: int, seconds: float
) -> list[Outcome]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        outcomes = []
        for category, schemas in categories.items():
            outcome, until = Outcome(category, len(schemas)), time.monotonic() + seconds
            while time.monotonic() < until and outcome.finished < wanted and outcome.attempts < ATTEMPTS * wanted:
                first = seed + outcome.attempts
                calls = (
                    _generate(stub, outcome, schemas[number % len(schemas)], number, max_new_tokens)
                    for number in range(first, first + AT_ONCE)
                )
                await asyncio.gather(*calls)
            _print_row(outcome)
            outcomes.append(outcome)
    return outcomes


async def _generate(stub: GenerationServiceStub, outcome: Outcome, schema: Any, seed: int, max_new_tokens: int) -> None:
    text = json.dumps(schema)
    request = pb.BatchedGenerationRequest(
        requests=[pb.GenerationRequest(text=f"{text}\nA short example:\n")],
        params=pb.Parameters(
            method=pb.SAMPLE,
            sampling=pb.SamplingParameters(temperature=1, seed=seed),
            stopping=pb.StoppingCriteria(max_new_tokens=max_new_tokens),
            decoding=pb.DecodingParameters(json_schema=text),
            truncate_input_tokens=MAX_INPUT_TOKENS,
        ),
    )
    outcome.attempts += 1
    try:
        (response,) = (await stub.Generate(request)).responses
    except grpc.aio.AioRpcError as error:
        outcome.failed.append(f"{error.code().name}: {error.details()}: {text}")
        return
    outcome.tokens += response.generated_token_count
    if response.stop_reason == pb.EOS_TOKEN:
        outcome.finished += 1
        if problem := problem_of(response.text, schema):
            outcome.invalid.append(f"{problem}: {response.text!r} with {text}")


def _print_row(one: Outcome) -> None:
    counts = f"{one.schemas:>8} {one.attempts:>9} {one.finished:>9} {one.finished / one.attempts:>6.0%}"
    print(f"{one.category:<24} {counts} {len(one.invalid):>8} {len(one.failed):>7}", flush=True)
    print(*{*one.invalid[:5], *one.failed[:5]}, sep="\n", end="\n" if one.invalid or one.failed else "")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured_output.outputs", description=__doc__)
    parser.add_argument("model", nargs="?", help="a directory or smollm2; by default a model with random weights")
    parser.add_argument("--categories", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--wanted", type=int, default=200, metavar="N", help="outputs of each category")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the first output; the others count on"
    )
    parser.add_argument("--max-new-tokens", type=int, default=400, metavar="N")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="N", help="time limit for each category")
    parser.add_argument("--suite", type=Path, metavar="DIR", help="a draft's directory of the JSON Schema Test Suite")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    categories = accepted_schemas(args.suite) if args.suite else SCHEMAS
    categories = {name: categories[name] for name in args.categories or categories}
    with tempfile.TemporaryDirectory() as directory:
        model = ensure("smollm2", args.cache) if args.model == "smollm2" else Path(args.model or directory)
        if not args.model:
            make_random_model(model)
        options = (
            "--dtype",
            args.dtype,
            "--max-batch-size",
            str(AT_ONCE),
            "--max-new-tokens",
            str(args.max_new_tokens),
        )
        with running_server(model, args.cache, *options) as server:
            print(
                f"{'category':<24} {'schemas':>8} {'attempts':>9} {'finished':>9} {'':>6} {'invalid':>8} {'failed':>7}"
            )
            outcomes = asyncio.run(
                generate_all(server.target, categories, args.wanted, args.max_new_tokens, args.seed, args.seconds)
            )
    report = [asdict(outcome) for outcome in outcomes]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return int(any(outcome.invalid for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
