"""tgis.frontend.records: what is recorded, and how large the file becomes; cli/test_verify.py reads records."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine_clients import INFO, outputs

from tgis.errors import EngineFailure
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.params import Params
from tgis.frontend.records import Recorder
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, StopReason, TokenLogprobs

CALL = GenerateCall(CallKind.BATCH, ["a"], ["a"], Params())
MAX_BYTES = 4000


def test_a_full_file_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    file, old = tmp_path / "a.jsonl", tmp_path / "a.jsonl.1"
    recorder = Recorder(INFO, "m", file, MAX_BYTES)
    file.touch(0o644)
    finished, cancelled, failed, never_began = outputs(Request(n, [n, 5], 3) for n in range(4))
    finished.stop_reason, finished.texts = StopReason.TOKEN_LIMIT, ["x" * 50]
    failed.engine_output.error = EngineFailure("")
    for output in (finished, cancelled, failed):
        output.token_ids = [7]
    for _ in range(30):
        recorder.write(CALL, [finished, cancelled, failed, never_began])
    lines = [json.loads(line) for path in (old, file) if path.exists() for line in path.read_text().splitlines()]
    assert 10 < len(lines) < 60
    assert sum(path.stat().st_size for path in (old, file)) <= MAX_BYTES + len(json.dumps(lines[0]))
    assert {(line["prompt_ids"][0], line["stop_reason"]) for line in lines} == {(0, "LENGTH"), (1, "CANCELLED")}
    assert [stat.S_IMODE(path.stat().st_mode) for path in (old, file)] == [0o600] * 2


def test_a_record_has_all_that_an_answer_depends_on() -> None:
    sampling = SamplingParams(temperature=0.5, seed=6, bad_words=((1,),))
    (output,) = outputs([Request(1, [0, 5, 6], 3, sampling_params=sampling, adapter=AdapterRef("a", 1, 0, 7, 0x1F))])
    texts: dict[str, Any] = {"bad_words": ["x"], "stop_sequences": ["y"], "skip_special_tokens": True}
    options = {"logprobs": True, "ranks": True}
    output.params = Params(**texts, logprob_options=LogprobOptions(input_tokens=True, **options), max_new_tokens=9)
    output.params.include_stop_sequence, output.token_ids, output.texts = False, [7, 8], ["b", "c"]
    output.stop_reason, output.logprobs = StopReason.EOS_TOKEN, [TokenLogprobs(-0.5, 2)]
    record = json.loads(Recorder(msgspec.structs.replace(INFO, fingerprint="fp_1"), "m").record(CALL, output))
    assert record.pop("time") == pytest.approx(time.time(), abs=60)
    parameters = texts | {"include_stop_sequence": False, "max_new_tokens": 3, "seed": 6}
    parameters |= {"sampling": {"temperature": 0.5, "seed": 6}, "logprob_options": options | {"generated_tokens": True}}
    expected = {"version": 1, "api": "grpc", "model": "m", "fingerprint": "fp_1", "prompt_ids": [5, 6], "text": "bc"}
    expected |= {"adapter": "a", "adapter_digest": "000000000000001f", "output_ids": [7, 8], "stop_reason": "EOS_TOKEN"}
    assert record == expected | {"parameters": parameters, "logprobs": [[-0.5, 2, []]]}


def test_a_file_that_cannot_be_written_is_an_error_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (output,) = outputs([Request(1, [1, 5], 3)])
    output.token_ids = [7]
    Recorder(INFO, "m", tmp_path).write(CALL, [output])
    assert caplog.messages == [f"answers could not be recorded: [Errno 21] Is a directory: '{tmp_path}'"]


def test_without_a_file_nothing_is_written() -> None:
    Recorder(INFO).write(CALL, outputs([Request(1, [5], 3)]))
