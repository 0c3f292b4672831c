"""`python -m benchmarks.adapters`: the throughput of a batch with LoRA adapters, relative to a batch without.

SmolLM2 with random adapters of the attention layers, and of all linear layers. The last line is one JSON object.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import grpc.aio
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.serving import running_server
from demo.fetch import ensure
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_TARGETS = {"attention": _ATTENTION, "all": (*_ATTENTION, "gate_proj", "up_proj", "down_proj")}
_NEW_TOKENS = 48
_ROUNDS = 3


def write_adapters(store: Path, model: Path, targets: tuple[str, ...], ranks: list[int]) -> list[str]:
    """Write an adapter of each rank that changes little; returns their names."""
    with safe_open(model / "model.safetensors", "pt") as weights:
        layers = [name.removesuffix(".weight") for name in weights.keys() if name.endswith(_suffixes(targets))]  # noqa: SIM118 - it is no dict
        shapes = {layer: weights.get_slice(f"{layer}.weight").get_shape() for layer in layers}
    for number, rank in enumerate(ranks):
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        directory = store / f"adapter-{number}"
        directory.mkdir()
        (directory / "adapter_config.json").write_text(json.dumps(config))
        tensors = {}
        for layer, (outputs, inputs) in shapes.items():
            tensors[f"base_model.model.{layer}.lora_A.weight"] = 0.01 * torch.randn(rank, inputs)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = 0.01 * torch.randn(outputs, rank)
        save_file(tensors, directory / "adapter_model.safetensors")
    return [f"adapter-{number}" for number in range(len(ranks))]


def _suffixes(targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f".{target}.weight" for target in targets)


async def _tokens_per_second(stub: GenerationServiceStub, streams: int, adapters: list[str]) -> float:
    """Output tokens per second of concurrent calls that use the adapters round robin; "" is no adapter."""
    stopping = pb.StoppingCriteria(max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS)
    names = itertools.cycle(adapters)
    calls = [
        pb.BatchedGenerationRequest(
            requests=[pb.GenerationRequest(text=f"{number} people and the time of the year when the world")],
            adapter_id=next(names),
            params=pb.Parameters(stopping=stopping),
        )
        for number in range(streams)
    ]
    started = perf_counter()
    await asyncio.gather(*(stub.Generate(call) for call in calls))
    return streams * _NEW_TOKENS / (perf_counter() - started)


async def _compare(target: str, concurrencies: list[int], adapters: list[str]) -> dict[str, float]:
    """Medians of alternating rounds, after a warm-up."""
    figures: dict[str, float] = {}
    async with grpc.aio.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        await _tokens_per_second(stub, max(concurrencies), adapters)
        for size in concurrencies:
            rounds = [[await _tokens_per_second(stub, size, some) for some in ([""], adapters)] for _ in range(_ROUNDS)]
            bare, adapted = (statistics.median(column) for column in zip(*rounds, strict=True))
            figures[f"none_{size}"], figures[f"adapters_{size}"] = round(bare, 1), round(adapted, 1)
            figures[f"ratio_{size}"] = round(adapted / bare, 2)
    return figures


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--rank", type=int, default=16, metavar="N")
    parser.add_argument("--adapters", type=int, default=8, metavar="N")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32], metavar="N")
    parser.add_argument("--engine", default="tgis_native", metavar="NAME")
    args = parser.parse_args(arguments)
    model = ensure("smollm2", args.cache)
    report = {}
    for name, targets in _TARGETS.items():
        with tempfile.TemporaryDirectory() as store:
            adapters = write_adapters(Path(store), model, targets, [args.rank] * args.adapters)
            options = ("--deployment-framework", args.engine, "--prefix-store-path", store)
            with running_server(model, args.cache, *options) as server:
                report[name] = asyncio.run(_compare(server.target, args.streams, adapters))
        print(name, *(f"{key} {value}" for key, value in report[name].items()), sep="\n  ")
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
