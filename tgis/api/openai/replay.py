"""`POST /replay`: a recorded request again, as `tgis verify` sends it."""

from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from tgis.api.http.calls import HttpCall
from tgis.api.http.operations import Operation
from tgis.api.http.responses import json_response
from tgis.api.openai.bodies import Count
from tgis.api.openai.errors import ERRORS
from tgis.frontend.params import OPENAI_CONSTRAINTS, Params
from tgis.frontend.records import REPLAYED
from tgis.ipc.lookups import GrammarKind


class ReplayRequest(msgspec.Struct):
    """What decides a recorded answer, and its tokens, with which it is computed faster."""

    prompt_ids: list[Count]
    parameters: Params
    output_ids: list[Count] = []
    adapter: str | None = None


async def replay(call: HttpCall) -> web.StreamResponse:
    """Answer a recorded request again, with the record of the new answer."""
    body, limits = call.body(ReplayRequest), call.generator.server_info.limits
    params, most = body.parameters, max(OPENAI_CONSTRAINTS.max_top_n_tokens or 0, limits.max_top_n_tokens)
    params.constraints, params.record = replace(OPENAI_CONSTRAINTS, max_top_n_tokens=most), True
    if params.grammar and params.grammar.kind is GrammarKind.TOOLS:  # it comes from the client this time
        params.grammar = msgspec.structs.replace(params.grammar, kind=GrammarKind.GRAMMAR)
    params.prediction = body.output_ids[: limits.max_new_tokens]
    ids = [body.prompt_ids]
    generate_call = call.generate_call(params, [""], ["prompt_ids"], body.adapter, n=1, stream=False, token_ids=ids)
    (output,) = await call.generator.generate(replace(generate_call, api=REPLAYED))
    return json_response(output.record.encode())


REPLAY = Operation("POST", "/replay", replay, ERRORS, (ReplayRequest,), dict[str, Any])
