"""The OpenAPI 3.1 document of all HTTP APIs, made from the types of their bodies."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from tgis import __version__
from tgis.api.http.errors import ErrorFormat
from tgis.api.http.operations import Operation

_REF = "#/components/schemas/{name}"
# aiohttp writes a path parameter as {name:pattern}, OpenAPI as {name}.
_PATTERN = re.compile(r":[^}]+(?=})")
_PARAMETER = re.compile(r"{(\w+)")

Json = dict[str, Any]


def make_document(operations: Sequence[Operation], *, needs_token: bool) -> Json:
    types = [
        type_
        for operation in operations
        for type_ in (*operation.requests, operation.response, operation.event, operation.errors.type)
        if type_ is not None
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {repr(type_): schema for type_, schema in zip(types, schemas, strict=True)}
    paths: Json = {}
    for operation in operations:
        path = paths.setdefault(_PATTERN.sub("", operation.path), {})
        path[operation.method.lower()] = _operation(operation, by_type)
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": "tgis", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _operation(operation: Operation, by_type: Json) -> Json:
    error = by_type[repr(operation.errors.type)]
    content: Json = {}
    if operation.response is not None:
        content |= _json_content(by_type[repr(operation.response)])
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event(by_type[repr(operation.event)], error, operation.errors)}
    described: Json = {
        "operationId": operation.handle.__name__,
        "summary": (operation.handle.__doc__ or "").partition("\n")[0],
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "An error", "content": _json_content(error)},
        },
    }
    if names := _PARAMETER.findall(operation.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if schemas := [by_type[repr(type_)] for type_ in operation.requests]:
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["requestBody"] = {"required": True, "content": _json_content(schema)}
    return described


def _event(answer: Json, error: Json, errors: ErrorFormat) -> Json:
    """The schema of an event; a stream that fails after its beginning ends with an error."""
    data: list[Json] = [{"contentMediaType": "application/json", "contentSchema": {"anyOf": [answer, error]}}]
    if errors.last_event:
        data.append({"const": errors.last_event.decode()})
    return {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", "anyOf": data}}}


def _json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
