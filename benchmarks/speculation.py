"""`python -m benchmarks.speculation MODEL`: tokens per second of tgis_native with lookup and without it.

An engine in this process, with the batcher and without front end, under a closed loop of requests of one kind, or of
all kinds mixed: edits of a text, extraction from it, summaries of it, and questions without one; greedy, and one stream
with a temperature of 0.7. The CPU time of steps that just decode counts. In rounds SPECULATION=off and auto come one
after the other, in an order that changes; batchers keep what they learn of costs, as in a server, and steps of every
number of rows have been recorded. Outputs must be the same, token for token. An output ends where it would begin to
repeat itself, with a period of up to 64 tokens; where it does so is measured apart, as `loops`. The last line is one
JSON object.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.serving import git_revision
from tgis.config import parse
from tgis.environment import prepare_environment

_SENTENCES = (
    "The harbour of {town} was built in {year}, and its lighthouse is {number} metres high.",
    "{name} Berger, born in {other}, has been the keeper of the lighthouse since {late}.",
    "Every Sunday {name} tells visitors about the storm of {year}, in which {few} ships were lost.",
    "Her brother Paul repairs boats at number {number}, Harbour Road, and sells ropes to sailors.",
    "A ferry leaves for {other} at {few} o'clock, and comes back in the evening with bread and letters.",
    "In {late} a film was made here, about a smuggler who hid {number} barrels of wine in the old mill.",
    "The school has {number} pupils, most of whom learn to sail before they are {few} years old.",
    "When the lake froze in {year}, people walked from {town} to {other} with lamps in their hands.",
)
_WORDS = {
    "town": ("Lindau", "Bregenz", "Rorschach", "Arbon", "Romanshorn", "Meersburg"),
    "other": ("Konstanz", "Langenargen", "Wasserburg", "Nonnenhorn", "Friedrichshafen"),
    "name": ("Anna", "Clara", "Judith", "Maria", "Sophie", "Vera"),
}
_TASKS = {
    "edit": "Correct the spelling of this text. Change nothing else.\n\n{text}",
    "extraction": "List every sentence of this text that names a person, copied exactly.\n\n{text}",
    "summary": "Summarize this text in a few sentences.\n\n{text}",
    "questions": "Write a long story about {name}, who keeps the lighthouse of {town} in the year {year}.",
    "loops": "Repeat this sentence a hundred times: {name} keeps the lighthouse of {town}.",
}
_MIXED = ("edit", "extraction", "summary", "questions")
_STREAMS = (1, 4, 8, 32)
_WAYS = ("off", "auto")
_LONGEST_PERIOD = 64


@dataclass(frozen=True)
class Load:
    """Requests of a kind, so many at a time."""

    kind: str
    streams: int
    temperature: float

    def prompts(self) -> list[str]:
        """Each with other facts; enough for every kind and stream."""
        return [self._prompt(number) for number in range(max(4, 2 * self.streams if self.streams < 32 else 32))]

    def _prompt(self, number: int) -> str:
        draw = random.Random(number)
        facts: dict[str, Any] = {name: draw.choice(words) for name, words in _WORDS.items()}
        facts |= {"year": draw.randrange(1801, 1900), "late": draw.randrange(1950, 2000)}
        facts |= {"number": draw.randrange(21, 99), "few": draw.randrange(5, 12)}
        text = " ".join(draw.sample(_SENTENCES, 5)).format(**facts)
        kind = _MIXED[number % len(_MIXED)] if self.kind == "mixed" else self.kind
        return f"<|im_start|>user\n{_TASKS[kind].format(text=text, **facts)}<|im_end|>\n<|im_start|>assistant\n"

    def __str__(self) -> str:
        return f"{self.kind}{f' at {self.temperature}' if self.temperature else ''}, {self.streams} streams"


@dataclass
class Counts:
    """What the steps of one run took and gave that did nothing but decode."""

    seconds: float = 0.0
    tokens: int = 0
    sequences: int = 0  # of all steps
    proposed: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def sums(self) -> tuple[int, int, int]:
        return self.proposed, self.tokens, self.sequences

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def run(engine: Any, batcher: Any, requests: list[Any], streams: int) -> Counts:
    """A closed loop over all requests."""
    counts, waiting, seqs = Counts(), iter(requests), []
    while True:
        room = streams - len(batcher.running) - len(batcher.waiting)
        seqs += batcher.submit(list(itertools.islice(waiting, room)), time.monotonic())
        before = time.thread_time()  # whatever else runs on the machine
        plan = batcher.plan(time.monotonic())
        engine.release(plan.to_release)
        if not plan.seqs:
            break
        held = sum(len(seq.tokens) for seq in plan.seqs)
        result = engine.step(plan)
        batcher.commit(plan, result.tokens, time.monotonic(), result.verified)
        if not plan.has_prefill:
            counts.seconds += time.thread_time() - before
            counts.sequences += len(plan.seqs)
            counts.tokens += sum(len(seq.tokens) for seq in plan.seqs) - held
            counts.proposed += sum(map(len, result.verified.values()))
    counts.outputs = [seq.tokens[seq.prompt_length :] for seq in seqs]
    return counts


def before_it_loops(output: list[int]) -> int:
    """The length up to which an output does not repeat itself until its end."""
    best = len(output)
    for period in range(1, _LONGEST_PERIOD + 1):
        start = len(output) - period
        while start > 0 and output[start - 1] == output[start - 1 + period]:
            start -= 1
        if len(output) - start > max(2 * period, 16):
            best = min(best, start + period)
    return best


class Bench:
    """An engine, a batcher for each way, and how long each output may become."""

    def __init__(self, model: Path, threads: int, tokens: int) -> None:
        options = ["--model-name", str(model), "--max-sequence-length", "1024", "--num-threads", str(threads)]
        config = parse([*options, "--speculation", "lookup"], os.environ, "tgis serve")
        prepare_environment(config)
        from tokenizers import Tokenizer  # noqa: PLC0415 - as above

        from tgis.batcher.batcher import Batcher  # noqa: PLC0415
        from tgis.engine_core.main import batch_limits  # noqa: PLC0415
        from tgis.engines import load_engine  # noqa: PLC0415
        from tgis.prepare import prepare  # noqa: PLC0415

        engine_options = prepare(config).engine_options()
        self._engine, _ = load_engine(engine_options, sys.exit, lambda _: None)
        self._engine.warm_up()
        self._tokenizer, self._tokens = Tokenizer.from_file(str(model / "tokenizer.json")), tokens
        self._numbers, self._lengths = itertools.count(), dict[Load, list[int]]()
        limits = replace(batch_limits(engine_options, self._engine.info), prefix_cache=False)  # both share a KV cache
        ways = {"off": replace(limits, proposed_tokens=0), "auto": limits}
        self._batchers = {way: Batcher(limits, engine_options.eos_ids) for way, limits in ways.items()}
        self._record_steps(Batcher(ways["off"], ()), limits.max_batch_size)

    def _record_steps(self, batcher: Any, most: int) -> None:
        """Three steps of each number of rows: the first two are recorded and verified, in whichever way they come."""
        from tgis.ipc.request import Request  # noqa: PLC0415 - the environment is prepared first

        run(self._engine, batcher, [Request(next(self._numbers), [1, 2, 3], 3 * n + 3) for n in range(most)], most)

    def run(self, load: Load, way: str) -> Counts:
        if load not in self._lengths:
            outputs = self._run(load, "off", itertools.repeat(self._tokens)).outputs
            cut = len if load.kind == "loops" else before_it_loops
            self._lengths[load] = [max(cut(output), 2) for output in outputs]
        return self._run(load, way, self._lengths[load])

    def _run(self, load: Load, way: str, lengths: Iterator[int] | list[int]) -> Counts:
        from tgis.ipc.request import Request, SamplingParams  # noqa: PLC0415 - the environment is prepared first

        requests = []
        for seed, (prompt, length) in enumerate(zip(load.prompts(), lengths, strict=False)):
            params = SamplingParams(temperature=load.temperature, seed=seed)
            tokens = self._tokenizer.encode(prompt).ids
            requests.append(Request(next(self._numbers), tokens, length, sampling_params=params))
        return run(self._engine, self._batchers[way], requests, load.streams)


def loads(kinds: list[str], streams: list[int]) -> list[Load]:
    """Those of docs/notes/measuring.md, if all are asked for."""
    greedy = [Load(kind, count, 0.0) for kind in kinds for count in streams if kind != "mixed" or count > 1]
    return greedy + [Load(kind, 1, 0.7) for kind in kinds if kind in _MIXED[:3] and 1 in streams]


def told(bench: Bench, load: Load, rounds: int) -> dict[str, Any]:
    """What a load gave in each way; the first round warms up."""
    found: dict[str, list[Counts]] = {way: [] for way in _WAYS}
    for number in range(rounds + 1):
        for way in _WAYS[:: -1 if number % 2 else 1]:
            found[way].append(bench.run(load, way))
    off, auto = found["off"], found["auto"]
    assert all(one.outputs == off[0].outputs for one in off + auto), load
    rates = [statistics.median(one.rate for one in each[1:]) for each in (off, auto)]
    proposed, tokens, sequences = (sum(each) for each in zip(*(one.sums for one in auto[1:]), strict=True))
    facts = {"kind": load.kind, "streams": load.streams, "temperature": load.temperature}
    facts |= {"off": round(rates[0], 1), "auto": round(rates[1], 1), "factor": round(rates[1] / rates[0], 3)}
    facts |= {"first_round": round(auto[0].rate / off[0].rate, 3), "tokens_a_step": round(tokens / sequences, 2)}
    facts |= {"proposed": proposed, "kept": round((tokens - sequences) / max(proposed, 1), 2)}
    speed = f"{rates[0]:7.1f} -> {rates[1]:7.1f} tokens/s, {facts['factor']:5.2f}, at first {facts['first_round']:5.2f}"
    print(
        f"{load!s:26}: {speed}; {facts['tokens_a_step']} tokens a step, {facts['kept']} of {proposed} kept", flush=True
    )
    return facts


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120, help="of an output")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--streams", type=int, nargs="+", default=_STREAMS)
    parser.add_argument("--kinds", nargs="+", default=[*_TASKS, "mixed"], choices=[*_TASKS, "mixed"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    bench = Bench(args.model, args.threads, args.tokens)
    report = [told(bench, load, args.rounds) for load in loads(args.kinds, args.streams)]
    line = json.dumps({"revision": git_revision(), "threads": args.threads, "rounds": args.rounds, "loads": report})
    if args.json:
        args.json.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
