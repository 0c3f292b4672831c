"""`--speculative-config`: vLLM's JSON for speculative decoding, and the options that it stands for."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from tgis.errors import OptionError
from tgis.utils.options import ValueType


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of vLLM. The lengths of matches are accepted, but cannot be chosen here."""

    method: Literal["ngram", "suffix", "draft_model", "mlp_speculator"]
    model: str | None = None
    revision: str | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=63)] | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        if (self.method in ("ngram", "suffix")) == bool(self.model):
            raise ValueError("draft_model and mlp_speculator need a model, ngram and suffix have none")


def _speculative_config(text: str) -> SpeculativeConfig:
    try:
        return msgspec.json.decode(text.encode(), type=SpeculativeConfig)
    except (msgspec.MsgspecError, UnicodeError) as error:
        known = "ngram, suffix, draft_model or mlp_speculator"
        raise ValueError(f"must be JSON with the method {known}: {str(error)[:200]}") from None


def implied_options(config: SpeculativeConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that it stands for; OptionError if `values` has others."""
    given = {
        "speculation": "auto" if config.model else "lookup",
        "speculator_name": config.model,
        "speculator_revision": config.revision,
        "speculation_max_tokens": config.num_speculative_tokens,
    }
    for name, value in given.items():
        if value is not None and values.get(name, value) != value:
            raise OptionError(f"{name.upper()}={values[name]!r} and SPECULATIVE_CONFIG must be the same, {value!r}")
    return {name: value for name, value in given.items() if value is not None}


SPECULATIVE_CONFIG = ValueType("JSON", _speculative_config)
