"""`python -m benchmarks.interrupted_starts`: SIGTERM at random moments while a server starts.

The server must end within a second, without a traceback and without leaving a process behind. Its exit code must be 0
once its first line has run; before that, the signal may kill it. The last line is one JSON object; the exit code is 1
when anything is wrong.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.serving import running_server
from demo.fake_model import make_fake_model
from demo.fetch import ensure
from tgis.bench.measure import cpu_seconds

EXIT_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0
_MARK = "TGIS_INTERRUPTED_START"  # environment variable that marks all processes of a start
_ERRORS = re.compile(r"Traceback|Exception ignored|Fatal Python error|ERROR|CRITICAL|^tgis: ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Start:
    """A start that was interrupted; times are in seconds."""

    engine: str
    moment: float  # from the start to the signal
    handled: bool  # whether the first line had run
    code: int
    duration: float  # from the signal to the exit
    cpu_seconds: float  # of the front end from the signal on, and of an engine process in all
    left_behind: float  # from the exit until all its processes had ended
    output: str

    def problems(self) -> list[str]:
        """What is wrong with this start; empty if nothing is."""
        found = []
        if self.code and (self.handled or self.code != -signal.SIGTERM):
            found.append(f"exit code {self.code}")
        if self.duration > EXIT_SECONDS:
            found.append(f"ended after {self.duration:.1f} s, {self.cpu_seconds:.1f} s of CPU time")
        if self.left_behind > EXIT_SECONDS:
            found.append(f"a process was there {self.left_behind:.1f} s later")
        if _ERRORS.search(self.output):
            found.append(f"it said:\n{self.output}")
        return [f"{self.engine} at {self.moment:.3f} s: {problem}" for problem in found]


def interrupt(engine: str, command: list[str], moment: float, mark: str) -> Start:
    """Start a server and send SIGTERM after `moment` seconds."""
    with tempfile.TemporaryFile() as output:
        environment = os.environ | {_MARK: mark}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        time.sleep(moment)
        handled, used_before = _handles_sigterm(process.pid), cpu_seconds(process.pid)
        process.terminate()
        signalled = time.monotonic()
        code, total_cpu_seconds = _wait(process)
        ended, left_behind = time.monotonic(), 0.0
        while _has_processes(mark) and left_behind < TIMEOUT_SECONDS:
            left_behind = time.monotonic() - ended
            time.sleep(0.01)
        duration = ended - signalled
        output.seek(0)
        text = output.read().decode()
    used = total_cpu_seconds - used_before
    return Start(engine, moment, handled, code, duration, used, left_behind, text)


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for the exit code and the CPU time; kill a process that does not end."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        if time.monotonic() > until:
            process.kill()
        time.sleep(0.002)


def _handles_sigterm(pid: int) -> bool:
    (caught,) = re.findall(r"^SigCgt:\s(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) & 1 << (signal.SIGTERM - 1))


def _has_processes(mark: str) -> bool:
    """Whether a process has this mark in its environment."""
    wanted = f"{_MARK}={mark}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes():
                return True
        except OSError:  # it has just ended, or is another user's
            continue
    return False


def _options(engine: str, model: Path, cache: Path) -> list[str]:
    own = ["--deployment-framework", engine, "--estimate-memory", "off"]
    own += ["--kv-cache-size-mb", "4", "--dtype", "float32"] if engine == "tgis_native" else []
    return ["--model-name", str(model), "--cache-dir", str(cache), *own]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interrupted_starts", description=__doc__)
    parser.add_argument("--starts", type=int, default=300, metavar="N")
    parser.add_argument("--engines", nargs="+", default=["fake", "tgis_native"], metavar="NAME")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), metavar="DIR")
    args = parser.parse_args(arguments)
    draw, starts = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as directory:
        models = {"fake": make_fake_model(Path(directory) / "model"), "tgis_native": ensure("glassllm", args.cache)}
        for engine in args.engines:
            options = _options(engine, models[engine], args.cache)
            with running_server(models[engine], args.cache, *options[4:]) as server:
                whole = server.start_seconds
            command = [sys.executable, "-P", "-m", "tgis", "serve", *options, "--grpc-port", "0", "--port", "0"]
            for number in range(args.starts // len(args.engines)):
                moment = draw.uniform(0, 1.1 * whole)
                starts.append(interrupt(engine, command, moment, f"{os.getpid()}-{engine}-{number}"))
    print(report(starts))
    print(json.dumps({"starts": [asdict(start) for start in starts]}))
    return 1 if any(start.problems() for start in starts) else 0


def report(starts: list[Start]) -> str:
    """A line for each engine, and one for each problem."""
    lines = []
    for engine in dict.fromkeys(start.engine for start in starts):
        some = [start for start in starts if start.engine == engine]
        durations = sorted(start.duration for start in some)
        lines.append(
            f"{engine}: {len(some)} starts interrupted after 0 to {max(start.moment for start in some):.1f} s, "
            f"{sum(start.code == 0 for start in some)} exit codes 0, {sum(start.code < 0 for start in some)} deaths; "
            f"ended after {durations[len(some) // 2]:.3f} s (p50), {durations[-1]:.3f} s (max), with "
            f"{max(start.cpu_seconds for start in some):.2f} s of CPU time at most"
        )
    return "\n".join(lines + [problem for start in starts for problem in start.problems()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
