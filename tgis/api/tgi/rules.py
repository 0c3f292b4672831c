"""TGI's rules that no other face has, in its order; the bounds of single fields are in `schema.py`."""

from collections.abc import Callable
from dataclasses import dataclass

from tgis.api.tgi.schema import GenerateRequest
from tgis.errors import InvalidRequest

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class TgiLimits:
    """The limits of the server for requests of this API."""

    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int


@dataclass(frozen=True, slots=True)
class _Asked:
    request: GenerateRequest
    limits: TgiLimits
    streams: bool

    @property
    def best_of(self) -> int:
        return self.request.parameters.best_of or 1

    @property
    def num_stops(self) -> int:
        return len(self.request.parameters.stop) + len(self.request.parameters.stop_sequences)


@dataclass(frozen=True, slots=True)
class _Rule:
    field: str
    violated: Callable[[_Asked], bool]
    message: str  # a format string over what was asked


def check(request: GenerateRequest, limits: TgiLimits, *, streams: bool) -> None:
    """InvalidRequest for the first rule violated."""
    asked = _Asked(request, limits, streams)
    for rule in _RULES:
        if rule.violated(asked):
            raise InvalidRequest(rule.field, rule.message.format(asked=asked, p=request.parameters, limits=limits))


_RULES = (
    _Rule(
        "best_of",
        lambda asked: asked.streams and asked.request.parameters.best_of not in (None, 1),
        "`best_of` != 1 is not supported when streaming tokens",
    ),
    _Rule(
        "decoder_input_details",
        lambda asked: asked.streams and asked.request.parameters.decoder_input_details,
        "`decoder_input_details` == true is not supported when streaming tokens",
    ),
    _Rule(
        "best_of",
        lambda asked: asked.best_of > asked.limits.max_best_of,
        "`best_of` must be > 0 and <= {limits.max_best_of}. Given: {p.best_of}",
    ),
    _Rule(
        "best_of",
        lambda asked: asked.best_of > 1 and not asked.request.parameters.asks_for_sampling,
        "you must use sampling when `best_of` is > 1",
    ),
    _Rule(
        "stop_sequences",
        lambda asked: asked.num_stops > asked.limits.max_stop_sequences,
        "`stop` supports up to {limits.max_stop_sequences} stop sequences. Given: {asked.num_stops}",
    ),
    _Rule(
        "seed",
        lambda asked: asked.best_of > 1 and asked.request.parameters.seed is not None,
        "`seed` must not be set when `best_of` > 1",
    ),
    _Rule("seed", lambda asked: (asked.request.parameters.seed or 0) > MAX_SEED, f"`seed` must be <= {MAX_SEED}"),
    _Rule(
        "truncate",
        lambda asked: (asked.request.parameters.truncate or 0) > asked.limits.max_input_tokens,
        "`truncate` must be > 0 and <= {limits.max_input_tokens}. Given: {p.truncate}",
    ),
)
