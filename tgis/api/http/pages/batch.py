"""`/debug/batch`, the batch and the queue for an operator: JSON, or a page with the same fields.

Says why the first request in the queue waits and which option would help. Shows numbers and texts of this package
only; everything is escaped nevertheless.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

from tgis.api.http.pages.page import Page, make_page, table
from tgis.ipc.messages import BatchState, RequestState, WaitReason

_UNLIMITED = 1 << 40  # tokens
_MAX_ROWS = 50  # of a table; JSON has more

_ADVICE = {
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
_STYLE = """
body { padding: clamp(0.6rem, 2vw, 1.5rem); }
h2 { font-size: 1rem; margin: 1.5rem 0 0.2rem; }
"""


def render_json(state: BatchState) -> str:
    """The state of the batch and advice as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(_fields(state)), indent=2).decode() + "\n"


def render_page(state: BatchState) -> Page:
    """The state of the batch and advice as tables."""
    title = f"{state.num_running:,} running, {state.num_waiting:,} waiting"
    fields = [(name, value) for name, value in _fields(state).items() if not isinstance(value, list)]
    body = (
        f"<main><h1>{title}</h1>{_table((), fields)}"
        f"{_requests('Waiting', state.waiting_requests, state.num_waiting)}"
        f"{_requests('Running', state.running_requests, state.num_running)}</main>"
    )
    return make_page(title, body, _STYLE)


def _fields(state: BatchState) -> dict[str, Any]:
    reason = state.wait_reason or state.last_wait_reason
    return {"advice": _ADVICE[reason] if reason else None} | msgspec.structs.asdict(state)


def _requests(title: str, requests: Sequence[RequestState], num_requests: int) -> str:
    requests = requests[:_MAX_ROWS]
    more = num_requests - len(requests)
    rest = f"<small>and {more:,} more</small>" if more else ""
    return f"<h2>{title}</h2>{_table(RequestState.__struct_fields__, map(msgspec.structs.astuple, requests))}{rest}"


def _table(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    return table(map(_cell, names), (map(_cell, row) for row in rows))


def _cell(value: Any) -> str:
    if isinstance(value, bool | str | None):
        return escape(str(value)).replace("_", "_<wbr>")  # names are long for a phone
    return "no limit" if value >= _UNLIMITED else f"{value:,}"
