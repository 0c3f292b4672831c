"""The golden cases: where their files are, the fields that they may have, and the servers that they run on."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format
from google.protobuf.message import Message

from tgis.pb import generation_pb2 as pb

Json = dict[str, Any]

GOLDEN = Path(__file__).parents[1] / "golden"
REQUESTS: dict[str, type[Message]] = {
    "Generate": pb.BatchedGenerationRequest,
    "GenerateStream": pb.SingleGenerationRequest,
    "Tokenize": pb.BatchedTokenizeRequest,
    "ModelInfo": pb.ModelInfoRequest,
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    model: str
    options: Json
    files: dict[str, Json] = field(default_factory=dict)  # changes to the model's JSON files
    encoder_decoder: bool = False
    hub_cache: str | None = None  # the variable that names a hub cache; without it the model is a path
    prompts: dict[str, dict[str, str]] = field(default_factory=dict)  # the texts of soft prompts, by file
    slow: bool = False

    def model_directory(self, original: Path, scratch: Path) -> Path:
        """The model with these changes, in `scratch` if there are any."""
        if not self.files:
            return original
        scratch.mkdir(parents=True, exist_ok=True)
        for path in original.iterdir():
            if changes := self.files.get(path.name):
                (scratch / path.name).write_text(json.dumps(json.loads(path.read_text()) | changes))
            else:
                (scratch / path.name).symlink_to(path.absolute())
        return scratch


@dataclass(frozen=True, slots=True)
class Error:
    """The status expected of a call."""

    code: str
    message: str
    field: str | None = None  # of the one field violation
    value: str | None = None  # the offending value that its description adds to the message

    @property
    def description(self) -> str:
        return self.message if self.value is None else f"{self.message}, got {self.value}"


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and what to expect: an error, some fields, or the oracle's answer."""

    file: str
    server: str
    name: str
    request: Json
    rpc: str = "Generate"
    error: Error | None = None
    expect_partly: Json | None = None  # instead of the oracle's answer: only these fields are compared
    distinct: tuple[str, ...] = ()  # fields whose values must differ between responses

    @property
    def id(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def needs_oracle(self) -> bool:
        return self.error is None and self.expect_partly is None

    @property
    def seeded(self) -> bool:
        return "seed" in self.request.get("params", {}).get("sampling", {})

    def message(self) -> Message:
        return json_format.ParseDict(self.request, REQUESTS[self.rpc]())


@cache
def servers() -> dict[str, ServerSpec]:
    return {name: ServerSpec(**spec) for name, spec in _load(GOLDEN / "servers.yaml").items()}


@cache
def cases() -> list[Case]:
    """All cases; their ids are unique."""
    found = [case for path in sorted((GOLDEN / "cases").glob("*.yaml")) for case in _cases(path)]
    assert len({case.id for case in found}) == len(found)
    return found


def expected_file(name: str) -> Path:
    """The oracle's answers to the cases of a file, by case name."""
    return GOLDEN / "expected" / f"{name}.yaml"


@cache
def expected_answers(name: str) -> Json:
    path = expected_file(name)
    return _load(path) if path.exists() else {}


def expected_answer(case: Case) -> Json:
    answers = expected_answers(case.file)
    assert case.name in answers, f"{case.id} has no answer: see CONTRIBUTING.md"
    answer: Json = answers[case.name]
    return answer


def _cases(path: Path) -> list[Case]:
    content = _load(path)
    server = content["server"]
    assert server in servers()
    return [_case(path.stem, server, **entry) for entry in content["cases"]]


def _case(file: str, server: str, error: Json | None = None, **entry: Any) -> Case:
    case = Case(file, server, error=Error(**error) if error else None, **entry)
    assert case.error or case.rpc != "GenerateStream", f"{case.id}: a unary call of one input is streamed by itself"
    return case


def _load(path: Path) -> Json:
    content: Json = yaml.load(path.read_text(), yaml.CSafeLoader)
    return content
