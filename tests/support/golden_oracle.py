"""What the golden cases must answer: `python tests/support/golden_oracle.py` writes it, --check compares it instead.

Batch of one, float32, CPU, computed on forward passes of transformers. A case whose answer hangs on rounding
(near ties of scores) or on a draw is refused: change its request.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from golden_cases import Case, Json, cases, expected_answers, expected_file, servers
from golden_compare import differences
from golden_generation import AmbiguousError, OracleRun
from golden_model import OracleModel
from google.protobuf import json_format
from repository import TEST_CACHE

from demo import fetch
from tgis.pb import generation_pb2 as pb


class _Dumper(yaml.CSafeDumper):
    """Strings of several lines stay on one."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None),
)


def answer(model: OracleModel, case: Case) -> Json:
    """The answer in protobuf JSON; AmbiguousError if rounding or a draw decides it."""
    message: Any = case.message()
    match message:
        case pb.BatchedGenerationRequest(requests=inputs, params=params):
            prompt = message.adapter_id or message.prefix_id
            runs = [OracleRun(model, one.text, params, prompt).response for one in inputs]
            found: Any = pb.BatchedGenerationResponse(responses=runs)
        case pb.BatchedTokenizeRequest(requests=inputs):
            found = pb.BatchedTokenizeResponse(responses=[_tokenized(model, one.text, message) for one in inputs])
        case pb.ModelInfoRequest():
            found = pb.ModelInfoResponse(
                model_kind=pb.ModelInfoResponse.ModelKind.Name(model.encoder_decoder),
                max_sequence_length=model.sequence_length,
                max_new_tokens=model.new_tokens,
            )
    answer: Json = json_format.MessageToDict(found)
    return answer


def _tokenized(model: OracleModel, text: str, request: pb.BatchedTokenizeRequest) -> pb.TokenizeResponse:
    encoded = model.tokenizer(text, return_offsets_mapping=True)
    last = slice(-request.truncate_input_tokens if request.truncate_input_tokens else None, None)
    ids, places = encoded.input_ids[last], encoded.offset_mapping[last]
    bytes_before = [len(text[:count].encode()) for count in range(len(text) + 1)]
    offsets = [pb.TokenizeResponse.Offset(start=bytes_before[s], end=bytes_before[e]) for s, e in places]
    return pb.TokenizeResponse(
        token_count=len(ids),
        tokens=model.token_strings(ids) if request.return_tokens else [],
        offsets=offsets if request.return_offsets else [],
    )


def expectations(file: str, model: OracleModel) -> Json:
    """The answers to the cases of a file, by name."""
    answers: Json = {}
    for case in cases():
        if case.file == file and case.needs_oracle:
            try:
                answers[case.name] = answer(model, case)
            except AmbiguousError as error:
                sys.exit(f"{case.id}: {error}")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description="Write what the golden cases must answer.")
    parser.add_argument("files", nargs="*", help="names of files in golden/cases, without .yaml; none: all")
    parser.add_argument("--check", action="store_true", help="compare with what is written, write nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.files) - {case.file for case in cases()}:
        parser.error(f"no cases named {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    found = {(case.server, case.file) for case in cases() if case.file in arguments.files or not arguments.files}
    wrong = 0
    for server, files in itertools.groupby(sorted(found), key=lambda pair: pair[0]):
        with tempfile.TemporaryDirectory() as scratch:
            spec = servers()[server]
            model = OracleModel(
                spec.model_directory(fetch.ensure(spec.model, TEST_CACHE), Path(scratch)), spec.options, spec.prompts
            )
        for _, file in files:
            wrong += _write_or_compare(file, expectations(file, model), arguments.check)
    sys.exit(1 if wrong else 0)


def _write_or_compare(file: str, answers: Json, check: bool) -> int:
    """Write or compare; the number of differences."""
    if check:
        problems = differences(expected_answers(file), answers, file)
        print(*problems, sep="\n", end="")
        return len(problems)
    if answers:
        text = yaml.dump(
            answers, None, _Dumper, allow_unicode=True, default_flow_style=None, width=1000, sort_keys=False
        )
        expected_file(file).write_text(f"# Written by `python tests/support/golden_oracle.py`, never by hand.\n{text}")
    return 0


if __name__ == "__main__":
    main()
