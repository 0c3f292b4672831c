"""`python -m benchmarks.code_lines [folder ...]`: lines of code by package, without blanks, comments, docstrings.

The last line counts trailing comments that only complete the name on their left: "# of the last step".
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FRONT_HALF = (
    "__main__ api apis bench cli config defaults environment errors foreign_options frontend ipc limits models node "
    "security server speculative_config startup_log prepare tracing utils"
)
_INCOMPLETE = re.compile("#\\W*(of|in|by|for|with|that|which|where|to|from|as|if|beside|than)\\b", re.IGNORECASE)
_WITH_DOCSTRING = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """The number of lines that have code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def incomplete_comments(source: str) -> int:
    """The number of trailing comments that begin with a preposition or a relative pronoun."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()]
    return sum(bool(_INCOMPLETE.match(comment.string)) for comment in comments)


def _package(path: Path) -> str:
    """The package of a file: two levels, three in tgis/api and tgis/engines."""
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return "/".join(parts[: 3 if parts[:2] in (("tgis", "api"), ("tgis", "engines")) and len(parts) > 3 else 2])


def _total(package: str) -> str:
    """The total that a package counts for."""
    top, _, name = package.partition("/")
    return top if top != "tgis" else "front half" if name.split("/")[0] in _FRONT_HALF.split() else "engines half"


def main(folders: list[str]) -> None:
    packages, totals, incomplete = Counter[str](), Counter[str](), 0
    for folder in folders or ["tgis", "benchmarks", "tests"]:
        for path in Path(_ROOT, folder).rglob("*.py"):
            if "pb" not in path.parts:
                source = path.read_text()
                packages[_package(path)] += code_lines(source)
                incomplete += incomplete_comments(source)
    for package, count in sorted(packages.items()):
        totals[_total(package)] += count
        print(f"{count:6} {package}")
    for name, count in totals.items():
        print(f"{count:6} {name} in all")
    print(f"{incomplete:6} incomplete trailing comments")


if __name__ == "__main__":
    main(sys.argv[1:])
