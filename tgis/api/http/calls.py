"""A call as the handlers of all HTTP APIs see it: the client, the body, and the call of the front end."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from tgis.api.http.errors import ErrorFormat, HttpError
from tgis.api.http.sse import EventStream
from tgis.config import Config
from tgis.frontend.calls import CallKind, GenerateCall
from tgis.frontend.generation import Generator
from tgis.frontend.params import Params

# The value is text of the client.
_ENUM_VALUE = re.compile(r"Invalid enum value '.*'(?= - at |$)", re.DOTALL)

B = TypeVar("B")


@dataclass(slots=True)
class HttpCall:
    """An authenticated request to an API, with its complete body and the generator.

    `client` is the key in quotas, empty if unknown; it may have `max_inputs` in flight. Metrics count `kind` if the
    call is refused before the generator counts it.
    """

    request: web.Request
    config: Config
    generator: Generator
    client: bytes
    max_inputs: int
    identity: bytes
    errors: ErrorFormat
    kind: CallKind | None
    data: bytes = b""
    events: EventStream | None = None

    def body(self, type_: type[B], *, strict: bool = True) -> B:
        """The body as a value; HttpError if it is none. Unless `strict`, 16.0 and "16" can be the integer 16."""
        try:
            return msgspec.json.decode(self.data, type=type_, strict=strict)
        except msgspec.ValidationError as error:
            raise HttpError(422, _ENUM_VALUE.sub("Invalid enum value", str(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from None

    def generate_call(
        self,
        params: Params,
        texts: list[str],
        fields: list[str],
        adapter: str | None,
        *,
        n: int,
        stream: bool,
        token_ids: list[list[int]] | None = None,
    ) -> GenerateCall:
        """The call that the front end gets: `n` outputs of each text."""
        self.kind = None
        unary = CallKind.SINGLE if len(texts) * n == 1 else CallKind.BATCH
        return GenerateCall(
            kind=CallKind.STREAM if stream else unary,
            texts=texts,
            fields=fields,
            params=params,
            client=self.client,
            token_ids=token_ids,
            api=self.errors.api,
            identity=self.identity,
            adapter=("adapter_id", adapter) if adapter else None,
            n=n,
            headers=self.request.headers.items(),
        )

    def compute_headers(self, prompts: Iterable[str]) -> dict[str, str]:
        """Headers of TGI, which say where the answer is computed, and the length of the prompts."""
        kind = f"{self.config.num_shard}-{self.generator.server_info.engine.device}"
        return {"x-compute-type": kind, "x-compute-characters": str(sum(map(len, prompts)))}

    def event_stream(self, headers: Mapping[str, str]) -> EventStream:
        """The answer, which begins with its first event: errors before that have a status."""
        self.events = EventStream(self.request, headers)
        return self.events
