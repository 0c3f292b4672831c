"""`/debug/batch`, the batch and the queue for an operator: JSON, or a page that refreshes itself.

Says why the first request in the queue waits and which option would help. Shows numbers and texts of this package
only; everything is escaped nevertheless.
"""

from html import escape

import msgspec

from tgis.api.http.pages.page import Page, make_page
from tgis.ipc.messages import BatchState, RequestState, WaitReason

REFRESH_SECONDS = 2
UNLIMITED = 1 << 40

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
body { padding: 1.5rem; }
h2 { font-size: 1rem; margin: 1.5rem 0 0.2rem; }
p { margin: 0.2rem 0; }
.ok, .wait, .bad { border-left: 6px solid; padding: 0.6rem 1rem; margin-top: 1rem; background: var(--panel); }
.ok { border-color: var(--good); }
.wait { border-color: var(--warn); }
.bad { border-color: var(--bad); }
section { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.1rem 0.6rem; border-bottom: 1px solid var(--line); }
th { font-weight: normal; }
th, small { color: var(--muted); }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
meter { width: min(9rem, 12vw); }
"""


def render_json(state: BatchState) -> str:
    """The state of the batch and advice as indented JSON."""
    reason = state.wait_reason or state.last_wait_reason
    fields = msgspec.structs.asdict(state) | {"advice": _ADVICE[reason] if reason else None}
    return msgspec.json.format(msgspec.json.encode(fields), indent=2).decode() + "\n"


def render_page(state: BatchState) -> Page:
    title = f"{state.num_running:,} running, {state.num_waiting:,} waiting"
    css_class = "wait" if state.num_waiting else "ok"
    return _page(title, _banner(css_class, _why_waiting(state)) + _capacity(state) + _queue(state) + _running(state))


def render_error(reason: str) -> Page:
    """The page shown when the state of the batch is not known."""
    return _page("Unavailable", _banner("bad", [reason]))


def _page(title: str, body: str) -> Page:
    note = f"refreshed every {REFRESH_SECONDS} s; request ids as in the log; curl gets JSON"
    body = f"<main><h1>{escape(title)}</h1><small>{note}</small>{body}</main>"
    return make_page(title, body, _STYLE, refresh_seconds=REFRESH_SECONDS)


def _banner(css_class: str, lines: list[str]) -> str:
    return f'<div class="{css_class}">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'


def _why_waiting(state: BatchState) -> list[str]:
    """Why the first request waits, or why the last one had to, and what would help."""
    if state.num_waiting and state.wait_reason:
        first = state.waiting_requests[0]
        size = first.prompt_tokens + first.generated_tokens + first.remaining_tokens
        return [
            f"Request {first.id} is first in the queue, waiting for {first.seconds_since_arrival:,.1f} s: "
            f"{state.wait_reason}. It may need up to {size:,} tokens of context.",
            _ADVICE[state.wait_reason],
        ]
    if state.num_waiting:
        return ["The first request in the queue will be considered in the next step."]
    if state.last_wait_reason and state.seconds_since_last_wait is not None:
        return [
            f"The queue is empty. {state.seconds_since_last_wait:,.1f} s ago a request had to wait: "
            f"{state.last_wait_reason}.",
            _ADVICE[state.last_wait_reason],
        ]
    return ["The queue is empty, and no request has had to wait since the start."]


def _capacity(state: BatchState) -> str:
    limit, shape = state.token_capacity, "batch size x longest" if state.padded else "all requests"
    context = _limit_text(limit, state.initial_token_capacity)
    prefill = _limit_text(state.max_prefill_tokens, state.initial_max_prefill_tokens)
    size, now, peak = state.max_batch_size, state.context_tokens, state.peak_context_tokens
    rows = [
        _table_row("Batch size", state.num_running, size, (state.num_running, size), "MAX_BATCH_SIZE"),
        _table_row(f"Context tokens, {shape}", now, context, (now, limit), "memory, BATCH_SAFETY_MARGIN"),
        _table_row("Peak context tokens, if all run to their limit", peak, context, (peak, limit), ""),
        _table_row("Prefill tokens per step", "", prefill, "", "MAX_BATCH_PREFILL_TOKENS"),
    ]
    if state.padded:
        rows.append(
            _table_row("Padding per prefill", "", f"{state.max_prefill_padding:.0%}", "", "MAX_PREFILL_PADDING")
        )
    if not state.chunked_prefill:
        rows.append(_table_row("Decode steps between prefills", "", state.max_waiting_tokens, "", "MAX_WAITING_TOKENS"))
    return _table("Capacity", ["", "now", "limit", "", "set by"], rows)


def _queue(state: BatchState) -> str:
    rows = [_table_row(position, *_state(request)) for position, request in enumerate(state.waiting_requests, 1)]
    headers = ["position", "request", "waiting", "prompt tokens", "generated", "remaining"]
    return _table("Queue", headers, rows, state.num_waiting - len(rows))


def _running(state: BatchState) -> str:
    rows = [_table_row(*_state(request), *_progress(request)) for request in state.running_requests]
    headers = ["request", "age", "prompt tokens", "generated", "remaining", "progress", ""]
    return _table("Running", headers, rows, state.num_running - len(rows))


def _state(request: RequestState) -> tuple[int, float, int, int, int]:
    tokens = request.prompt_tokens, request.generated_tokens, request.remaining_tokens
    return request.id, request.seconds_since_arrival, *tokens


def _progress(request: RequestState) -> tuple[tuple[int, int], str]:
    """The progress of the prefill, and after it that of the output."""
    if request.computed_tokens < request.prompt_tokens:
        return (request.computed_tokens, request.prompt_tokens), "prefill"
    return (request.generated_tokens, request.generated_tokens + request.remaining_tokens), ""


def _table(title: str, headers: list[str], rows: list[str], more: int = 0) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in headers)
    rest = f"<small>and {more:,} more</small>" if more else ""
    table = f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    return f'<section tabindex="0"><h2>{escape(title)}</h2>{table}{rest}</section>'


def _table_row(*cells: str | float | tuple[int, int]) -> str:
    return f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in cells)}</tr>"


def _cell(value: str | float | tuple[int, int]) -> str:
    """Text, a count, seconds, or a share as (part, whole)."""
    match value:
        case str():
            return escape(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.1f} s"
        case (part, whole):
            return f'<meter value="{part}" max="{max(whole, 1)}"></meter>'


def _limit_text(now: int, initial: int) -> str:
    if now >= UNLIMITED:
        return "no limit"
    return f"{now:,}" if now == initial else f"{now:,} (out of memory; initially {initial:,})"
