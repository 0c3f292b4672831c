"""What an API reads from one RPC and hands to the front end. Knows no proto."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from tgis.frontend.params import Params
from tgis.tracing import Headers


class CallKind(enum.StrEnum):
    """A label of the metrics: unary with one input, unary with several, or a stream."""

    SINGLE = "single"
    BATCH = "batch"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A call to generate; `fields` are the paths of its inputs, for error messages.

    Each of the `n` outputs of an input is a request of its own, which shares the prefill of the others where the prefix
    cache can. Outputs are in the order of the inputs.
    """

    kind: CallKind
    texts: list[str]  # empty ones for inputs that are token ids
    fields: list[str]  # longer than `texts` where an input is missing
    params: Params
    client: bytes = b""  # key of the caller in quotas; empty: unknown
    token_ids: Sequence[Sequence[int]] | None = None  # the inputs, where they come tokenized
    api: str = "grpc"  # through which it came
    identity: bytes = b""  # identity of the caller
    adapter: tuple[str, str] | None = None  # field and id of a soft prompt or LoRA adapter
    answer_deadline: float | None = None  # `time.monotonic()`: end with the output so far shortly before it
    n: int = 1  # outputs of each input
    headers: Headers = field(default=(), repr=False)  # or metadata, which may name the span that it belongs to

    @property
    def num_outputs(self) -> int:
        return len(self.fields) * self.n


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A call to tokenize."""

    texts: list[str]
    truncate_input_tokens: int  # keep the last so many; 0 keeps all
    return_tokens: bool
    return_offsets: bool
    adapter: tuple[str, str] | None = None  # field and id; must exist, changes nothing
    add_special_tokens: bool = True
    max_tokens: int | None = None  # tokens that a reply has room for
