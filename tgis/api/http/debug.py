"""`/debug/batch`: the batch and the queue as JSON, why the first request waits, and which option would help."""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from tgis.api.http.auth import HttpAuth
from tgis.api.http.errors import http_status
from tgis.api.http.responses import NO_STORE, json_response
from tgis.errors import RequestError
from tgis.ipc.messages import BatchState, WaitReason

InspectBatch = Callable[[], Awaitable[BatchState]]

_REFRESH_SECONDS = 2
_HEADERS = NO_STORE | {"Refresh": str(_REFRESH_SECONDS)}

_ADVICE: dict[WaitReason | None, str] = {
    WaitReason.BATCH_SIZE: "Raise MAX_BATCH_SIZE if memory and inter-token latency allow; otherwise add a replica.",
    WaitReason.MEMORY: "Without KV blocks, memory is reserved for all tokens that a request may still generate. Have "
    "clients ask for fewer, lower MAX_NEW_TOKENS or BATCH_SAFETY_MARGIN, use a smaller DTYPE, or add memory.",
    WaitReason.PREFILL_SIZE: "A step prefills a limited number of tokens; the request is scheduled in one of the next. "
    "If this persists, shorten the inputs (truncate_input_tokens) or add a replica.",
    WaitReason.PREFILL_PADDING: "Prompts of similar length are prefilled together. A higher MAX_PREFILL_PADDING "
    "schedules requests sooner but computes more padding.",
    WaitReason.DECODES_FIRST: "After a prefill, running requests decode for half the time that it took, at most "
    "MAX_WAITING_TOKENS steps. A lower value schedules requests sooner but pauses streams more often.",
    WaitReason.PREFIX_CACHE: "Another request is computing the same prefix; this one will reuse its KV cache. "
    "PREFIX_CACHE=false turns this off.",
    WaitReason.ADAPTER_RANKS: "The LoRA adapters of a batch have a limited number of ranks together, because each "
    "of its tokens pays for all of them. Use adapters of lower rank, or add a replica.",
    WaitReason.RETRY: "A step has failed. Its requests are retried in groups to find the one that causes it; "
    "see the log.",
}


def debug_route(auth: HttpAuth, inspect_batch: InspectBatch) -> web.RouteDef:
    """The route; `inspect_batch` returns the state of the batch or raises Unavailable, without waiting for long."""

    async def get(request: web.Request) -> web.Response:
        try:
            auth.check(request)
            state = await inspect_batch()
        except RequestError as error:
            return web.json_response({"error": str(error)}, status=http_status(error), headers=_HEADERS)
        return json_response(render_json(state), _HEADERS)

    return web.get("/debug/batch", get)


def render_json(state: BatchState) -> bytes:
    """The state and advice as indented JSON."""
    advice = {"advice": _ADVICE.get(state.wait_reason or state.last_wait_reason)}
    return msgspec.json.format(msgspec.json.encode(advice | msgspec.structs.asdict(state)), indent=2) + b"\n"
