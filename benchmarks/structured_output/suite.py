"""`python -m benchmarks.structured_output.suite DIR`: the JSON Schema Test Suite against the grammars made of schemas.

DIR is a draft of the suite, such as .../tests/draft2020-12; the suite is in the source distribution of jsonschema,
under json/tests. An accepted schema must not allow an instance that does not validate. It may refuse some that do: an
output has its members in a fixed order. The last line is JSON.
"""

import argparse
import collections
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tgis.errors import GrammarError
from tgis.ipc.lookups import GrammarKind, GrammarSpec, Vocabulary
from tgis.structured_output.compiler import compile_grammar
from tgis.structured_output.matcher import GrammarMatcher, TokenTable

EOS = 0


@dataclass(slots=True)
class KeywordReport:
    """One file of the suite."""

    keyword: str
    schemas: int = 0
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)  # by reason
    valid: int = 0  # instances of accepted schemas
    valid_allowed: int = 0
    invalid: int = 0
    invalid_allowed: list[str] = field(default_factory=list)


def compile_schema(schema: Any) -> GrammarMatcher:
    """Compile a schema for a vocabulary of single bytes; raises GrammarError."""
    tokens = [b"", *(bytes([byte]) for byte in range(256))]
    table = TokenTable(Vocabulary(tokens), len(tokens), [EOS])
    return compile_grammar(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)), table)


def allows(matcher: GrammarMatcher, text: str) -> bool:
    """True if the grammar allows `text` as a whole."""
    tokens = [byte + 1 for byte in text.encode()]
    return all(token in matcher.allowed_ids(tokens[:at]) for at, token in enumerate([*tokens, EOS]))


def groups(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield the keyword and a schema with its tests, for all files."""
    for path in sorted(directory.glob("*.json")):
        yield from ((path.stem, group) for group in json.loads(path.read_text()))


def accepted_schemas(directory: Path) -> dict[str, list[Any]]:
    """The accepted schemas of each keyword."""
    found: dict[str, list[Any]] = {}
    for keyword, group in groups(directory):
        try:
            compile_schema(group["schema"])
        except GrammarError:
            continue
        found.setdefault(keyword, []).append(group["schema"])
    return found


def measure(directory: Path) -> list[KeywordReport]:
    reports: dict[str, KeywordReport] = {}
    for keyword, group in groups(directory):
        report = reports.setdefault(keyword, KeywordReport(keyword))
        report.schemas += 1
        try:
            matcher = compile_schema(group["schema"])
        except GrammarError as error:
            reason = str(error)
            report.refused[reason] = report.refused.get(reason, 0) + 1
            continue
        report.accepted += 1
        for test in group["tests"]:
            _count(report, matcher.copy(), test, group["schema"])
    return list(reports.values())


def _count(report: KeywordReport, matcher: GrammarMatcher, test: Any, schema: Any) -> None:
    found = any(allows(matcher, text) for text in _layouts(test["data"]))
    if test["valid"]:
        report.valid += 1
        report.valid_allowed += found
        return
    report.invalid += 1
    if found:
        report.invalid_allowed.append(f"{json.dumps(test['data'])} with {json.dumps(schema)}")


def _layouts(data: Any) -> Iterator[str]:
    """An instance as text, also with the members of an object in reverse order."""
    yield json.dumps(data, ensure_ascii=False)
    if isinstance(data, dict):
        yield json.dumps(dict(reversed(data.items())), ensure_ascii=False)


def print_reports(reports: list[KeywordReport]) -> None:
    print(f"{'keyword':<28} {'schemas':>8} {'accepted':>9} {'valid, allowed':>16} {'invalid, allowed':>17}")
    for one in reports:
        instances = f"{one.valid:>8} {one.valid_allowed:>7} {one.invalid:>9} {len(one.invalid_allowed):>7}"
        print(f"{one.keyword:<28} {one.schemas:>8} {one.accepted:>9} {instances}")
        for text in one.invalid_allowed:
            print(f"  allowed: {text}")
    reasons = collections.Counter[str]()
    for one in reports:
        reasons.update(one.refused)
    print("refused because of", *(f"{count:>5} {reason}" for reason, count in reasons.most_common()), sep="\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.structured_output.suite", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of a draft")
    args = parser.parse_args(arguments)
    reports = measure(args.directory)
    print_reports(reports)
    print(json.dumps([asdict(report) for report in reports]))
    return int(any(report.invalid_allowed for report in reports))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
