"""Served speed of this tree beside another checkout: `python -m benchmarks.compare --other DIRECTORY`.

Each pair starts both servers, each with its own interpreter, and loads one after the other with the same streams; which
one comes first alternates. A ratio divides this tree's figure by the other's of the same pair; the table has the median
of all pairs, the smallest and the largest. The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving import cpu_name, running_server
from benchmarks.suite import REQUESTS, STREAMS, run_load
from demo.fetch import ensure

INPUT_TOKENS, OUTPUT_TOKENS = 130, 128
FIGURES = ("output_tokens_per_s", "server_cpu_us_per_token")
_HERE = Path(__file__).parents[1]

Pair = dict[str, dict[int, dict[str, float]]]  # figures by checkout and streams


def measure_pair(args: argparse.Namespace, model: Path, number: int) -> Pair:
    checkouts = {"this": (args.python, _HERE), "other": (args.other_python, args.other)}
    order = list(checkouts)[:: -1 if number % 2 else 1]
    pair: Pair = {name: {} for name in checkouts}
    options = ("--dtype", args.dtype)
    (python, directory), (next_python, next_directory) = (checkouts[name] for name in order)
    with (
        running_server(model, args.cache, *options, python=python, directory=directory) as first,
        running_server(model, args.cache, *options, python=next_python, directory=next_directory) as second,
    ):
        for size in args.streams:
            for name, server in zip(order, (first, second), strict=True):
                extra = ("--seed", str(number), "--server-pid", str(server.pid))
                requests = REQUESTS.get(size, 4 * size)
                load = run_load(server.target, size, requests, INPUT_TOKENS, args.output_tokens, *extra)
                pair[name][size] = {figure: load[figure] for figure in FIGURES}
    return pair


def summarize(pairs: list[Pair], sizes: list[int]) -> list[dict[str, Any]]:
    """For each number of streams the medians of both, and how the ratios of the pairs are spread."""
    rows = []
    for size in sizes:
        row: dict[str, Any] = {"streams": size}
        for figure in FIGURES:
            both = {name: [pair[name][size][figure] for pair in pairs] for name in ("this", "other")}
            ratios = [this / other for this, other in zip(both["this"], both["other"], strict=True)]
            row[figure] = {name: round(statistics.median(values), 2) for name, values in both.items()}
            spread = {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}
            row[figure]["ratio"] = {name: round(value, 3) for name, value in spread.items()}
        rows.append(row)
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"{'streams':>8} {'':<24} {'this':>8} {'other':>8} {'ratio':>6} {'spread':>15}")
    for row in rows:
        for figure in FIGURES:
            each, ratio = row[figure], row[figure]["ratio"]
            both = f"{each['this']:>8} {each['other']:>8}"
            spread = f"{ratio['median']:>6.3f} {ratio['min']:.3f} to {ratio['max']:.3f}"
            print(f"{row['streams']:>8} {figure:<24} {both} {spread}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description="compare two checkouts")
    parser.add_argument("--other", type=Path, required=True, metavar="DIR", help="a checkout")
    parser.add_argument("--other-python", metavar="FILE", help="its interpreter [.venv/bin/python in it]")
    parser.add_argument("--python", default=sys.executable, metavar="FILE", help="this tree's [the one that runs this]")
    parser.add_argument("--pairs", type=int, default=5, metavar="N")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), metavar="N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--output-tokens", type=int, default=OUTPUT_TOKENS, metavar="N", help="of each stream")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(arguments)
    args.other = args.other.resolve()
    args.other_python = args.other_python or str(args.other / ".venv/bin/python")
    model, args.cache = ensure("smollm2", args.cache).resolve(), args.cache.resolve()
    pairs = []
    for number in range(args.pairs):
        pairs.append(measure_pair(args, model, number))
        print(f"pair {number + 1} {json.dumps(pairs[-1])}", flush=True)
    rows = summarize(pairs, args.streams)
    print_rows(rows)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=args.other, check=False, capture_output=True, text=True)
    print(json.dumps({"cpu": cpu_name(), "other": commit.stdout.strip(), "rows": rows, "pairs": pairs}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
