"""`make bench`: measures decode steps, tgis and transformers' static batches, and the front end alone.

Every part is a process that has the machine to itself. Rounds alternate between the servers, so that a slow
minute affects all of them; the figures are medians over the rounds. A part that fails does not stop the
others. The last line is one JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.front_end import measure_front_end, print_reports
from benchmarks.serving import running_server
from demo.fetch import ensure
from tgis.errors import StartError

STREAMS = (1, 8, 32)
REQUESTS = {1: 4, 8: 32, 32: 128}
INPUT_TOKENS, OUTPUT_TOKENS = 130, 128

Levels = dict[int, dict[str, Any]]  # reports of `tgis bench` by number of streams


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
        rounds.append(_measure_tgis(model, args.cache, args.dtype))
    print(f"SmolLM2-135M {args.dtype}, {INPUT_TOKENS} tokens in, {OUTPUT_TOKENS} out; tokens/s")
    return {"summary": _beside_transformers(generated, rounds), "transformers": generated, "tgis": rounds}


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


def _measure_tgis(model: Path, cache: Path, dtype: str) -> Levels:
    """Every load has its own seed, so that no prompt is in the prefix cache."""
    with running_server(model, cache, "--dtype", dtype) as server:
        print(f"tgis ready after {server.start_seconds:.1f} s", file=sys.stderr)
        options = "--server-pid", str(server.pid)
        return {
            size: run_load(
                server.target, size, REQUESTS[size], INPUT_TOKENS, OUTPUT_TOKENS, *options, "--seed", f"{size}"
            )
            for size in STREAMS
        }


def _beside_transformers(generated: list[dict[int, float]], rounds: list[Levels]) -> list[dict[str, float]]:
    print(f"{'streams':>8} {'transformers':>13} {'tgis':>8} {'ratio':>6} {'TTFT p50':>9} {'per token p50':>14}")
    rows = []
    for size in STREAMS:
        levels = [each[size] for each in rounds]
        ours, ratio = _speeds(levels, [each[size] for each in generated])
        peer = statistics.median(each[size] for each in generated)
        first, gap = _medians(levels, "ttft_ms", "tpot_ms")
        print(f"{size:>8} {peer:>13.1f} {ours:>8.1f} {ratio:>6.2f} {first:>6.0f} ms {gap:>11.1f} ms")
        rows.append({"streams": size, "transformers": peer, "tgis": ours, "ratio": ratio, "ttft_p50_ms": first})
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
