"""`python -m benchmarks.ranks`: decode steps of one rank with all cores, and of ranks that share them, in turns.

The model is a random Llama of half a billion parameters. Each measurement is a process of its own, which loads the
model and decodes some steps for each number of sequences. Times are milliseconds of a step, the median over rounds;
factors are times as fast as one rank. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from benchmarks.engines import engine_options
from benchmarks.quantized_steps import medians_ms, step_seconds
from benchmarks.random_models import Load, Model
from benchmarks.serving import cpu_name
from tgis.utils.cpus import usable_cores

LLAMA = Model(
    "Llama",
    {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    Load(130, 12, (1, 8, 32)),
)


def measure(model: Path, ranks: int, dtype: str, cache: Path) -> dict[int, float]:
    """Seconds of a step by the number of sequences."""
    from tgis.engines import load_engine  # noqa: PLC0415 - after the environment is prepared

    def fail(reason: str) -> NoReturn:
        sys.exit(reason)

    plain = engine_options("tgis_native", model, dtype, 32, cache)
    more = {"num_shards": ranks, "num_threads": usable_cores(), "kv_cache_bytes": 1 << 30, "cache_dir": str(cache)}
    engine, _ = load_engine(msgspec.structs.replace(plain, **more), fail, lambda _: None)
    engine.warm_up()
    found = {count: step_seconds(engine, count, LLAMA.load.input_tokens) for count in LLAMA.load.streams}
    engine.close()
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], metavar="N")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(arguments)
    model = LLAMA.make(args.cache)
    if args.rounds == 0:  # the process of one measurement
        print(json.dumps(measure(model, args.ranks[0], args.dtype, args.cache)))
        return 0
    times: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in args.ranks}
    for number in range(args.rounds):
        for ranks in args.ranks[:: -1 if number % 2 else 1]:
            others = ("--dtype", args.dtype, "--cache", str(args.cache), "--rounds", "0")
            command = [sys.executable, "-m", "benchmarks.ranks", "--ranks", str(ranks), *others]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            times[ranks].append(json.loads(done.stdout.splitlines()[-1]))
    report = []
    for count in map(str, LLAMA.load.streams):
        seconds = {f"{ranks} ranks": [each[count] for each in found] for ranks, found in times.items()}
        report.append({"sequences": int(count), "ms": medians_ms(f"{count} sequences", seconds)})
    found = {"cpu": cpu_name(), "dtype": args.dtype, "rounds": args.rounds, "steps": report}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
