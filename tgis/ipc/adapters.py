"""Messages and values about soft prompts and LoRA adapters."""

import enum

import msgspec


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request has from the store: a soft prompt, whose embeddings take the place of the first `length` tokens,
    or a LoRA adapter, of no length.
    """

    id: str  # as the call names it
    length: int
    decoder_length: int  # how many of these stand before the output of an encoder-decoder
    lookup_id: int  # number of the lookup that found it
    version: int  # unlike that of any other content: what was computed with it is no good with another


class AdapterStoreOptions(msgspec.Struct, frozen=True):
    """Where soft prompts and adapters are, and how much of them there may be."""

    path: str  # directory
    cache_bytes: int
    max_soft_prompt_length: int  # virtual tokens of a soft prompt


class ResolveAdapter(msgspec.Struct, frozen=True, tag="lookup"):
    """Find what an id names, and keep it until this is cancelled."""

    lookup_id: int  # unlike that of any request
    adapter_id: str


class AdapterProblem(enum.StrEnum):
    """Why it is not to be had."""

    BAD_ID = "bad_id"
    NOT_FOUND = "not_found"
    UNSUPPORTED = "unsupported"  # an adapter of another type, which is then the reason
    BROKEN = "broken"


class AdapterResolved(msgspec.Struct, frozen=True, tag="prompt"):
    """The answer to a lookup: a length, or what is wrong."""

    lookup_id: int
    length: int = 0  # virtual tokens
    decoder_length: int = 0
    version: int = 0
    loaded: bool = False  # whether files were read for it
    problem: AdapterProblem | None = None
    reason: str = ""
