"""What one small stream runs in the front end: `python -m benchmarks.stream_trace [-v]`.

Serves the fake engine in this process, traces the threads of the server while a GenerateStream runs, and counts
functions of tgis (without stubs) from accepting the call to its end, and their calls for each further token; a
coroutine or generator that goes on is no new call. What ran in one of the streams only, such as a heartbeat, is left
out. With -v the functions by file. The last line is one JSON object.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

import grpc

import tgis
from benchmarks.serving import free_ports
from demo.fake_model import make_fake_model
from tgis.__main__ import run
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

PACKAGE = str(Path(tgis.__file__).parent)
SHORT, LONG = 10, 60  # tokens
REPEATS = 3
_STEP_SECONDS = 0.02  # every token is a message of its own
_PAUSE_SECONDS = 0.1  # until a call's last callbacks have run
_RESUMED = 3  # bits of the argument of RESUME, which are 0 where a function begins
_CONTAINERS = ("<listcomp>", "<dictcomp>", "<setcomp>")  # functions of their own until Python 3.12

Calls = Counter[CodeType]


class Tracer:
    """Counts calls of functions of the package in all threads that start after it was installed, and in this one."""

    def __init__(self) -> None:
        self.calls: Calls | None = None  # None: does not count
        self._counts: dict[tuple[CodeType, int], bool] = {}

    def install(self) -> None:
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if self.calls is None or event != "call":
            return
        place = (frame.f_code, frame.f_lasti)
        if place not in self._counts:
            self._counts[place] = _is_ours(frame.f_code) and _begins(*place)
        if self._counts[place]:
            self.calls[frame.f_code] += 1


def _is_ours(code: CodeType) -> bool:
    path = Path(code.co_filename)
    return path.is_relative_to(PACKAGE) and "pb" not in path.parts and code.co_name not in _CONTAINERS


def _begins(code: CodeType, instruction: int) -> bool:
    """Whether a function is called there: a generator or coroutine that goes on is the same event at another RESUME."""
    return code.co_code[instruction + 1] & _RESUMED == 0


def trace(target: str, tracer: Tracer) -> tuple[list[Calls], list[Calls]]:
    """Calls of each short stream, and of each long one."""
    with grpc.insecure_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        _stream(stub, LONG)  # connects, and fills caches
        short = [_traced(stub, tracer, SHORT) for _ in range(REPEATS)]
        return short, [_traced(stub, tracer, LONG) for _ in range(REPEATS)]


def _traced(stub: GenerationServiceStub, tracer: Tracer, tokens: int) -> Calls:
    time.sleep(_PAUSE_SECONDS)
    tracer.calls = calls = Calls()
    messages = _stream(stub, tokens)
    time.sleep(_PAUSE_SECONDS)
    tracer.calls = None
    assert messages >= tokens, (messages, tokens)
    return calls


def _stream(stub: GenerationServiceStub, tokens: int) -> int:
    """How many messages there were."""
    stopping = pb.StoppingCriteria(max_new_tokens=tokens, min_new_tokens=tokens)
    request = pb.SingleGenerationRequest(
        request=pb.GenerationRequest(text="a small stream"), params=pb.Parameters(stopping=stopping)
    )
    return len(list(stub.GenerateStream(request)))


def in_all(runs: list[Calls]) -> Calls:
    """What ran in every one of the streams, as often as in the one with the fewest calls."""
    return Calls({code: min(run[code] for run in runs) for code in set.intersection(*map(set, runs))})


def report(short: list[Calls], long: list[Calls], *, verbose: bool) -> dict[str, float]:
    """Print the figures."""
    functions, further = in_all(short), statistics.median(run.total() for run in long)
    per_token = (further - statistics.median(run.total() for run in short)) / (LONG - SHORT)
    if verbose:
        in_long = in_all(long)
        for code in sorted(functions, key=lambda code: (code.co_filename, code.co_firstlineno)):
            each = (in_long[code] - functions[code]) / (LONG - SHORT)
            name = f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"
            print(f"{each:6.2f} calls per token, {functions[code]:4} in a short stream  {name}")
    files = len({code.co_filename for code in functions})
    print(f"{len(functions)} functions in {files} files run for one stream; {per_token:.1f} calls per further token")
    return {"functions": len(functions), "files": files, "calls_per_token": round(per_token, 2)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stream_trace", description="trace one small stream")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every function")
    args = parser.parse_args(arguments)
    grpc_port, http_port = free_ports()
    tracer = Tracer()

    def client() -> None:
        sys.setprofile(None)
        try:
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                _wait_until_ready(channel)
            figures = report(*trace(f"127.0.0.1:{grpc_port}", tracer), verbose=args.verbose)
            print(json.dumps(figures), flush=True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with tempfile.TemporaryDirectory() as directory:
        model = make_fake_model(Path(directory) / "model", step_seconds=_STEP_SECONDS)
        options = ["--model-name", str(model), "--cache-dir", str(Path(directory) / "cache"), "--log-level", "warning"]
        options += ["--grpc-port", str(grpc_port), "--port", str(http_port), "--deployment-framework", "fake"]
        thread = threading.Thread(target=client)
        thread.start()
        tracer.install()
        code = run(["serve", *options, "--bind-address", "127.0.0.1"])
        sys.setprofile(None)
        thread.join()
    return code


def _wait_until_ready(channel: grpc.Channel) -> None:
    stub = GenerationServiceStub(channel)
    while True:
        try:
            stub.ModelInfo(pb.ModelInfoRequest(model_id="fake"), wait_for_ready=True, timeout=60)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            time.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
