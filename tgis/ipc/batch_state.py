"""The state of the batch and the queue, for operators who ask why requests wait: counts and times, never tokens."""

import enum

import msgspec


class WaitReason(enum.StrEnum):
    """What keeps a request waiting."""

    BATCH_SIZE = "the batch is at its maximum size"
    MEMORY = "the batch would not fit into memory"
    PREFILL_SIZE = "the prefill would become too large"
    PREFILL_PADDING = "too much of the prefill would be padding"
    DECODE_TURN = "running requests get some decode steps first"
    PREFIX_CACHE = "its prompt begins like one that is being prefilled"
    ADAPTER_RANKS = "its LoRA adapter would add too many ranks to the batch"
    RETRY = "requests of a failed step are retried in groups"


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """Progress of one request, in tokens."""

    id: int
    seconds_since_arrival: float
    prompt_tokens: int
    computed_tokens: int  # by the engine, generated ones included
    generated_tokens: int
    remaining_tokens: int  # that it may still generate


class BatchState(msgspec.Struct, frozen=True, tag="batch_state"):
    """The batch and the queue between two steps; context, capacities and limits are in tokens."""

    num_running: int
    num_waiting: int
    wait_reason: WaitReason | None  # of the first in the queue, if it has been tried
    last_wait_reason: WaitReason | None  # of the last request that had to wait
    seconds_since_last_wait: float | None
    total_generated_tokens: int  # since the start
    context_tokens: int  # of the running requests, padding included
    peak_context_tokens: int  # if all of them generate as many tokens as they may
    token_capacity: int  # less than at the start after running out of memory
    initial_token_capacity: int
    max_prefill_tokens: int  # in one step; less than at the start after running out of memory
    initial_max_prefill_tokens: int
    max_batch_size: int
    max_prefill_padding: float
    max_waiting_tokens: int
    padded: bool  # the batch is a rectangle
    chunked_prefill: bool  # prompts are computed in chunks, mixed with decodes
    running_requests: list[RequestState]  # the first of them
    waiting_requests: list[RequestState]  # the first of them, in queue order
