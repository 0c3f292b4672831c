"""`--speculative-config`: vLLM's JSON for speculative decoding, and the options that it stands for."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tgis.errors import OptionError
from tgis.utils.options import ValueType


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What vLLM takes as JSON: lookup, where the lengths of matches are not ours to choose, or a model."""

    method: Literal["ngram", "suffix", "draft_model", "mlp_speculator"]
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=63)] | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None


def _speculative_config(text: str) -> SpeculativeConfig:
    try:
        return msgspec.json.decode(text.encode(), type=SpeculativeConfig)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        known = "ngram, suffix, draft_model or mlp_speculator"
        raise ValueError(f"must be JSON with the method {known}: {str(error)[:200]}") from None


def named_by(config: SpeculativeConfig | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that it stands for; OptionError if `values` has others."""
    if config is None:
        return {}
    is_lookup = config.method in ("ngram", "suffix")
    if is_lookup == bool(config.model):
        needs = "takes no" if is_lookup else "needs a"
        raise OptionError(f"SPECULATIVE_CONFIG: method {config.method!r} {needs} model, got {config.model!r}")
    given: dict[str, Any] = {
        "speculation": "auto" if config.model else "lookup",
        "speculator_name": config.model,
        "speculator_revision": config.revision,
        "speculation_max_tokens": config.num_speculative_tokens,
    }
    named = {name: value for name, value in given.items() if value is not None}
    for name, value in named.items():
        if values.get(name, value) != value:
            raise OptionError(f"{name.upper()}={values[name]!r} and SPECULATIVE_CONFIG must be the same, {value!r}")
    return named


SPECULATIVE_CONFIG = ValueType("JSON", _speculative_config)
