"""`python -m benchmarks.encoder_decoders`: tgis_native beside hf_transformers and CTranslate2, in alternating rounds.

The models are made here, with random weights and the shapes of opus-mt-en-fr and FLAN-T5-small; with --decoder-only
with those of decoders of about 135M parameters, without CTranslate2. Each engine is in a process of its own, without
front end; in a round all are started, and each load, a closed loop of greedy requests whose outputs have one length,
runs on one after the other, in an order that changes. Each has run before with other inputs, and there is no prefix
cache, in which no input would be found: the KV cache lies in memory that has been written, as that of a server does
after a while. The first write to memory can take this VM's host 5 ms for 2 MB. An engine that does not take a model is
left out. For CTranslate2, which computes all requests in flight as one batch, make an environment before:

    python -m venv ct2 && ct2/bin/pip install "ctranslate2==4.8.*" "transformers<5" torch

The reading limit is what the read bandwidth allows if a step reads the decoder's weights and those of the logits once.
Outputs in float32 are compared with those of hf_transformers; the exit code is 1 if tgis_native's differ where there is
no near tie. With --json, rounds are added to those in the file. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import transformers_generate
from benchmarks.cpu_steps import measure_machine
from benchmarks.peer_process import MOST_TAKEN, EngineProcess, Measured, engine_process, timed
from benchmarks.random_models import DECODERS, ENCODER_DECODERS, Load, step_weights
from benchmarks.serving import git_revision
from benchmarks.soak.memory import resident_bytes
from tgis.engines.kernels.cpu.library import load_kernels
from tgis.errors import StartError
from tgis.utils.cpus import usable_cores

_HERE = Path(__file__).parents[1]
BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
NATIVE, REFERENCE, CTRANSLATE2 = "tgis_native float32", "hf_transformers float32", "ctranslate2 float32"
SYSTEMS = (
    *(NATIVE, "tgis_native bfloat16", "tgis_native int8"),
    *(REFERENCE, "hf_transformers bfloat16"),
    *(CTRANSLATE2, "ctranslate2 int8"),
)
_BESIDE = {
    "float32": (REFERENCE, CTRANSLATE2),
    "bfloat16": ("hf_transformers bfloat16",),
    "int8": ("ctranslate2 int8",),
}
_NEAR_TIE = 1e-4  # of the largest logit


Outputs = dict[str, list[tuple[list[int], list[int]]]]  # each system's pairs of input and output
Figures = dict[str, dict[str, Any]]  # by system


def start(
    name: str, model: Path, load: Load, args: argparse.Namespace
) -> contextlib.AbstractContextManager[EngineProcess]:
    engine, dtype = name.split()
    if engine == "ctranslate2":
        converted = _convert(model, dtype, args.ctranslate2_python)
        return engine_process(args.ctranslate2_python, engine, str(converted), str(usable_cores()))
    options = ["--model-name", str(model), "--cache-dir", str(args.cache), "--deployment-framework", engine]
    options += ["--dtype", dtype, "--strict-options", "true", "--max-batch-size", str(max(load.streams))]
    options += ["--quantize-logits", "true"] if dtype == "int8" else []
    options += ["--max-sequence-length", "256", "--max-new-tokens", "128", "--prefix-cache", "false"]
    return engine_process(sys.executable, "tgis", str(_HERE), *options)


def _convert(model: Path, quantization: str, python: str) -> Path:
    """The model for CTranslate2, converted once."""
    out = model / f"ctranslate2-{quantization}"
    if not (out / "model.bin").exists():
        command = [python, str(Path(__file__).with_name("convert_to_ctranslate2.py")), str(model), str(out)]
        subprocess.run(
            [*command, quantization], check=True, stdout=sys.stderr, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
    return out


def measure_round(args: argparse.Namespace, name: str, number: int) -> Figures:
    """Figures of each system that takes the model."""
    model = args.all_models[name]
    directory, vocab_size = model.make(args.cache), model.settings["vocab_size"]
    found, outputs = Figures(), Outputs()
    with contextlib.ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for which in [each for each in args.systems if (name, each) not in args.left_out]:
            try:  # one after the other: a start is measured alone
                engines[which] = engine = stack.enter_context(start(which, directory, model.load, args))
            except StartError:
                print(f"{name}: {which} is left out", file=sys.stderr)
                args.left_out.add((name, which))
                continue
            found[which] = {"start_s": engine.start_seconds, "loads": {}}
            for streams in model.load.streams:
                warm_up = model.load.inputs(streams, vocab_size, f"warm-up {number}")[:streams]
                engine.run(streams, model.load.output_tokens, warm_up)
        for position, streams in enumerate(model.load.streams):
            inputs = model.load.inputs(streams, vocab_size, f"{number} {streams}")
            first = (number + position) % max(len(engines), 1)
            for which in [*engines][first:] + [*engines][:first]:
                figures, tokens = _measure(engines[which], streams, model.load.output_tokens, inputs)
                found[which]["loads"][str(streams)] = figures
                outputs.setdefault(which, []).extend(zip(inputs, tokens, strict=True))
                print(f"round {number} {name} {streams:>3} {which:<24} {_line(figures)}", file=sys.stderr, flush=True)
        for which, engine in engines.items():
            found[which]["peak_mb"] = resident_bytes(engine.pid, "VmHWM") / (1 << 20)
    for which, counts in compare(directory, outputs).items():
        found[which]["outputs"] = counts
    return found


def _measure(
    engine: EngineProcess, streams: int, output_tokens: int, inputs: list[list[int]]
) -> tuple[dict[str, Any], list[list[int]]]:
    outputs: list[list[int]] = []

    def run() -> Measured:
        measured, outputs[:] = engine.run(streams, output_tokens, inputs)
        return measured

    _, figures = timed(run)
    assert {len(output) for output in outputs} == {output_tokens}
    return figures, outputs


def _line(figures: dict[str, Any]) -> str:
    cores = f"others {figures['taken_cores']:.2f} cores"
    return f"{figures['requests_per_s']:>7.2f}/s, latency {figures['latency_ms']['p50']:>7.0f} ms, {cores}"


def compare(directory: Path, outputs: Outputs) -> dict[str, dict[str, int]]:
    """For each other system in float32, how many outputs are those of the reference: same, near tie, different."""
    counts: dict[str, dict[str, int]] = {}
    others = [name for name in (NATIVE, CTRANSLATE2) if REFERENCE in outputs and name in outputs]
    logits = _next_logits(directory) if others else None
    for name in others:
        kinds = Counter({"same": 0, "near tie": 0, "different": 0})
        for (tokens, ours), (_, theirs) in zip(outputs[REFERENCE], outputs[name], strict=True):
            kinds["same" if ours == theirs else _difference(logits, tokens, ours, theirs)] += 1
        counts[name] = dict(kinds)
    return counts


def _difference(logits: Any, tokens: list[int], ours: list[int], theirs: list[int]) -> str:
    first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    scores = logits(tokens, ours[:first])
    gap = scores[ours[first]] - scores[theirs[first]]
    return "near tie" if abs(gap) <= _NEAR_TIE * scores.abs().max() else "different"


def _next_logits(directory: Path) -> Callable[[list[int], list[int]], torch.Tensor]:
    """The logits of transformers after an input and the first tokens of an output."""
    model = transformers_generate.load(str(directory), "float32", "cpu")

    def logits(tokens: list[int], output: list[int]) -> torch.Tensor:
        inputs = {"input_ids": torch.tensor([tokens + output])}
        if model.config.is_encoder_decoder:
            start = model.config.decoder_start_token_id
            inputs = {"input_ids": torch.tensor([tokens]), "decoder_input_ids": torch.tensor([[start, *output]])}
        with torch.inference_mode():
            return model(**inputs).logits[0, -1]

    return logits


def summarize_rounds(rounds: list[dict[str, Figures]], limits: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The medians of each model, load and system, and of their ratios to the others in the same rounds."""
    rows = []
    for name, by_system in limits.items():
        measured = [each[name] for each in rounds if name in each]
        for streams, which in product((ENCODER_DECODERS | DECODERS)[name].load.streams, SYSTEMS):
            if any(which in each for each in measured):
                rows.append(_row(measured, which, streams) | {"model": name, "limit": by_system[which] * streams})
    return rows


def _row(rounds: list[Figures], which: str, streams: int) -> dict[str, Any]:
    those = [each[which] for each in rounds if which in each]
    loads = [load for (load,) in _undisturbed([(each["loads"][str(streams)],) for each in those])]
    return {
        "streams": streams,
        "system": which,
        "rounds": len(loads),
        "requests_per_s": statistics.median(load["requests_per_s"] for load in loads),
        "output_tokens_per_s": statistics.median(load["output_tokens_per_s"] for load in loads),
        "latency_p50_ms": statistics.median(load["latency_ms"]["p50"] for load in loads),
        "peak_mb": statistics.median(each["peak_mb"] for each in those),
        "taken_cores": max(load["taken_cores"] for load in loads),
        "ratios": dict(_ratios(rounds, which, str(streams))),
    }


def _ratios(rounds: list[Figures], which: str, streams: str) -> Iterator[tuple[str, float]]:
    for other in SYSTEMS:
        both = [(each[which], each[other]) for each in rounds if which in each and other in each]
        loads = _undisturbed([tuple(figures["loads"][streams] for figures in pair) for pair in both])
        if loads and other != which:
            yield other, statistics.median(ours["requests_per_s"] / theirs["requests_per_s"] for ours, theirs in loads)


def _undisturbed(rounds: list[tuple[dict[str, Any], ...]]) -> list[tuple[dict[str, Any], ...]]:
    """The rounds in which others took little of the cores; if there are none, that in which they took least."""
    taken = [max(load["taken_cores"] for load in loads) for loads in rounds]
    most = max(MOST_TAKEN, min(taken, default=0.0))
    return [loads for loads, cores in zip(rounds, taken, strict=True) if cores <= most]


def reading_limits(names: list[str], gb_s: float) -> dict[str, dict[str, float]]:
    """By model and system, the requests/s of one stream that the read bandwidth allows."""
    limits = {}
    for name in names:
        model = (ENCODER_DECODERS | DECODERS)[name]
        numbers = step_weights(model.config()) * model.load.output_tokens
        limits[name] = {which: gb_s * 1e9 / numbers / BYTES[which.split()[1]] for which in SYSTEMS}
    return limits


def print_rows(rows: list[dict[str, Any]]) -> None:
    heads = f"{'requests/s':>10} {'tokens/s':>8} {'p50 ms':>8} {'limit':>8} {'peak MB':>8} {'others':>6}"
    print(f"{'model':<14} {'':>3} {'':<24} {heads}  ratio to")
    for row in rows:
        figures = f"{row['requests_per_s']:>10.2f} {row['output_tokens_per_s']:>8.1f} {row['latency_p50_ms']:>8.0f}"
        figures += f" {row['limit']:>8.2f} {row['peak_mb']:>8.0f} {row['taken_cores']:>6.2f}"
        beside = [other for other in _BESIDE[row["system"].split()[1]] if other in row["ratios"]]
        ratios = ", ".join(f"{other} {row['ratios'][other]:.2f}" for other in beside)
        print(f"{row['model']:<14} {row['streams']:>3} {row['system']:<24} {figures}  {ratios}")


def count_outputs(rounds: list[dict[str, Figures]]) -> dict[str, Counter[str]]:
    """By model and system, how many outputs are those of the reference."""
    counts: dict[str, Counter[str]] = {}
    for each in rounds:
        for name, systems in each.items():
            for which, figures in systems.items():
                if "outputs" in figures:
                    counts.setdefault(f"{name} {which}", Counter()).update(figures["outputs"])
    return counts


def parse(arguments: list[str]) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.encoder_decoders", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--decoder-only", action="store_true", help="BLOOM, MPT, Falcon and GPT-J instead")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="some of these models only")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="'ENGINE DTYPE'")
    parser.add_argument("--ctranslate2-python", metavar="FILE", help="the Python of CTranslate2's environment")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rounds to this file")
    args = parser.parse_args(arguments)
    args.all_models = DECODERS if args.decoder_only else ENCODER_DECODERS
    args.models = args.models or [*args.all_models]
    if unknown := set(args.models) - args.all_models.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(args.all_models)}")
    if args.decoder_only or not args.ctranslate2_python:
        args.systems = [name for name in args.systems if not name.startswith("ctranslate2")]
    args.cache, args.left_out = args.cache.resolve(), set()
    return args


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    torch.set_num_threads(usable_cores())
    machine = measure_machine(load_kernels("auto", str(args.cache)), torch.bfloat16)
    report = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rounds": []}
    for _ in range(args.rounds):
        number = len(report["rounds"])
        report["rounds"].append({name: measure_round(args, name, number) for name in args.models})
        names = [*{name: None for each in report["rounds"] for name in each}]
        report |= {"machine": machine, "revision": git_revision()}
        report["rows"] = summarize_rounds(report["rounds"], reading_limits(names, machine["read_gb_s"]))
        report["outputs"] = count_outputs(report["rounds"])
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{machine['cpu']}, {usable_cores()} cores, reads {machine['read_gb_s']:.1f} GB/s")
    print_rows(report["rows"])
    for name, counts in report["outputs"].items():
        print(f"outputs of {name} beside {REFERENCE}: {', '.join(f'{n} {kind}' for kind, n in counts.items())}")
    print(json.dumps({name: report[name] for name in ("machine", "revision", "rows", "outputs")}))
    return int(any(counts["different"] for name, counts in report["outputs"].items() if name.endswith(NATIVE)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
