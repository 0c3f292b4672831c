"""What runs, what waits and why, as a person may ask: lengths and times, never tokens. A value, and no more."""

import enum

import msgspec


class WaitReason(enum.StrEnum):
    """What keeps a request waiting."""

    BATCH_SIZE = "the batch has its largest size"
    MEMORY = "the batch would outgrow the memory"
    PREFILL_SIZE = "the prefill would become too large"
    PREFILL_PADDING = "too much of the prefill would be padding"
    DECODE_TURN = "running rows are to have some steps first"
    PREFIX_CACHE = "the beginning of its prompt is being computed for another request"
    RETRY = "rows of a failed step are tried again apart from others"


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """How far one request is."""

    id: int
    seconds_since_queued: float  # since it was queued
    prompt_tokens: int  # tokens of its prompt
    computed_tokens: int  # tokens, generated ones included, that the engine has computed
    generated_tokens: int  # tokens
    remaining_tokens: int  # tokens that it may still get


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The batch and the queue between two steps; `context` and limits are in tokens."""

    num_running: int
    num_waiting: int
    wait_reason: WaitReason | None  # why the first in the queue waits, if it has been refused
    last_wait_reason: WaitReason | None  # why a request last had to wait
    seconds_since_last_wait: float | None  # seconds ago
    context_tokens: int  # tokens of the running rows, padding included
    peak_context_tokens: int  # the most that these will come to
    token_capacity: int  # less than context_most after lack of memory
    initial_token_capacity: int
    max_prefill_tokens: int  # tokens of prompts that a step may take; less than prefill_most after lack of memory
    initial_max_prefill_tokens: int
    max_batch_size: int
    max_prefill_padding: float
    max_waiting_tokens: int
    padded: bool  # whether the batch is a rectangle
    chunked_prefill: bool  # whether prompts are computed in parts, beside rows that decode
    running_requests: list[RequestState]  # the first of them
    waiting_requests: list[RequestState]  # the first of them, in order
