"""`/docs`: the OpenAPI document as a page, without a script; an example for each operation."""

import shlex
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from tgis.api.http.pages.page import Page, make_page, table

HOST = "localhost:3000"  # in commands, until a page is asked for
_STYLE = """
body { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h2 { margin: 2.5rem 0 0.4rem; padding-top: 1.2rem; border-top: 1px solid var(--line); font-size: 1.15rem; }
h3 { margin: 2rem 0 0.2rem; font-size: 1rem; }
p, ul { margin: 0.2rem 0; }
h2 code, h3 code { font-size: 1em; overflow-wrap: anywhere; }
.method { display: inline-block; min-width: 3rem; color: var(--accent); }
.operations { list-style: none; margin: 1rem 0; padding: 0; columns: 20rem; }
.operations a { text-decoration: none; }
:target { background: var(--panel); }
"""
_BOUNDS = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "minItems": "items ≥"}

_EXAMPLES = msgspec.json.decode(Path(__file__).with_name("examples.json").read_bytes())  # by the ids of operations
_ACCESS = "<p>Requests need a bearer token. Run <code>read -rs TOKEN</code> and paste it for the examples.</p>"

Json = dict[str, Any]


def render_page(document: Json, model: str) -> Page:
    """`model` is an id for the examples."""
    title = f"{document['info']['title']} {document['info']['version']}"
    body = (
        f"<header><h1>{escape(title)}</h1>"
        '<p><a href="ui">Try the model</a> · <a href="openapi.json">this page as an OpenAPI document</a></p></header>'
        f'<nav aria-label="Operations"><ul class="operations">{"".join(_index(document))}</ul></nav>'
        f"<main>{_ACCESS if 'security' in document else ''}{''.join(_sections(document, model))}"
        f"<h2>Bodies</h2>{''.join(_schemas(document))}</main>"
    )
    return make_page(f"API of {title}", body, _STYLE)


def _operations(document: Json) -> Iterator[tuple[str, str, str, Json]]:
    """The id, path, name and description of each."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f'<code><span class="method">{method.upper()}</span> {escape(path)}</code>'
            yield escape(operation["operationId"]), path, name, operation


def _index(document: Json) -> Iterator[str]:
    for id_, _, name, _ in _operations(document):
        yield f'<li><a href="#{id_}">{name}</a></li>'


def _sections(document: Json, model: str) -> Iterator[str]:
    for id_, path, name, operation in _operations(document):
        example = _EXAMPLES.get(id_, {})
        command = _command(path.replace("{id}", quote(model)), example.get("body"), needs_token="security" in document)
        yield f'<h2 id="{id_}">{name}</h2><p>{escape(example.get("sentence", operation["summary"]))}</p>'
        yield f"<pre>{escape(command)}</pre><ul>"
        if body := operation.get("requestBody"):
            yield f"<li>Body: {_contents(body['content'])}</li>"
        for status, answer in operation["responses"].items():
            label = "Errors" if status == "default" else status
            yield f"<li>{label}: {_contents(answer['content'])}</li>"
        yield "</ul>"


def _command(path: str, body: Json | None, *, needs_token: bool) -> str:
    parts = [f"curl {HOST}{path}"]
    if needs_token:
        parts.append('-H "Authorization: Bearer $TOKEN"')
    if body is not None:
        parts += ["-H 'Content-Type: application/json'", f"-d {shlex.quote(_json(body))}"]
    return " \\\n  ".join(parts)


def _contents(content: Json) -> str:
    return ", ".join(f"{_type(each['schema'])} as <code>{kind}</code>" for kind, each in content.items()) or "empty"


def _schemas(document: Json) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{escape(schema.get("description", ""))}</p>'
        if properties := schema.get("properties"):
            required = schema.get("required", ())
            yield table(
                ("Field", "Type", "Default"),
                (
                    (f"<code>{escape(name)}</code>", _type(field), _default(field, required=name in required))
                    for name, field in properties.items()
                ),
            )


def _default(field: Json, *, required: bool) -> str:
    return "required" if required else f"<code>{escape(_json(field.get('default')))}</code>"


def _type(schema: Json) -> str:
    """A schema in few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if event := schema.get("properties", {}).get("data"):
        return _type(event.get("contentSchema", event))
    if "const" in schema:
        return f"<code>{escape(schema['const'])}</code>"
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"<code>{escape(_json(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "anything")))
    if items := schema.get("items"):
        kind += f" of {_type(items)}"
    bounds = "".join(f", {sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema)
    return kind + escape(bounds)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
