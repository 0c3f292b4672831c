"""`python -m benchmarks.speculation MODEL`: tokens per second of tgis_native with lookup and without, in turns.

An engine in this process, with the batcher and without front end, under a closed loop of greedy requests of one kind:
edits of a text, extraction from it, and questions without one. In each round every load runs with SPECULATION=off and
auto, one after the other, in an order that changes; batchers keep what they learn of costs, as in a server. Outputs
must be the same, token for token. A text counts as looping if its end repeats with a period of up to 16 tokens. The
last line is one JSON object.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.serving import git_revision
from tgis.config import parse
from tgis.environment import prepare_environment

_TEXT = (
    "The harbour of Lindau was built in 1856. Its lighthouse is thirty-three metres high, and the only one in Bavaria. "
    "Anna Berger, born on 4 May 1961 in Bregenz, has been its keeper since 1989; her e-mail address is "
    "berger@harbour.example. Her brother Paul Berger, born on 12 June 1958 in Chur, repairs boats at number {number}, "
    "Harbour Road. On Sundays the two of them tell visitors about the storm of {year}, in which eleven ships were lost."
)
_TASKS = {
    "edit": "Copy this text word by word, but write every number in digits.\n\n{text}",
    "extraction": "List every sentence of this text that names a person, copied exactly.\n\n{text}",
    "questions": "Question {number}: why did people of the year {year} build lighthouses, and how were they lit?",
}
_STREAMS = (1, 4, 8, 32)
_WAYS = ("off", "auto")


def prompts(kind: str, count: int, tokenize: Any) -> list[list[int]]:
    """Inputs of a kind, each with other numbers."""
    found = []
    for number in range(count):
        facts = {"number": 11 + 3 * number, "year": 1801 + 7 * number}
        asked = _TASKS[kind].format(text=_TEXT.format(**facts), **facts)
        found.append(tokenize(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"))
    return found


def run(engine: Any, batcher: Any, numbers: Iterator[int], asked: list[list[int]], length: int) -> dict[str, Any]:
    """All inputs at once, to their ends."""
    from tgis.ipc.request import Request  # noqa: PLC0415 - the environment is prepared first

    requests = [Request(next(numbers), tokens, length) for tokens in asked]
    seqs = batcher.submit(requests, time.monotonic())
    decoding, steps, num_decoded, started = 0.0, 0, 0, 0
    while not batcher.idle:
        before = time.perf_counter()
        plan = batcher.plan(time.monotonic())
        engine.release(plan.to_release)
        if not plan.seqs:
            continue
        held = sum(len(seq.tokens) for seq in plan.seqs)
        batcher.commit(plan, engine.step(plan).tokens, time.monotonic())
        if not plan.has_prefill:
            decoding += time.perf_counter() - before
            steps += 1
            started += len(plan.seqs)
            num_decoded += sum(len(seq.tokens) for seq in plan.seqs) - held
    outputs = [seq.tokens[seq.prompt_length :] for seq in seqs]
    return {"seconds": decoding, "tokens": num_decoded, "tokens_a_step": num_decoded / started, "outputs": outputs}


def loops(output: list[int]) -> bool:
    tail = output[-48:]
    return any(tail[period:] == tail[:-period] for period in range(1, 17) if len(tail) > 2 * period)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120, help="of an output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=_STREAMS)
    parser.add_argument("--kinds", nargs="+", default=list(_TASKS), choices=_TASKS)
    args = parser.parse_args(argv)
    options = ["--model-name", str(args.model), "--max-sequence-length", "1024", "--num-threads", str(args.threads)]
    options += ["--speculation", "lookup"]
    config = parse(options, os.environ, "tgis serve")
    prepare_environment(config)
    from tokenizers import Tokenizer  # noqa: PLC0415 - as above

    from tgis.batcher.batcher import Batcher  # noqa: PLC0415
    from tgis.engine_core.main import batch_limits  # noqa: PLC0415
    from tgis.engines import load_engine  # noqa: PLC0415
    from tgis.server import prepare  # noqa: PLC0415

    engine_options = prepare(config).engine_options()
    engine, _ = load_engine(engine_options, sys.exit, lambda _: None)
    engine.warm_up()
    tokenizer, numbers = Tokenizer.from_file(str(args.model / "tokenizer.json")), itertools.count()
    batchers = {}
    for way in _WAYS:
        proposed = engine.info.proposed_tokens if way == "auto" else 0
        limits = batch_limits(engine_options, engine.info)
        limits = replace(limits, proposed_tokens=proposed, prefix_cache=False)  # the two share one KV cache
        batchers[way] = Batcher(limits, engine_options.eos_ids)
    loads = [(kind, streams) for kind in args.kinds for streams in args.streams]
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for number in range(args.rounds + 1):  # the first one warms up
        for kind, streams in loads:
            asked = prompts(kind, streams, lambda text: tokenizer.encode(text).ids)
            for way in _WAYS[:: -1 if number % 2 else 1]:
                one = run(engine, batchers[way], numbers, asked, args.tokens)
                found.setdefault((kind, streams, way), []).append(one)
    report = []
    for kind, streams in loads:
        off, auto = (found[kind, streams, way] for way in _WAYS)
        assert all(one["outputs"] == off[0]["outputs"] for one in off + auto), (kind, streams)
        rate = [statistics.median(one["tokens"] / one["seconds"] for one in each[1:]) for each in (off, auto)]
        looping = sum(map(loops, off[0]["outputs"]))
        first = auto[0]["tokens"] / auto[0]["seconds"] / rate[0]
        each = statistics.median(one["tokens_a_step"] for one in auto[1:])
        report.append([kind, streams, *rate, rate[1] / rate[0], first, each, looping])
        print(f"{kind:12}{streams:3} streams: {rate[0]:7.1f} -> {rate[1]:7.1f} tokens/s, {rate[1] / rate[0]:.2f}, "
              f"first round {first:.2f}; {each:.2f} tokens a step, {looping} loop", flush=True)  # fmt: skip
    print(json.dumps({"revision": git_revision(), "threads": args.threads, "loads": report}))


if __name__ == "__main__":
    main(sys.argv[1:])
