"""The OpenAPI 3.1 document of all HTTP APIs, made from the types of their bodies, and a page that shows it."""

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from tgis import __version__
from tgis.api.http.calls import HttpCall
from tgis.api.http.docs_page import HEADERS, render_page
from tgis.api.http.operations import Operation

_REF = "#/components/schemas/{name}"
_DOCUMENT_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # the latter is TGI's

Json = dict[str, Any]


def with_documents(operations: Sequence[Operation], *, needs_token: bool) -> list[Operation]:
    """The operations, and those that describe them."""
    document = make_document(operations, needs_token=needs_token)
    encoded, page = msgspec.json.encode(document), render_page(document)

    async def openapi(_call: HttpCall) -> web.StreamResponse:
        return web.Response(body=encoded, content_type="application/json")

    async def docs(_call: HttpCall) -> web.StreamResponse:
        return web.Response(text=page, content_type="text/html", headers=HEADERS)

    face = operations[0].face
    documents = [Operation("GET", path, openapi, face, "openapi", "This document") for path in _DOCUMENT_PATHS]
    return [*operations, *documents, Operation("GET", "/docs", docs, face, "docs", "This document as a page")]


def make_document(operations: Sequence[Operation], *, needs_token: bool) -> Json:
    types = [each for one in operations for each in (one.request, one.response, one.event, one.face.error) if each]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {repr(type_): schema for type_, schema in zip(types, schemas, strict=True)}
    paths: Json = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, by_type)
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "tgis",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_token:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _operation(one: Operation, by_type: Json) -> Json:
    answers = {"application/json": one.response, "text/event-stream": one.event}
    content = {kind: {"schema": by_type[repr(type_)]} for kind, type_ in answers.items() if type_ is not None}
    described: Json = {
        "operationId": one.id,
        "summary": one.summary,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "An error", "content": _json_content(by_type[repr(one.face.error)])},
        },
    }
    if one.request is not None:
        described["requestBody"] = {"required": True, "content": _json_content(by_type[repr(one.request)])}
    return described


def _json_content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
