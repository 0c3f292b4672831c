"""The load generator against a fake server with known counts and errors; its figures against numpy."""

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from harness import run_async
from hypothesis import given
from hypothesis import strategies as st

from tgis.__main__ import run
from tgis.bench import workload
from tgis.bench.client import BenchSettings, RequestRecord
from tgis.bench.grpc_client import record_message
from tgis.bench.load import Budget, ClosedLoop, OpenLoop
from tgis.bench.measure import LevelResult, Report
from tgis.bench.report import format_notes, format_table
from tgis.bench.summary import percentiles, summarize
from tgis.errors import OptionError
from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

FIRST_DELAY = 0.02  # seconds before the first token of the fake server
GAP = 0.005  # seconds between its tokens


@dataclass
class FakeServer(pb_grpc.GenerationServiceServicer):
    """Counts one token per word plus one; fails the calls whose number is in `fail`."""

    fail: dict[int, grpc.StatusCode] = field(default_factory=dict)
    kill_at: int | None = None  # the call that interrupts the process instead of answering
    texts: list[str] = field(default_factory=list)
    adapters: list[tuple[str, str]] = field(default_factory=list)
    stopping: list[pb.StoppingCriteria] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def _begin(self, text: str, params: pb.Parameters, context: grpc.ServicerContext) -> int:
        if text in workload.calibration_texts():
            return 1
        number = next(self.numbers)
        self.texts.append(text)
        self.stopping.append(params.stopping)
        self.metadata.append(
            dict(context.invocation_metadata()) | {"peer": context.peer(), "seconds": f"{context.time_remaining():.1g}"}
        )
        if number == self.kill_at:
            os.kill(os.getpid(), signal.SIGINT)
            while context.is_active():
                time.sleep(0.01)
        if number in self.fail:
            context.abort(self.fail[number], "as the test wants it")
        return int(params.stopping.max_new_tokens)

    def GenerateStream(
        self, request: pb.SingleGenerationRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerationResponse]:
        tokens = self._begin(request.request.text, request.params, context)
        yield pb.GenerationResponse(input_token_count=words(request.request.text))
        time.sleep(FIRST_DELAY)
        for count in range(1, tokens + 1):
            yield pb.GenerationResponse(generated_token_count=count, text=" a")
            time.sleep(GAP)

    def Generate(
        self, request: pb.BatchedGenerationRequest, context: grpc.ServicerContext
    ) -> pb.BatchedGenerationResponse:
        (only,) = request.requests
        self.adapters.append((request.adapter_id, request.prefix_id))
        tokens = self._begin(only.text, request.params, context)
        answer = pb.GenerationResponse(input_token_count=words(only.text), generated_token_count=tokens)
        return pb.BatchedGenerationResponse(responses=[answer])

    def ModelInfo(self, request: pb.ModelInfoRequest, context: grpc.ServicerContext) -> pb.ModelInfoResponse:
        return pb.ModelInfoResponse()


def words(text: str) -> int:
    return len(text.split()) + 1


def bench(fake: FakeServer, *arguments: str) -> int:
    with ThreadPoolExecutor(16) as pool:
        server = grpc.server(pool)
        pb_grpc.add_GenerationServiceServicer_to_server(fake, server)
        port = server.add_insecure_port("localhost:0")
        server.start()
        try:
            return run(["bench", "--target", f"localhost:{port}", *arguments])
        finally:
            server.stop(None).wait()


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# Figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_percentiles_equal_those_of_numpy(values: list[float]) -> None:
    found = percentiles(values)
    expected = 1000 * np.percentile(values, [50, 90, 99])
    assert [found["p50"], found["p90"], found["p99"]] == pytest.approx(list(expected), rel=1e-9, abs=1e-3)


def note(sample: RequestRecord, now: float, tokens: int, text: str = "a") -> None:
    record_message(sample, now, pb.GenerationResponse(generated_token_count=tokens, text=text))


def test_times_of_a_stream() -> None:
    sample = RequestRecord(scheduled_at=9.0, requested_tokens=7)
    record_message(sample, 10.0, pb.GenerationResponse(input_token_count=3))
    note(sample, 11.0, 2)
    note(sample, 12.0, 3)
    note(sample, 15.0, 6)
    note(sample, 15.5, 6, text="")  # no new output
    sample.ended_at, sample.status = 16.0, "OK"
    summary = summarize([sample], cpu_seconds=3.5)
    assert summary.ttft_ms["p50"] == pytest.approx(2000)
    assert summary.tpot_ms["p50"] == pytest.approx(1000)  # 4 tokens after the first message, 4 s
    assert summary.max_gap_ms["p50"] == pytest.approx(3000)
    assert summary.latency_ms["p50"] == pytest.approx(7000)
    assert (summary.input_tokens, summary.output_tokens, summary.short) == (3, 6, 1)
    assert summary.output_tokens_per_s == pytest.approx(6 / 7)
    assert summary.client_cpu == pytest.approx(0.5)


NOTES = """interrupted: requests that were under way are not counted
the server does not count tokens: input lengths are in words
concurrency 1: 1 failed with INTERNAL, the first: it broke
concurrency 1: the load generator used 81% of a core, doubt its times"""


def test_a_report_for_people() -> None:
    records = [RequestRecord(9.0, 2, 9.0, output_tokens=2), RequestRecord(9.5, 2, 9.5), RequestRecord(9.0, 2)]
    records[0].succeed(11.0)
    records[1].fail(10.0, "INTERNAL", "it\n broke")
    settings = BenchSettings(target="t")
    result = LevelResult(ClosedLoop(1), settings, records, cpu_seconds=1.62)
    report = Report(settings, calibrated=False, interrupted=True, results=[result])
    title, _, *rows = format_table(report).splitlines()
    assert (title, rows[0], rows[2]) == ("t, streamed", f"concurrency{'1':>17}", f"failed INTERNAL{'1':>13}")
    assert rows[4] == f"duration_s{'2.00':>18}"
    assert "\n".join(format_notes(report)) == NOTES


# Load


@run_async
async def test_open_loop_does_not_wait_for_answers() -> None:
    five = asyncio.Barrier(5)

    async def send(due: float) -> bool:
        return await five.wait() >= 0  # once five wait

    await asyncio.wait_for(OpenLoop(1000.0, seed=0).drive(send, Budget(5, None)), 30)
    assert [Budget(None, 2.0).try_take(elapsed) for elapsed in (1.9, 2.0)] == [True, False]


# Workload


def test_prompts_of_a_file_are_repeated(tmp_path: Path) -> None:
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text('one é\n \n{"text": 2}\n', encoding="utf-8")
    objects.write_text('{"text": "a\\nb", "id": 1}\n{"text": ""}\n', encoding="utf-8")
    for path, expected in ((lines, ["one é", '{"text": 2}', "one é"]), (objects, ["a\nb", "", "a\nb"])):
        assert [*itertools.islice(workload.file_prompts(path), 3)] == expected


@pytest.mark.parametrize("content", ["", "\n \n", "\udcff", "[1]", '{"text": 1}', '{"text"', '{"prompt": "a"}'])
def test_bad_prompt_files_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(OptionError, match=r"bad\.jsonl"):
        workload.file_prompts(path)


# The command


def test_streams_are_counted_exactly_without_the_warmup(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer()
    options = ("--requests", "12", "--warmup", "5", "--input-tokens", "20", "--output-tokens", "8")
    assert bench(fake, "--concurrency", "1,4", *options) == 0
    captured = capsys.readouterr()
    assert captured.err == "concurrency 1 ...\nconcurrency 4 ...\n"
    head = [line.split() for line in captured.out.splitlines() if line.startswith("concurrency")]
    assert head == [["concurrency", "1", "4"]]
    found = json.loads(captured.out.splitlines()[-1])
    assert found.keys() == {"settings", "date", "interrupted", "levels"}
    settings: Any = {
        "requests": 12,
        "input_tokens": 20,
        "output_tokens": 8,
        "warmup": 5,
        "stream": True,
        "timeout": 600.0,
    }
    absent = "duration", "prompts", "server_pid", "adapter_id", "prefix_id"
    settings |= dict.fromkeys(absent) | {"seed": 0, "ignore_eos": True, "target": found["settings"]["target"]}
    levels = found["levels"]
    assert (found["settings"], "requests" in levels[0]) == (settings, False)
    assert [level["concurrency"] for level in levels] == [1, 4]
    for level in levels:
        assert (level["ok"], level["failed"], level["short"]) == (12, {}, 0)
        assert (level["input_tokens"], level["output_tokens"]) == (12 * 20, 12 * 8)
        assert level["output_tokens_per_s"] == pytest.approx(12 * 8 / level["duration_s"], rel=1e-4)
        assert level["ttft_ms"]["p50"] >= 1000 * FIRST_DELAY
        assert level["tpot_ms"]["p50"] > 0
        assert level["latency_ms"]["p50"] >= 1000 * (FIRST_DELAY + 7 * GAP)
    assert len(fake.texts) == 2 * (12 + 5)
    assert len(set(fake.texts)) == len(fake.texts)  # no prompt twice, so a prefix cache cannot help
    assert {(s.max_new_tokens, s.min_new_tokens) for s in fake.stopping} == {(8, 8)}


def test_errors_are_counted_and_do_not_stop_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    codes = grpc.StatusCode
    failures = {1: codes.RESOURCE_EXHAUSTED, 2: codes.RESOURCE_EXHAUSTED, 5: codes.INTERNAL}
    options = ("--warmup", "0", "--output-tokens", "2")
    fake = FakeServer(fail=failures | dict.fromkeys(range(9, 12), codes.UNKNOWN))
    assert bench(fake, *options, "--concurrency", "2", "--requests", "9") == 0
    shown = capsys.readouterr().out
    assert bench(fake, *options, "--concurrency", "1,2", "--requests", "3") == 1  # a level without success
    (level,) = json.loads(shown.splitlines()[-1])["levels"]
    assert level["failed"] == {"RESOURCE_EXHAUSTED": 2, "INTERNAL": 1}
    assert (level["ok"], level["output_tokens"]) == (6, 12)
    assert "2 failed with RESOURCE_EXHAUSTED, the first: as the test wants it" in shown
    assert "interrupted:" not in shown


def test_open_loop_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    options = ["--rate", "100", "--requests", "10", "--output-tokens", "2", "--seed", "4"]
    fake = FakeServer()
    assert bench(fake, *options, "--server-pid", str(os.getpid()), "--json", str(path)) == 0
    assert len({sent["peer"] for sent in fake.metadata}) == 8  # connections
    (level,) = last_line(capsys)["levels"]
    assert (level["rate"], level["ok"]) == (100, 10)
    seconds = level["client_cpu"] * level["duration_s"]  # it measures this process
    assert level["server_cpu_us_per_token"] * level["output_tokens"] / 1e6 == pytest.approx(seconds, rel=0.2)
    assert 0 <= level["send_delay_ms"]["p50"] < level["latency_ms"]["p99"]
    (raw,) = json.loads(path.read_text())["levels"]
    dues = [record["scheduled_at"] for record in raw["requests"]]
    expected = list(itertools.islice(OpenLoop(100.0, 4).arrivals(), 10))
    assert [due - dues[0] for due in dues] == pytest.approx(expected, abs=1e-5)
    assert [*itertools.islice(OpenLoop(100.0, 5).arrivals(), 10)] != expected


def test_an_interrupted_run_prints_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--warmup", "0", "--output-tokens", "2")
    assert bench(FakeServer(kill_at=4), "--concurrency", "1,2", "--requests", "8", *options) == 130
    shown = capsys.readouterr().out
    assert "\ninterrupted: requests that were under way are not counted\n" in shown
    found = json.loads(shown.splitlines()[-1])
    assert (found["interrupted"], [level["ok"] for level in found["levels"]]) == (True, [4])


@pytest.mark.parametrize(
    "options",
    [
        ("--concurrency", "0"),
        ("--rate", "nan"),
        ("--rate", "1", "--concurrency", "1"),
        ("--prompts", "a", "--input-tokens", "3"),
        ("--tls-cert", "a.pem"),
        ("--json", "/nowhere/raw.json"),
        ("--server-pid", str(2**29)),
        ("--prompts", "/nowhere/prompts.txt"),
    ],
)
def test_bad_options_and_files_are_refused(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(FakeServer(), *options) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_unary_calls_have_no_first_token_and_the_token_of_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    fake = FakeServer()
    options = ("--requests", "3", "--unary", "--quiet", "--token-file", str(tmp_path / "token"), "--no-ignore-eos")
    assert bench(fake, *options, "--adapter-id", "a", "--prefix-id", "p") == 0
    assert {(s.max_new_tokens, s.min_new_tokens) for s in fake.stopping} == {(128, 0)}
    assert {*fake.adapters} == {("a", "p")}
    sent = [(metadata["authorization"], metadata["seconds"]) for metadata in fake.metadata]
    assert sent == [("Bearer secret", "6e+02")] * (3 + 1)  # one to warm up
    captured = capsys.readouterr()
    (level,) = json.loads(captured.out)["levels"]
    assert (level["concurrency"], level["ok"], level["output_tokens"], captured.err) == (1, 3, 3 * 128, "")
    assert level["ttft_ms"]["p50"] is None
    assert level["latency_ms"]["p50"] > 0
    assert bench(FakeServer(), "--duration", "0.01", "--unary") == 0
    assert last_line(capsys)["settings"]["duration"] == 0.01
