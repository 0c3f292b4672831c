"""`/docs`: the OpenAPI document as one page of HTML, without scripts and without anything from elsewhere."""

from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid; padding-top: 1rem; }
code { font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1.5rem 0.2rem 0; }
"""
_BOUNDS = {"minimum": "≥", "maximum": "≤", "exclusiveMinimum": ">", "exclusiveMaximum": "<", "minItems": "items ≥"}

Json = dict[str, Any]


def render_page(document: Json) -> str:
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    body = "".join([*_operations(document), "<h2>Bodies</h2>", *_schemas(document)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>"
        f'<body><h1>{title}</h1><p><a href="openapi.json">OpenAPI document</a></p>{body}</body></html>\n'
    )


def _operations(document: Json) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p><ul>"
            if body := operation.get("requestBody"):
                yield f"<li>Body: {_contents(body['content'])}</li>"
            for status, answer in operation["responses"].items():
                name = "Errors" if status == "default" else status
                yield f"<li>{name}: {_contents(answer['content'])}</li>"
            yield "</ul>"


def _contents(content: Json) -> str:
    return ", ".join(f"{_type(each['schema'])} as <code>{kind}</code>" for kind, each in content.items()) or "empty"


def _schemas(document: Json) -> Iterator[str]:
    for name, schema in document["components"]["schemas"].items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{escape(schema.get("description", ""))}</p>'
        if properties := schema.get("properties"):
            yield '<div class="wide"><table><tr><th>Field<th>Type<th>Default</tr>'
            required = schema.get("required", ())
            for field, of_field in properties.items():
                default = "required" if field in required else f"<code>{escape(_json(of_field.get('default')))}</code>"
                yield f"<tr><td><code>{escape(field)}</code><td>{_type(of_field)}<td>{default}</tr>"
            yield "</table></div>"


def _type(schema: Json) -> str:
    """A schema in few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "contentSchema" in schema.get("properties", {}).get("data", {}):  # an event
        return _type(schema["properties"]["data"]["contentSchema"])
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
