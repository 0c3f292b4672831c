"""`make bench`: this machine's decode steps, tgis beside transformers' own static batches, and tgis's front end alone.

Every part is a process that has the machine to itself. Rounds alternate between the two, so that a slow minute hits
both; the figures are medians over the rounds. The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.front_end import measure_front_end, print_reports
from benchmarks.serving import running_server
from tgis.models.demo.fetch import ensure

STREAMS = (1, 8, 32)
REQUESTS = {1: 4, 8: 32, 32: 128}
INPUT_TOKENS, OUTPUT_TOKENS = 130, 128


def measure_transformers(model: Path, dtype: str) -> dict[int, float]:
    """Tokens/s of transformers' generate at each batch size."""
    lengths = ("--input-tokens", str(INPUT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS))
    sizes = ("--sizes", ",".join(map(str, STREAMS)), "--repeats", "1")
    report = _run_json("-m", "benchmarks.baseline", str(model), "--dtype", dtype, *lengths, *sizes, "--json")
    return {row["size"]: row["output_tokens_per_s"] for row in report["sizes"]}


def run_load(target: str, concurrency: int, requests: int, input_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Run `tgis bench` with streams against a server; returns the report of its one level."""
    lengths = ("--input-tokens", str(input_tokens), "--output-tokens", str(output_tokens))
    amount = ("--concurrency", str(concurrency), "--requests", str(requests))
    report = _run_json("-m", "tgis", "bench", "--target", target, *amount, *lengths, "--stream", "--quiet")
    level: dict[str, Any] = report["levels"][0]
    return level


def measure_server(model: Path, cache: Path, dtype: str) -> dict[int, dict[str, Any]]:
    """The reports for each number of streams."""
    with running_server(model, cache, "--dtype", dtype) as server:
        print(f"tgis ready after {server.start_seconds:.1f} s", file=sys.stderr)
        return {size: run_load(server.target, size, REQUESTS[size], INPUT_TOKENS, OUTPUT_TOKENS) for size in STREAMS}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there too")
    args = parser.parse_args(arguments)
    model = ensure("smollm2", args.cache)
    steps = _run_json("-m", "benchmarks.cpu_steps", "--dtype", args.dtype, "--cache", str(args.cache))
    rounds = []
    for number in range(args.rounds):
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
        rounds.append(
            {"baseline": measure_transformers(model, args.dtype), "tgis": measure_server(model, args.cache, args.dtype)}
        )
    report: dict[str, Any] = {
        "settings": {"dtype": args.dtype, "rounds": args.rounds},
        "steps": steps,
        "rounds": rounds,
    }
    report["summary"] = _print_summary(report)
    front_end = measure_front_end(args.cache)
    print_reports(front_end)
    report["summary"]["front_end"] = [asdict(load) for load in front_end]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"]))
    return 0


def _print_summary(report: dict[str, Any]) -> dict[str, Any]:
    print(f"SmolLM2-135M {report['settings']['dtype']}, {INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out; tokens/s")
    print(f"{'streams':>8} {'transformers':>13} {'tgis':>8} {'ratio':>6} {'TTFT p50':>9} {'per token p50':>14}")
    summary: dict[str, Any] = {"sizes": []}
    for size in STREAMS:
        peer = statistics.median(r["baseline"][size] for r in report["rounds"])
        levels = [r["tgis"][size] for r in report["rounds"]]
        ours = statistics.median(level["output_tokens_per_s"] for level in levels)
        ratio = statistics.median(
            r["tgis"][size]["output_tokens_per_s"] / r["baseline"][size] for r in report["rounds"]
        )
        first = statistics.median(level["ttft_ms"]["p50"] for level in levels)
        gap = statistics.median(level["tpot_ms"]["p50"] for level in levels)
        print(f"{size:>8} {peer:>13.1f} {ours:>8.1f} {ratio:>6.2f} {first:>6.0f} ms {gap:>11.1f} ms")
        row = {"streams": size, "transformers": peer, "tgis": ours, "ratio": ratio, "ttft_p50_ms": first}
        summary["sizes"].append({name: round(value, 2) for name, value in row.items()})
    return summary


def _run_json(*command: str) -> dict[str, Any]:
    """The JSON on the last line that a Python process prints; the lines before it are printed here, too."""
    done = subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True)
    *lines, last = done.stdout.splitlines()
    print(*lines, sep="\n", end="\n" if lines else "")
    value: dict[str, Any] = json.loads(last)
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
