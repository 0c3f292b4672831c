"""Private parts of libraries are used in one file per library, so that an upgrade has one place to look at."""

import ast
import functools
import inspect
import pydoc
import textwrap
from collections.abc import Iterator

import pytest
from repository import REPOSITORY

ROOT = REPOSITORY / "tgis"

# Engines patch and record what torch and transformers do inside, each in its own place.
FILES = {
    "engines/kernels/cpu/activations.py",
    "engines/kernels/cpu/gemm.py",
    "engines/kernels/cpu/recording.py",
    "engines/kernels/cpu/rotary.py",
    "engines/kernels/cpu/softcap.py",
    "engines/loading/loader.py",
    "engines/paged/attention_hooks.py",
    "engines/paged/batch.py",
    "engines/paged/compile.py",
    "engines/paged/self_check.py",
}
_PUBLIC = {"_exit", "_replace", "_name"}  # documented: of os, of named tuples, of libraries in ctypes
_INTERNALS = {"__globals__", "__closure__", "__code__"}
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name in _INTERNALS or (name.startswith("_") and not name.endswith("__") and name not in _PUBLIC)


def private_uses(tree: ast.AST, inherited: set[str]) -> Iterator[str]:
    """Private names that come from elsewhere; `inherited` are those that classes of ours give to their heirs."""
    own, imports = own_names(tree), imported_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if name not in _owned(value, own, inherited):
                    yield name
            case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]):
                if function in _BY_NAME and is_private(name):
                    yield name
            case ast.Import() | ast.ImportFrom():
                yield from _private_imports(node)
            case ast.ClassDef():
                yield from sorted(filter(is_private, own_names(node) & library_names(node, imports)))


def imported_names(tree: ast.AST) -> dict[str, str]:
    """The modules and objects that a file imports, as dotted paths by local name."""
    found = dict[str, str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.asname or name.name.split(".")[0]: name.name if name.asname else "" for name in node.names}
    return found


def library_names(node: ast.ClassDef, imports: dict[str, str]) -> set[str]:
    """The attributes that a class has from the libraries of its base classes."""
    found = set[str]()
    for base in node.bases:
        name, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        path = f"{imports.get(name) or name}.{rest}".rstrip(".")
        for each in getattr(pydoc.locate(path) if name in imports else None, "__mro__", ()):
            if not each.__module__.startswith("tgis"):
                found |= set(vars(each)) | _stored_on_self(each)
    return found


@functools.cache
def _stored_on_self(library_class: type) -> set[str]:
    """Attributes that the methods of a class set; nothing for a class without Python source."""
    try:
        return own_names(ast.parse(textwrap.dedent(inspect.getsource(library_class))))
    except (OSError, TypeError):
        return set()


def _private_imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    module = getattr(node, "module", None) or ""
    for name in node.names:
        parts = [*module.split("."), *name.name.split(".")]
        if parts[0] != "tgis" and any(map(is_private, parts)):
            yield f"{module} {name.name}".strip()


def _owned(value: ast.expr, own: set[str], inherited: set[str]) -> set[str]:
    """The private names that are ours as attributes of this: of `super()` only what a class of ours has."""
    match value:
        case ast.Name(id="self" | "cls"):
            return own | inherited
        case ast.Call(func=ast.Name(id="super")):
            return inherited
    return own


def own_names(tree: ast.AST) -> set[str]:
    """What the classes of a file define: methods, fields, and attributes of `self`."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for child in ast.walk(node):
                match child:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found.add(name)
                    case ast.Name(id=name, ctx=ast.Store()):
                        found.add(name)
                    case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                        found.add(name)
    return found


def test_private_names_of_a_library_are_in_its_file() -> None:
    paths = [path for path in ROOT.rglob("*.py") if "pb" not in path.relative_to(ROOT).parts]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    bases = {base for tree in trees.values() for base in _bases(tree)}
    inherited = {name for tree in trees.values() for name in _names_of_classes(tree, bases)}
    uses = {path: sorted(set(private_uses(tree, inherited))) for path, tree in trees.items()}
    assert {path: names for path, names in uses.items() if names and path not in FILES} == {}
    assert {path for path in FILES if not uses.get(path)} == set(), "these need no private name any more"


def _bases(tree: ast.AST) -> set[str]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {ast.unparse(base).partition("[")[0].rpartition(".")[2] for each in classes for base in each.bases}


def _names_of_classes(tree: ast.AST, names: set[str]) -> set[str]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name in names]
    return {name for each in classes for name in own_names(each)}


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("from grpc._cython import cygrpc", ["grpc._cython cygrpc"]),
        ("from tgis.frontend import _private", []),
        ("class A(Handler):\n  def a(self): return self._request_count", ["_request_count"]),
        ("class A(Server):\n  def _run(self): return super()._run()", ["_run"]),
        ("from aiohttp import web\nclass A(web.RequestHandler):\n  def a(self): self._parser = 1", ["_parser"]),
        ("import threading\nclass A(threading.Thread):\n  def _bootstrap(self): pass", ["_bootstrap"]),
        ("function.__globals__['a']", ["__globals__"]),
        ("getattr(model, '_tied', None)", ["_tied"]),
        ("os._exit(1)", []),
    ],
)
def test_what_a_private_use_is(source: str, uses: list[str]) -> None:
    assert list(private_uses(ast.parse(source), set())) == uses
