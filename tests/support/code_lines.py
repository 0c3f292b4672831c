"""Count lines of code, without blank lines, comments and docstrings: `tests/support/code_lines.py [-v] [PATH ...]`.

For each folder or file a row for each of its rooms, and the sum; with -v also a row for each file. Stubs do not count.
With --stream, what one gRPC stream runs through: the rooms and files on its way, how many lines and how many files.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_ON_A_STREAMS_WAY = (
    *("server.py", "config.py", "api/grpc", "api/clients.py", "frontend", "ipc", "engine_core", "batcher"),
    *("engines/base.py", "engines/paged", "engines/speculation/proposals.py", "engines/sampling", "engines/loading"),
)
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


def python_files(path: Path) -> list[Path]:
    """The file, or those of the folder that people write."""
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [each for each in files if "pb" not in each.relative_to(ROOT).parts]


def print_lines(title: str, files: list[Path], *, verbose: bool) -> None:
    rooms: Counter[str] = Counter()
    for path in files:
        lines = code_lines(path.read_text())
        rooms[str(path.relative_to(ROOT).parent)] += lines
        if verbose:
            print(f"{lines:6} {path.relative_to(ROOT)}")
    for room, lines in sorted(rooms.items()):
        print(f"{lines:6} {room}/")
    print(f"{rooms.total():6} {title} in all, {len([path for path in files if path.stat().st_size])} files")


def main(arguments: list[str]) -> None:
    verbose, stream = "-v" in arguments, "--stream" in arguments
    if stream:
        paths = [ROOT / "tgis" / name for name in _ON_A_STREAMS_WAY]
        files = [file for path in paths if path.exists() for file in python_files(path)]
        print_lines("what one gRPC stream runs through", files, verbose=verbose)
    names = [each for each in arguments if not each.startswith("-")]
    for name in names or ([] if stream else ["tgis", "tests", "benchmarks"]):
        print_lines(f"{name}/", python_files(ROOT / name), verbose=verbose)


if __name__ == "__main__":
    main(sys.argv[1:])
