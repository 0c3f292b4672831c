"""How the batch looks to a person: as JSON, and as one page of HTML that renews itself and loads nothing.

Says why the first request waits and what would help. All that it shows is numbers and texts of this package, and it
is escaped nevertheless.
"""

from html import escape

import msgspec

from tgis.ipc.snapshot import RequestState, Snapshot, WaitReason

REFRESH_SECONDS = 2
UNLIMITED = 1 << 40

_ADVICE = {
    WaitReason.BATCH_SIZE: "Raise MAX_BATCH_SIZE if memory and the time per token allow; else add a replica.",
    WaitReason.MEMORY: "Without KV blocks a request counts with all the tokens it may still get. Let clients ask for "
    "fewer, or lower MAX_NEW_TOKENS or BATCH_SAFETY_MARGIN, choose a smaller DTYPE, or add memory or a replica.",
    WaitReason.PREFILL_SIZE: "A step takes only so many tokens of prompts; the request joins one of the next. If this "
    "is so for long: shorter inputs (truncate_input_tokens) or a replica.",
    WaitReason.PREFILL_PADDING: "Prompts of similar length are computed together. With a higher MAX_PREFILL_PADDING "
    "requests join sooner, and more of the work is padding.",
    WaitReason.DECODE_TURN: "After a prefill, running rows get steps for half the time that it took, at the most "
    "MAX_WAITING_TOKENS. With a lower value requests join sooner, and streams pause more often.",
    WaitReason.PREFIX_CACHE: "Another request begins with the same text; this one joins when that part is computed, to "
    "use it too. PREFIX_CACHE=false turns this off.",
    WaitReason.RETRY: "A step has failed. Its rows are computed again in groups, to find the one that breaks it; the "
    "log says what happened.",
}
_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff }
h1 { font-size: 1.3rem; margin: 0 } h2 { font-size: 1rem; margin: 1.2rem 0 .2rem } p { margin: .2rem 0 }
div { border-left: .3rem solid #2a7; background: #f3f8f5; padding: .5rem 1rem; margin-top: .6rem; max-width: 60rem }
.wait { border-color: #d80; background: #fdf6ea } .bad { border-color: #c22; background: #fcf0f0 }
section { display: inline-block; vertical-align: top; margin-right: 3rem } section:first-of-type { display: block }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .1rem .5rem; border-bottom: 1px solid #e5e5e5 }
th { font-weight: normal } th, small { color: #777 }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
meter { width: min(9rem, 12vw) }
"""


def render_json(snapshot: Snapshot) -> str:
    """The snapshot with advice, indented."""
    reason = snapshot.wait_reason or snapshot.last_wait_reason
    facts = msgspec.structs.asdict(snapshot) | {"advice": _ADVICE[reason] if reason else None}
    return msgspec.json.format(msgspec.json.encode(facts), indent=2).decode() + "\n"


def render_html(snapshot: Snapshot) -> str:
    """The page of a snapshot."""
    title = f"{snapshot.num_running:,} running, {snapshot.num_waiting:,} waiting"
    kind = "wait" if snapshot.num_waiting else "well"
    return _page(
        title, _banner(kind, _why_waiting(snapshot)) + _capacity(snapshot) + _queue(snapshot) + _running(snapshot)
    )


def render_error(reason: str) -> str:
    """The page when there is no snapshot."""
    return _page("No answer", _banner("bad", [reason]))


def _page(title: str, body: str) -> str:
    note = f"request numbers are those of the log; renewed every {REFRESH_SECONDS} s; curl gets JSON"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}"><title>{escape(title)}</title>'
        f"<style>{_CSS}</style></head>"
        f"<body><h1>{escape(title)}</h1><small>{note}</small>{body}</body></html>"
    )


def _banner(css_class: str, lines: list[str]) -> str:
    return f'<div class="{css_class}">{"".join(f"<p>{escape(line)}</p>" for line in lines)}</div>'


def _why_waiting(snapshot: Snapshot) -> list[str]:
    """Why the first request waits, or the last one did, and what would help."""
    if snapshot.num_waiting and snapshot.wait_reason:
        first = snapshot.waiting_requests[0]
        size = first.prompt_tokens + first.generated_tokens + first.remaining_tokens
        return [
            f"Request {first.id} is the first in the queue, for {first.seconds_since_arrival:,.1f} s: "
            f"{snapshot.wait_reason}. With its output it may come to {size:,} tokens.",
            _ADVICE[snapshot.wait_reason],
        ]
    if snapshot.num_waiting:
        return ["The next step decides about the first in the queue."]
    if snapshot.last_wait_reason and snapshot.seconds_since_last_wait is not None:
        return [
            f"Nothing waits. {snapshot.seconds_since_last_wait:,.1f} s ago a request had to: "
            f"{snapshot.last_wait_reason}.",
            _ADVICE[snapshot.last_wait_reason],
        ]
    return ["Nothing waits, and nothing had to since the start."]


def _capacity(snapshot: Snapshot) -> str:
    limit, shape = snapshot.token_capacity, "rows times the longest" if snapshot.padded else "sum of the rows"
    context = _limit_text(limit, snapshot.initial_token_capacity)
    prefill = _limit_text(snapshot.max_prefill_tokens, snapshot.initial_max_prefill_tokens)
    size, now, peak = snapshot.max_batch_size, snapshot.context_tokens, snapshot.peak_context_tokens
    lines = [
        _table_row("Rows", snapshot.num_running, size, (snapshot.num_running, size), "MAX_BATCH_SIZE"),
        _table_row(f"Tokens of context, {shape}", now, context, (now, limit), "memory, BATCH_SAFETY_MARGIN"),
        _table_row("at their peak, if no row ends early", peak, context, (peak, limit), ""),
        _table_row("Tokens of prompts in a step", "", prefill, "", "engine"),
    ]
    if snapshot.padded:
        lines.append(
            _table_row("Padding in a prefill", "", f"{snapshot.max_prefill_padding:.0%}", "", "MAX_PREFILL_PADDING")
        )
    if not snapshot.chunked_prefill:
        lines.append(
            _table_row("Steps until the next prefill", "", snapshot.max_waiting_tokens, "", "MAX_WAITING_TOKENS")
        )
    return _table("Room", ["", "now", "at most", "", "set by"], lines)


def _queue(snapshot: Snapshot) -> str:
    lines = [
        _table_row(
            place, row.id, row.seconds_since_arrival, row.prompt_tokens, row.generated_tokens, row.remaining_tokens
        )
        for place, row in enumerate(snapshot.waiting_requests, 1)
    ]
    heads = ["place", "request", "waits", "input", "has got", "may get"]
    return _table("Queue", heads, lines, snapshot.num_waiting - len(lines))


def _running(snapshot: Snapshot) -> str:
    lines = [
        _table_row(
            row.id,
            row.seconds_since_arrival,
            row.prompt_tokens,
            row.generated_tokens,
            row.remaining_tokens,
            *_progress(row),
        )
        for row in snapshot.running_requests
    ]
    heads = ["request", "since", "input", "has got", "may get", "", ""]
    return _table("Running", heads, lines, snapshot.num_running - len(lines))


def _progress(row: RequestState) -> tuple[tuple[int, int], str]:
    """Of the prompt while that is computed, then of the output."""
    if row.computed_tokens < row.prompt_tokens:
        return (row.computed_tokens, row.prompt_tokens), "prompt"
    return (row.generated_tokens, row.generated_tokens + row.remaining_tokens), ""


def _table(title: str, headers: list[str], rows: list[str], more: int = 0) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in headers)
    rest = f"<small>and {more:,} more</small>" if more else ""
    return f"<section><h2>{escape(title)}</h2><table><tr>{head}</tr>{''.join(rows)}</table>{rest}</section>"


def _table_row(*cells: str | float | tuple[int, int]) -> str:
    return f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in cells)}</tr>"


def _cell(value: str | float | tuple[int, int]) -> str:
    """A text, a count, seconds, or how much of what."""
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
    return f"{now:,}" if now == initial else f"{now:,} (memory ran out; {initial:,} before)"
