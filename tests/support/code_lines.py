"""Count lines of code, without blank lines, comments and docstrings: `tests/support/code_lines.py [-v] [FOLDER ...]`.

For each folder a row for each of its rooms, and the sum; with -v also a row for each file. Stubs do not count.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """How many lines have code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(source))


def _docstring_lines(source: str) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def python_files(folder: Path) -> list[Path]:
    """Those that people write."""
    return sorted(path for path in folder.rglob("*.py") if "pb" not in path.relative_to(ROOT).parts)


def main(arguments: list[str]) -> None:
    verbose = "-v" in arguments
    for name in [each for each in arguments if each != "-v"] or ["tgis", "tests", "benchmarks"]:
        rooms: Counter[str] = Counter()
        for path in python_files(ROOT / name):
            lines = code_lines(path.read_text())
            rooms[str(path.relative_to(ROOT).parent)] += lines
            if verbose:
                print(f"{lines:6} {path.relative_to(ROOT)}")
        for room, lines in sorted(rooms.items()):
            print(f"{lines:6} {room}/")
        print(f"{rooms.total():6} {name}/ in all")


if __name__ == "__main__":
    main(sys.argv[1:])
