"""What runs, what waits and why, as a person may ask: lengths and times, never tokens. A value, and no more."""

import enum

import msgspec


class Refusal(enum.StrEnum):
    """What keeps a request waiting."""

    BATCH_SIZE = "the batch has its largest size"
    MEMORY = "the batch would outgrow the memory"
    PREFILL = "the prefill would become too large"
    PADDING = "too much of the prefill would be padding"
    PACE = "running rows are to have some steps first"
    PREFIX = "the beginning of its prompt is being computed for another request"
    TRIAL = "rows of a failed step are tried again apart from others"


class RowState(msgspec.Struct, frozen=True, gc=False):
    """How far one request is."""

    id: int
    seconds: float  # since it was queued
    input: int  # tokens of its prompt
    computed: int  # tokens, generated ones included, that the engine has computed
    generated: int  # tokens
    remaining: int  # tokens that it may still get


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The batch and the queue between two steps; `context` and limits are in tokens."""

    running: int
    waiting: int
    refusal: Refusal | None  # why the first in the queue waits, if it has been refused
    last_refusal: Refusal | None  # why a request last had to wait
    last_refused: float | None  # seconds ago
    context: int  # tokens of the running rows, padding included
    context_peak: int  # the most that these will come to
    context_limit: int  # less than context_most after lack of memory
    context_most: int
    prefill_limit: int  # tokens of prompts that a step may take; less than prefill_most after lack of memory
    prefill_most: int
    max_batch_size: int
    max_prefill_padding: float
    max_waiting_tokens: int
    padded: bool  # whether the batch is a rectangle
    chunked: bool  # whether prompts are computed in parts, beside rows that decode
    rows: list[RowState]  # the first of them
    queue: list[RowState]  # the first of them, in order
