"""Private parts of libraries are used in one file per library, so that an upgrade has one place to look at."""

import ast
from collections.abc import Iterator

from repository import REPOSITORY

ROOT = REPOSITORY / "tgis"

# Engines patch and record what torch and transformers do inside, each in its own place.
FILES = {
    "engines/kernels/cpu/activations.py",
    "engines/kernels/cpu/experts.py",
    "engines/kernels/cpu/gemm.py",
    "engines/kernels/cpu/recording.py",
    "engines/kernels/cpu/rotary.py",
    "engines/kernels/cpu/softcap.py",
    "engines/loading/loader.py",
    "engines/paged/attention_hooks.py",
    "engines/paged/batch.py",
    "engines/paged/compile.py",
    "engines/paged/self_check.py",
    "engines/paged/states.py",
}
_PUBLIC = {"_exit", "_replace", "_name"}  # documented: of os, of named tuples, of libraries in ctypes
_INTERNALS = {"__globals__", "__closure__", "__code__"}
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name in _INTERNALS or (name.startswith("_") and not name.endswith("__") and name not in _PUBLIC)


def private_uses(tree: ast.AST, inherited: set[str]) -> Iterator[str]:
    """Private names that a file does not define; `inherited` are those of our base classes."""
    ours = defined_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")), attr=name):
                yield from {name} - ours - inherited
            case ast.Attribute(attr=name):
                yield from {name} - ours
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
                yield from [name] if function in _BY_NAME else []
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("tgis"):
                yield from [*module.split("."), *(name.name for name in names)]


def defined_names(tree: ast.AST) -> set[str]:
    """Methods, fields, and attributes of `self`."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_private_names_of_a_library_are_in_its_file() -> None:
    paths = [path for path in ROOT.rglob("*.py") if "pb" not in path.relative_to(ROOT).parts]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for each in classes for base in each.bases}
    inherited = {name for each in classes if each.name in bases for name in defined_names(each)}
    uses = {path: {*filter(is_private, private_uses(tree, inherited))} for path, tree in trees.items()}
    assert {path: names for path, names in uses.items() if names and path not in FILES} == {}
    assert {path for path in FILES if not uses.get(path)} == set(), "these need no private name any more"
