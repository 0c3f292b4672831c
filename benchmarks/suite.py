"""`make bench`: measures decode steps, tgis and transformers' static batches, each API, and the front end alone.

Every part is a process that has the machine to itself. Rounds alternate between the servers, or the APIs of one, so
that a slow minute affects all of them; the figures are medians over the rounds. A part that fails does not stop the
others. The last line is one JSON object.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.front_end import measure_front_end, print_reports
from benchmarks.serving import Server, running_server
from demo.fetch import ensure
from tgis.errors import StartError

STREAMS = (1, 8, 32)
REQUESTS = {1: 4, 8: 32, 32: 128}
APIS = ("grpc", "tgi", "openai")
INPUT_TOKENS, OUTPUT_TOKENS = 130, 128

Levels = dict[str, dict[int, dict[str, Any]]]  # by API and streams: what `tgis bench` reports


def run_load(
    target: str, concurrency: int, requests: int, input_tokens: int, output_tokens: int, *options: str
) -> dict[str, Any]:
    """Run `tgis bench` with streams against a server; return the report of its only level."""
    lengths = ("--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens))
    amount = ("--concurrency", str(concurrency), "--requests", str(requests))
    report = _run_json("-m", "tgis", "bench", "--target", target, *amount, *lengths, *options, "--stream", "--quiet")
    level: dict[str, Any] = report["levels"][0]
    return level


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    return _run_json("-m", "benchmarks.cpu_steps", "--dtype", args.dtype, "--cache", str(args.cache))


def measure_served(args: argparse.Namespace) -> dict[str, Any]:
    model = ensure("smollm2", args.cache)
    generated: list[dict[int, float]] = []
    rounds: list[Levels] = []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        generated.append(_measure_transformers(model, args.dtype))
        first = number % len(APIS)
        rounds.append(_measure_apis(model, args.cache, args.dtype, (*APIS[first:], *APIS[:first])))
    print(f"SmolLM2-135M {args.dtype}, {INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out; tokens/s")
    summary = {"transformers": _beside_transformers(generated, rounds), "apis": _beside_grpc(rounds)}
    return {"summary": summary, "transformers": generated, "tgis": rounds}


def measure_alone(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the front end alone."""
    loads = measure_front_end(args.cache)
    print_reports(loads)
    return {"loads": [asdict(load) for load in loads]}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "steps": measure_steps,
    "served": measure_served,
    "front_end": measure_alone,
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too, after every part")
    args = parser.parse_args(arguments)
    parts = args.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"--parts: no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    report: dict[str, Any] = {"settings": {"dtype": args.dtype, "rounds": args.rounds}}
    for part in parts:
        report[part] = _run_part(part, args)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({part: found.get("summary", found) for part, found in report.items()}))
    return int(any("error" in found for found in report.values()))


def _run_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    try:
        return PARTS[part](args)
    except (StartError, subprocess.CalledProcessError) as error:
        print(f"{part}: {error}", file=sys.stderr)
        return {"error": str(error)}


def _measure_transformers(model: Path, dtype: str) -> dict[int, float]:
    """Tokens/s of transformers' generate at each batch size."""
    lengths = ("--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS))
    sizes = ("--sizes", ",".join(map(str, STREAMS)), "--repeats", "1")
    report = _run_json(
        "-m", "benchmarks.transformers_generate", str(model), "--dtype", dtype, *lengths, *sizes, "--json"
    )
    return {row["size"]: row["output_tokens_per_s"] for row in report["sizes"]}


def _measure_apis(model: Path, cache: Path, dtype: str, apis: tuple[str, ...]) -> Levels:
    levels: Levels = {api: {} for api in apis}
    with running_server(model, cache, "--dtype", dtype) as server:
        print(f"tgis ready after {server.start_seconds:.1f} s", file=sys.stderr)
        for seed, (size, api) in enumerate(itertools.product(STREAMS, apis)):
            levels[api][size] = _measure_api(server, api, size, seed)
    return levels


def _measure_api(server: Server, api: str, size: int, seed: int) -> dict[str, Any]:
    """Measure one API; every run has its own seed, so that no prompt is in the prefix cache."""
    target = server.target if api == "grpc" else f"127.0.0.1:{server.http_port}"
    options = ("--api", api, "--server-pid", str(server.pid), "--seed", str(seed))
    return run_load(target, size, REQUESTS[size], INPUT_TOKENS, OUTPUT_TOKENS, *options)


def _beside_transformers(generated: list[dict[int, float]], rounds: list[Levels]) -> list[dict[str, float]]:
    print(f"{'streams':>8} {'transformers':>13} {'tgis':>8} {'ratio':>6} {'TTFT p50':>9} {'per token p50':>14}")
    rows = []
    for size in STREAMS:
        levels = [each["grpc"][size] for each in rounds]
        ours, ratio = _speeds(levels, [each[size] for each in generated])
        peer = statistics.median(each[size] for each in generated)
        first, gap = _medians(levels, "ttft_ms", "tpot_ms")
        print(f"{size:>8} {peer:>13.1f} {ours:>8.1f} {ratio:>6.2f} {first:>6.0f} ms {gap:>11.1f} ms")
        rows.append({"streams": size, "transformers": peer, "tgis": ours, "ratio": ratio, "ttft_p50_ms": first})
    return _rounded(rows)


def _beside_grpc(rounds: list[Levels]) -> list[dict[str, Any]]:
    print("us per token are CPU time of the front end; load is the load generator's share of a core")
    print(f"{'streams':>8} {'API':>7} {'tgis':>8} {'of gRPC':>8} {'TTFT p50':>9} {'us per token':>13} {'load':>6}")
    rows = []
    for size in STREAMS:
        for api in APIS:
            levels = [each[api][size] for each in rounds]
            ours, ratio = _speeds(levels, [each["grpc"][size]["output_tokens_per_s"] for each in rounds])
            (first,) = _medians(levels, "ttft_ms")
            used = statistics.median(level["server_cpu_us_per_token"] for level in levels)
            load = statistics.median(level["client_cpu"] for level in levels)
            print(f"{size:>8} {api:>7} {ours:>8.1f} {ratio:>8.2f} {first:>6.0f} ms {used:>13.1f} {load:>6.0%}")
            row = {"tgis": ours, "of_grpc": ratio, "ttft_p50_ms": first, "front_end_us_per_token": used, "load": load}
            rows.append({"streams": size, "api": api, **row})
    return _rounded(rows)


def _speeds(levels: list[dict[str, Any]], others: list[float]) -> tuple[float, float]:
    """Median tokens/s, and the median ratio to `others`, round by round."""
    speeds = [level["output_tokens_per_s"] for level in levels]
    return statistics.median(speeds), statistics.median(a / b for a, b in zip(speeds, others, strict=True))


def _medians(levels: list[dict[str, Any]], *names: str) -> list[float]:
    return [statistics.median(level[name]["p50"] for level in levels) for name in names]


def _rounded(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: round(v, 3) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def _run_json(*command: str) -> dict[str, Any]:
    """Run a Python process and parse the last line it prints as JSON; print the other lines."""
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    *lines, last = done.stdout.splitlines()
    print(*lines, sep="\n", end="\n" if lines else "")
    value: dict[str, Any] = json.loads(last)
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
