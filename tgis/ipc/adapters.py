"""Messages and values about soft prompts and LoRA adapters."""

import enum

import msgspec


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The adapter of a request: a soft prompt, which replaces the first `length` tokens, or LoRA, of length 0."""

    id: str  # as the call names it
    length: int  # virtual tokens
    decoder_length: int  # how many of these go before the output of an encoder-decoder
    lookup_id: int  # of the lookup that found it
    version: int  # unique to this content: cached prefixes are valid for one version only
    rank: int = 0  # of LoRA, the highest of any layer


class AdapterStoreOptions(msgspec.Struct, frozen=True):
    """Where soft prompts and LoRA adapters are, and how much memory they may take."""

    path: str | None  # directory; None: only LoRA modules
    cache_bytes: int
    max_soft_prompt_length: int  # virtual tokens
    lora_modules: dict[str, str] = {}  # directories of adapters that are not in the store, by id


class ResolveAdapter(msgspec.Struct, frozen=True, tag="resolve_adapter"):
    """Look an adapter up, and keep it until the lookup is cancelled."""

    lookup_id: int  # from the same sequence as request ids
    adapter_id: str


class AdapterProblem(enum.StrEnum):
    """Why an adapter cannot be used."""

    BAD_ID = "bad_id"
    NOT_FOUND = "not_found"
    UNSUPPORTED = "unsupported"  # an adapter of another type, which is then the reason
    BROKEN = "broken"


class AdapterResolved(msgspec.Struct, frozen=True, tag="adapter_resolved"):
    """The answer to a lookup: what was found, or what is wrong."""

    lookup_id: int
    length: int = 0  # virtual tokens
    decoder_length: int = 0
    version: int = 0
    rank: int = 0
    loaded: bool = False  # files were read for it
    problem: AdapterProblem | None = None
    reason: str = ""
