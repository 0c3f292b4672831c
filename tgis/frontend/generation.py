"""The life of one call, top to bottom: admission, validation, tokens, submission, text, reply.

Knows neither proto nor socket: faces hand over a `Call` and get `Reply` values. A unary call and a stream run the
same rows; a unary call joins what a stream passes on.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tgis.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from tgis.frontend.adapters import Adapters
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Kind, Metrics
from tgis.frontend.output import Reply, Row, RowFactory
from tgis.frontend.request_log import Account
from tgis.frontend.tokenize import TokenizeCall, Tokenized, tokenize
from tgis.frontend.tokenizer import Tokenizer
from tgis.frontend.validation import Limits, Parameters, Settings, make_request, validate
from tgis.ipc.adapters import Prefix
from tgis.ipc.messages import Request


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, and how."""

    limits: Limits
    encoder_decoder: bool
    largest: int  # tokens of one request, input and output, that fit into memory
    positions: int  # tokens that an input, and an output, may have whatever the memory
    max_inputs: int  # in flight
    max_queued_tokens: int  # of inputs that wait; 0 is no limit
    log_text: bool


@dataclass(frozen=True, slots=True)
class Call:
    """What a face has read from one RPC; `fields` are the paths of its inputs, for error messages."""

    kind: Kind
    texts: list[str]
    fields: list[str]  # longer than `texts` where an input is missing
    parameters: Parameters
    identity: bytes = b""  # of the caller
    adapter: tuple[str, str] | None = None  # field and id of a soft prompt or adapter


class Generator:
    """Runs calls. One per process, made once the engine is ready."""

    def __init__(
        self,
        serving: Serving,
        client: EngineClient,
        tokenizer: Tokenizer,
        adapters: Adapters,
        rows: RowFactory,
        metrics: Metrics,
    ) -> None:
        self.serving = serving
        self._client = client
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._rows = rows
        self._metrics = metrics
        self._inputs = 0
        self._accepting = True

    def stop_accepting(self) -> None:
        """Refuse new calls from now on."""
        self._accepting = False

    async def generate(self, call: Call) -> list[Reply]:
        """Run a unary call: one reply per input, in their order; the first input that fails fails the call."""
        account = self._account(call)
        if not call.texts:
            return []
        with account, self._admitted(call):
            settings = self._settings(call)
            async with self._adapters.resolved(call.adapter) as prefix:
                requests = await self._prepare(call, settings, prefix, account)
                with self._client.submitted(requests, eager=bool(settings.stop_sequences)) as inboxes:
                    rows = account.open(self._rows.make(inboxes, call.texts, settings))
                    await _all_or_first_error([self._finish(row, account) for row in rows])
                    return [row.whole() for row in rows]

    async def stream(self, call: Call) -> AsyncGenerator[Reply, None]:
        """Run a stream: what is known at once, the input tokens if wanted, then what each step adds."""
        account = self._account(call)
        with account, self._admitted(call):
            settings = self._settings(call)
            async with self._adapters.resolved(call.adapter) as prefix:
                requests = await self._prepare(call, settings, prefix, account)
                with self._client.submitted(requests, eager=True) as inboxes:
                    (row,) = account.open(self._rows.make(inboxes, call.texts, settings))
                    yield row.opening()
                    while not row.end:
                        for reply in row.advance(await row.inbox.take()):
                            yield reply

    async def tokenize(self, call: TokenizeCall) -> list[Tokenized]:
        """Run a Tokenize call; it needs no permit."""
        return await tokenize(call, self._tokenizer, self._adapters, self._metrics)

    def _account(self, call: Call) -> Account:
        return Account(call.kind, len(call.fields), self._metrics, log_text=self.serving.log_text)

    async def _finish(self, row: Row, account: Account) -> None:
        while not row.end:
            row.absorb(await row.inbox.take())
        self._client.close(row.inbox)
        account.close(row)

    @contextmanager
    def _admitted(self, call: Call) -> Iterator[None]:
        """Hold as many permits as the call has inputs; never wait for one."""
        inputs, most = len(call.fields), self.serving.max_inputs
        if not self._accepting:
            raise Unavailable("the server is shutting down")
        if self._inputs + inputs > most:
            raise Overloaded(f"Model is overloaded: {self._inputs} inputs in flight, at most {most} allowed")
        self._inputs += inputs
        try:
            yield
        finally:
            self._inputs -= inputs

    def _settings(self, call: Call) -> Settings:
        """Check what can be checked before anything is looked up."""
        if len(call.texts) < len(call.fields):
            raise InvalidRequest("request", "missing request")
        return validate(call.parameters, self.serving.limits)

    async def _prepare(self, call: Call, settings: Settings, prefix: Prefix | None, account: Account) -> list[Request]:
        """Tokenize, check the lengths, and make the engine's requests."""
        encoded = await self._tokenizer.encode(call.texts)
        account.tokenized([len(one.ids) for one in encoded])
        requests = [
            make_request(
                self._client.next_id(),
                self._tokenizer.truncate(one.ids, settings.truncate_input_tokens),
                prefix,
                settings=settings,
                limits=self.serving.limits,
                field_name=field,
                identity=call.identity,
            )
            for field, one in zip(call.fields, encoded, strict=True)
        ]
        self._check_sizes(call, requests)
        account.validated(requests, settings)
        return requests

    def _check_sizes(self, call: Call, requests: list[Request]) -> None:
        """Refuse what can never run, and what would make the queue too long: all inputs or none."""
        for field, request in zip(call.fields, requests, strict=True):
            size, largest = len(request.tokens) + request.max_new_tokens, self.serving.largest
            if size > largest:
                raise InvalidRequest(field, f"input and new tokens ({size}) are more than fit into memory ({largest})")
            if max(request.input_places, request.output_places) > self.serving.positions:
                text = f"input tokens ({request.input_places}) and new tokens ({request.output_places})"
                raise InvalidRequest(field, f"{text} must each be <= {self.serving.positions} for this model")
        most, queued = self.serving.max_queued_tokens, self._client.queued_tokens
        if most and queued and queued + sum(len(request.tokens) for request in requests) > most:
            raise Overloaded(f"Model is overloaded: {queued} input tokens are waiting, at most {most} may")


async def _all_or_first_error(work: list[Coroutine[None, None, None]]) -> None:
    if len(work) == 1:
        await work[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except* RequestError as errors:
        raise errors.exceptions[0] from None
