"""Records of a server and of `tgis generate`, and `tgis verify`: a server in this process with the fake engine."""

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import LAST_MESSAGE
from local_server import LocalServer, local_server
from tables import read_table

from tgis import __main__

REQUESTS = read_table("records", "recorded")
NUM_RECORDS = len(REQUESTS) + 3
Verify = Callable[..., tuple[int, list[str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("verify")
    options = {"RECORD_PATH": directory / "records", "MAX_NEW_TOKENS": 50}
    with local_server(directory, {"step_seconds": 0.001}, LAST_MESSAGE, **options) as running:
        yield running


@pytest.fixture(scope="module")
def records(server: LocalServer) -> list[dict[str, Any]]:
    for request in REQUESTS:
        assert server.post(request["path"], request["body"])[0] == 200
    file = server.log.parent / "records"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    return [*map(json.loads, file.read_bytes().splitlines())]


@pytest.fixture
def verify(server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Verify:
    def run(records: list[dict[str, Any]], *options: str) -> tuple[int, list[str]]:
        file = tmp_path / "records"
        file.write_text("".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records))
        code = __main__.run(["verify", str(file), "--target", f"localhost:{server.http_port}", *options])
        output = capsys.readouterr()
        return code, (output.out + output.err).splitlines()

    return run


def test_all_answers_are_equal(server: LocalServer, records: list[dict[str, Any]], verify: Verify) -> None:
    assert len(records) == NUM_RECORDS
    file = server.log.parent / "records"
    recorded = file.stat().st_size
    assert verify(records, "--streams", "3") == (0, [f"{NUM_RECORDS} of {NUM_RECORDS} answers are equal"])
    assert file.stat().st_size == recorded


def test_of_an_answer_that_was_cut_short_the_beginning_counts(records: list[dict[str, Any]], verify: Verify) -> None:
    cut = records[0] | {"output_ids": records[0]["output_ids"][:3], "text": "he", "stop_reason": "CANCELLED"}
    longer = cut["parameters"] | {"sampling": cut["parameters"]["sampling"] | {"min_new_tokens": 5}}
    assert verify([cut, cut | {"parameters": longer}])[0] == 0
    assert verify([cut | {"text": "hx"}])[0] == 1


@pytest.mark.parametrize(
    ("at", "change", "words"),
    [
        (0, lambda record: record["output_ids"].__setitem__(2, 5), "output_ids at 2: recorded [5, "),
        (0, lambda record: record["output_ids"].pop(), "output_ids at 6: recorded [], now ["),
        (0, lambda record: record.update(text="hellO"), "text at 4: recorded 'O', now 'ohe'"),
        (0, lambda record: record.update(stop_reason="EOS_TOKEN"), "stop_reason at 0: recorded 'EOS_TOKE'"),
        (0, lambda record: record["prompt_ids"].reverse(), "output_ids at 0"),
        (0, lambda record: record["parameters"].update(max_new_tokens=8), "output_ids at 7: recorded [], now ["),
        (0, lambda record: record.update(adapter="x"), "Refused: "),
        (0, lambda record: record["parameters"]["sampling"].update(top_k=-1), "Refused: "),
        (0, lambda record: record.pop("parameters"), "KeyError: 'parameters'"),
        (0, lambda record: record.update(parameters=3), "TypeError: "),
        (0, lambda record: record.update(adapter_digest="5"), "adapter_digest at 0: recorded '5', now ''"),
        (1, lambda record: record["logprobs"][1].__setitem__(0, -0.25), "logprobs at 1: recorded [[-0.25, "),
        (6, lambda record: record["parameters"].pop("stop_sequences"), "output_ids at "),
    ],
)
def test_forgeries(
    records: list[dict[str, Any]], verify: Verify, at: int, change: Callable[[Any], object], words: str
) -> None:
    forged = json.loads(json.dumps(records[at : at + 2]))
    change(forged[0])
    code, (line, last) = verify(forged)
    assert (code, last) == (1, "1 of 2 answers are equal")
    assert f"records:1: {words}" in line


def test_another_fingerprint_is_refused(records: list[dict[str, Any]], verify: Verify) -> None:
    others = [record | {"fingerprint": "fp_other"} for record in records]
    code, (line,) = verify(others)
    assert (code, line.startswith("tgis: the record is of fp_other, localhost:")) == (1, True)
    assert verify(others, "--any")[0] == 0


def test_a_record_of_generate(server: LocalServer, verify: Verify, tmp_path: Path) -> None:
    file = tmp_path / "one"
    for text in ("abc", "def"):
        options = ["--record", str(file), "--target", server.target, "--sample", "--max-new-tokens", "5"]
        assert __main__.run(["generate", text, *options]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    records = [*map(json.loads, file.read_bytes().splitlines())]
    assert [(record["api"], record["text"][:3]) for record in records] == [("grpc", "abc"), ("grpc", "def")]
    assert verify(records)[0] == 0
