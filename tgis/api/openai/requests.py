"""Reads request bodies like vLLM: numbers may be strings, unknown fields are ignored, the model has defaults."""

import logging
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from tgis.api.http.calls import HttpCall
from tgis.api.openai.bodies import SamplingBody

# The most fields of a body that are checked, and the most unknown names that are logged.
_MAX_FIELDS = 100
_MAX_NAME_LENGTH = 64

B = TypeVar("B", bound=SamplingBody)

log = logging.getLogger(__name__)


class SamplingDefaults(Struct):
    """Sampling parameters of generation_config.json, for requests without them."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


class RequestReader:
    """Reads the bodies of chats and completions."""

    def __init__(self, generation_config: Mapping[str, Any]) -> None:
        """Take the model's sampling defaults; log a warning and take none if one is invalid."""
        try:
            defaults = msgspec.convert(generation_config, SamplingDefaults, strict=False)
        except msgspec.ValidationError as error:
            log.warning("generation_config.json: no sampling defaults are taken from it: %s", error)
            defaults = SamplingDefaults()
        self._defaults = {name: value for name, value in msgspec.structs.asdict(defaults).items() if value is not None}
        self._logged: set[str] = set()

    def read(self, call: HttpCall, type_: type[B]) -> B:
        """Decode the body of a call; raises HttpError like `HttpCall.body`."""
        body = call.body(type_, strict=False)
        fields = islice(msgspec.json.decode(call.data, type=dict[str, Raw]), _MAX_FIELDS)
        if unknown := set(fields) - set(type_.__struct_fields__):
            call.generator.metrics.requests.unknown_fields.inc(len(unknown))
            self._log(unknown)
        for name, value in self._defaults.items():
            if getattr(body, name) is None:
                setattr(body, name, value)
        return body

    def _log(self, names: set[str]) -> None:
        """Log each name once, unless it may contain text of the client."""
        for name in sorted(names - self._logged):
            if name.isidentifier() and len(name) <= _MAX_NAME_LENGTH and len(self._logged) < _MAX_FIELDS:
                self._logged.add(name)
                log.warning("requests have the field %s, which is unknown here and has no effect", name)
