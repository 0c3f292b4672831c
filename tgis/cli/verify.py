"""`tgis verify`: answers recorded requests again and compares the answers.

A recorded answer goes along as a prediction: the server computes many of its tokens in one step, which takes a fraction
of the time that the answer took.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from tgis.cli import client
from tgis.errors import OptionError, StartError, file_errors
from tgis.utils import progress
from tgis.utils.options import PATH, Parser, integer

_COMPARED = ("adapter_digest", "output_ids", "text", "stop_reason", "logprobs")


def main(argv: list[str], prog: str) -> int:
    """Exit code 0 if all answers are equal, else 1."""
    options = _parser(prog).parse_args(argv)
    num_equal = 0
    with file_errors(f"cannot read {options.file}", OptionError):
        lines = options.file.read_bytes().splitlines()  # texts may have the line breaks of Unicode
    with ThreadPoolExecutor(options.streams) as threads:
        answers = progress.bar(threads.map(partial(_verify, options), lines), "verifying", len(lines))
        for number, difference in enumerate(answers, 1):
            num_equal += not difference
            if difference:
                answers.write(f"{options.file}:{number}: {difference}")
    print(f"{num_equal} of {len(lines)} answers are equal")
    return 0 if num_equal == len(lines) else 1


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Answer recorded requests again, and compare: exit code 0 if all are equal.")
    add = parser.add_argument
    add("file", type=PATH, help="records of tgis generate --record, or of a server with RECORD_PATH")
    add("--any", action="store_true", help="also compare if the fingerprint of the server differs")
    add("--streams", type=integer(1, 1024), default=8, metavar="N", help="requests in flight at once (default: 8)")
    client.add_arguments(parser, timeout=None, target=client.HTTP_TARGET)
    return parser


def _verify(options: argparse.Namespace, line: bytes) -> str:
    """How the new answer to a recorded request differs; empty: not at all."""
    try:
        return _answer_again(options, json.loads(line))
    except (client.Refused, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def _answer_again(options: argparse.Namespace, record: dict[str, Any]) -> str:
    """How the new answer differs; StartError if the fingerprint does."""
    cut_short, parameters = record["stop_reason"] in ("TIME_LIMIT", "CANCELLED"), dict(record["parameters"])
    if cut_short:
        parameters["max_new_tokens"] = length = len(record["output_ids"])
        sampling = parameters.get("sampling", {})
        parameters["sampling"] = sampling | {"min_new_tokens": min(sampling.get("min_new_tokens", 0), length)}
    request = {name: record.get(name) for name in ("prompt_ids", "output_ids", "adapter")} | {"parameters": parameters}
    answer = json.loads(b"".join(client.http_call(options, "/replay", request, options.timeout)))
    if answer["fingerprint"] != record["fingerprint"] and not options.any:
        raise StartError(f"the record is of {record['fingerprint']}, {options.target} has {answer['fingerprint']}")
    if cut_short:  # it would have gone on
        answer |= {"text": answer["text"][: len(record["text"])], "stop_reason": record["stop_reason"]}
    return next(filter(None, (_difference(name, record.get(name), answer.get(name)) for name in _COMPARED)), "")


def _difference(name: str, expected: Any, found: Any) -> str:
    """Where two values differ first; empty: nowhere."""
    if expected == found:
        return ""
    expected, found = expected or "", found or ""
    at = next(at for at in count() if expected[at : at + 1] != found[at : at + 1])
    return f"{name} at {at}: recorded {expected[at : at + 8]!r}, now {found[at : at + 8]!r}"
