"""tgis.frontend.records: what is recorded, and how large the file becomes; cli/test_verify.py reads records."""

import json
import stat
from pathlib import Path

import pytest
from engine_clients import INFO, outputs

from tgis.errors import EngineFailure
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.params import Params
from tgis.frontend.records import Recorder
from tgis.ipc.request import Request, StopReason

CALL = GenerateCall(CallKind.BATCH, ["a"], ["a"], Params())
MAX_BYTES = 4000


def test_a_full_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    file, recorder = tmp_path / "records", Recorder(INFO, "m", tmp_path / "records", MAX_BYTES)
    file.touch(0o644)
    finished, cancelled, failed, never_began = outputs(Request(n, [n, 5], 3) for n in range(4))
    finished.stop_reason, finished.texts = StopReason.TOKEN_LIMIT, ["x" * 50]
    failed.engine_output.error = EngineFailure("")
    for output in (finished, cancelled, failed):
        output.token_ids = [7]
    for _ in range(30):
        recorder.write(CALL, [finished, cancelled, failed, never_began])
    old = tmp_path / "records.1"
    lines = [json.loads(line) for path in (old, file) if path.exists() for line in path.read_text().splitlines()]
    assert 10 < len(lines) < 60
    assert sum(path.stat().st_size for path in (old, file)) <= MAX_BYTES + len(json.dumps(lines[0]))
    assert {(line["prompt_ids"][0], line["stop_reason"]) for line in lines} == {(0, "LENGTH"), (1, "CANCELLED")}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, file)] == [0o600] * 2


def test_a_file_that_cannot_be_written_is_an_error_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (output,) = outputs([Request(1, [1, 5], 3)])
    output.token_ids = [7]
    Recorder(INFO, "m", tmp_path).write(CALL, [output])
    assert caplog.messages == [f"answers could not be recorded: [Errno 21] Is a directory: '{tmp_path}'"]


def test_without_a_file_nothing_is_written() -> None:
    Recorder(INFO).write(CALL, outputs([Request(1, [5], 3)]))
