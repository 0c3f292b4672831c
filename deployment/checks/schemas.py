"""Objects against the schemas and types of real tools, by kind. A kind that no tool knows is an error.

kubernetes-validate has Kubernetes' own kinds. Types of npm packages have custom resources: each object is a literal, in
which TypeScript accepts no unknown field. kserve's models are read, as importing them needs its dependencies.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
from consistency import Object

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / ".cache" / "manifests"
sys.path.append(str(TOOLS / "python"))

from kubernetes_validate.utils import SchemaNotFoundError, validate  # noqa: E402

KUBERNETES = "1.37.0"
PACKAGES = {
    "cert-manager.io": "cert-manager",
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
}


def problems(objects: Sequence[Object]) -> list[str]:
    """One line for each problem."""
    typed = [one for one in objects if _group(one) in PACKAGES]
    found = [f"{one['kind']} {problem}" for one in objects if one not in typed for problem in _problems(one)]
    return found + typescript_problems([(_typescript_type(one), one) for one in typed])


def _group(one: Object) -> str:
    return str(one["apiVersion"].rpartition("/")[0])


def _problems(one: Object) -> Iterator[str]:
    match _group(one):
        case "serving.kserve.io":
            yield from _kserve_problems(one)
        case "inference.networking.k8s.io":
            yield from written_down_problems(one, "inference-pool.json")
        case "leaderworkerset.x-k8s.io":
            yield from written_down_problems(one, "leader-worker-set.json")
            yield from _core_problems(one["spec"]["leaderWorkerTemplate"]["workerTemplate"], "V1PodTemplateSpec")
        case _:
            yield from _kubernetes_problems(one)


def _kubernetes_problems(one: Object) -> Iterator[str]:
    try:
        validate(one, KUBERNETES, strict=True)
    except SchemaNotFoundError as error:
        yield error.message
    except jsonschema.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}"


def written_down_problems(one: Any, schema: str) -> Iterator[str]:
    """Problems by a schema that no package has."""
    validator = jsonschema.Draft202012Validator(json.loads((HERE / schema).read_text()))
    yield from (f"{error.json_path}: {error.message}" for error in validator.iter_errors(one))


def _typescript_type(one: Object) -> tuple[str, str]:
    group, version = one["apiVersion"].split("/")
    return f"@kubernetes-models/{PACKAGES[group]}/{group}/{version}/{one['kind']}", f"I{one['kind']}"


def typescript_problems(literals: Sequence[tuple[tuple[str, str], Any]]) -> list[str]:
    """Problems of values that should have a type: its module and its name."""
    lines = [
        f"const value{index}: import({json.dumps(module)}).{name} = {json.dumps(value)};"
        for index, ((module, name), value) in enumerate(literals)
    ]
    source = TOOLS / "literals.ts"
    source.write_text("\n".join([*lines, "export {};"]))
    flags = ["--strict", "--noEmit", "--skipLibCheck", "--module", "nodenext", "--pretty", "false"]
    command = [str(TOOLS / "node_modules/.bin/tsc"), *flags, source.name]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, check=False)
    errors = re.findall(r"^literals\.ts\((\d+),\d+\): error (.*)", done.stdout, re.MULTILINE)
    assert done.returncode == 0 or errors, done.stdout + done.stderr
    return [f"{literals[int(line) - 1][0][1]}: {message}" for line, message in errors]


def _kserve_problems(one: Object) -> Iterator[str]:
    version = one["apiVersion"].rpartition("/")[2]
    yield from _typed_problems(one, f"{version.capitalize()}{one['kind']}", one["kind"])


def _typed_problems(value: Any, kind: str, path: str) -> Iterator[str]:
    """Problems of a value by the name of its type in kserve's models."""
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        for index, item in enumerate(value):
            yield from _typed_problems(item, inner[1], f"{path}[{index}]")
    elif kind in _kserve_files():
        types, required = _kserve_model(kind)
        yield from (f"{path}: unknown field {name}" for name in value.keys() - types.keys())
        yield from (f"{path}: no {name}" for name in required - value.keys())
        for name in value.keys() & types.keys():
            yield from _typed_problems(value[name], types[name], f"{path}.{name}")
    elif kind in _PRIMITIVES:
        if not isinstance(value, _PRIMITIVES[kind]):
            yield f"{path}: {value!r} is no {kind}"
    else:
        yield from (f"{path}: {problem}" for problem in _core_problems(value, kind))


_PRIMITIVES = {"str": str, "int": int, "bool": bool, "object": object, "dict(str, str)": dict}


@functools.cache
def _kserve_files() -> dict[str, str]:
    text = (TOOLS / "python/kserve/models/__init__.py").read_text()
    found = re.findall(r"^from kserve\.models\.(\w+) import (\w+)$", text, re.MULTILINE)
    return {name: module for module, name in found}


@functools.cache
def _kserve_model(name: str) -> tuple[dict[str, str], set[str]]:
    """The type of each JSON field, and the fields that are required: those that the constructor always sets."""
    text = (TOOLS / f"python/kserve/models/{_kserve_files()[name]}.py").read_text()
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    to_json = tables["attribute_map"]
    required = {
        to_json[name] for name in re.findall(r"^        self\.(\w+) = \1$", text, re.MULTILINE) if name in to_json
    }
    return {to_json[name]: kind for name, kind in tables["openapi_types"].items()}, required


def _core_problems(value: Any, kind: str) -> Iterator[str]:
    """Problems of a part of a pod, for which kserve names a type of Kubernetes."""
    room = "apimachinery.pkg.apis.meta" if kind == "V1ObjectMeta" else "api.core"
    schema = {**_definitions(), "$ref": f"#/$defs/io.k8s.{room}.v1.{kind.removeprefix('V1')}"}
    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        yield f"{error.json_path}: {error.message}"


@functools.cache
def _definitions() -> dict[str, Any]:
    folder = TOOLS / f"python/kubernetes_validate/kubernetes-json-schema/v{KUBERNETES}-local-strict"
    found: dict[str, Any] = json.loads((folder / "_definitions.json").read_text())
    return found
