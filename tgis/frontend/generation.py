"""The life of one call, top to bottom: admission, validation, tokens, submission, text, reply.

Knows neither proto nor socket: faces hand over a `Call` and get `Reply` values. A unary call and a stream run the
same rows; a unary call joins what a stream passes on.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tgis.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from tgis.frontend.adapters import AdapterClient
from tgis.frontend.calls import GenerateCall, TokenizeCall
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import OutputBuilder, OutputBuilderFactory, RequestOutput
from tgis.frontend.request_log import RequestLog
from tgis.frontend.sampling_params import ResolvedParams
from tgis.frontend.tokenize import TokenizeResult, tokenize
from tgis.frontend.tokenizer import Tokenizer
from tgis.frontend.validation import RequestLimits, make_request, validate
from tgis.ipc.adapters import AdapterRef
from tgis.ipc.request import Request


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and how."""

    limits: RequestLimits
    encoder_decoder: bool
    max_request_tokens: int  # tokens of one request, input and output, that fit into memory
    max_positions: int  # tokens that an input, and an output, may have whatever the memory
    max_concurrent_inputs: int  # in flight
    max_queued_tokens: int  # of inputs that wait; 0 is no limit
    log_text: bool


class Generator:
    """Runs calls. One per process, made once the engine is ready."""

    def __init__(
        self,
        server_info: ServerInfo,
        client: EngineClient,
        tokenizer: Tokenizer,
        adapters: AdapterClient,
        outputs: OutputBuilderFactory,
        metrics: Metrics,
    ) -> None:
        self.server_info = server_info
        self._client = client
        self._tokenizer = tokenizer
        self._adapters = adapters
        self._outputs = outputs
        self._metrics = metrics
        self._num_inputs = 0
        self._accepting = True

    def stop_accepting(self) -> None:
        """Refuse new calls from now on."""
        self._accepting = False

    async def generate(self, call: GenerateCall) -> list[RequestOutput]:
        """Run a unary call: one reply per input, in their order; the first input that fails fails the call."""
        account = self._request_log(call)
        if not call.texts:
            return []
        with account, self._admission(call):
            settings = self._resolve_params(call)
            async with self._adapters.acquire(call.adapter) as prefix:
                requests = await self._prepare(call, settings, prefix, account)
                with self._client.submit(requests, eager=bool(settings.stop_sequences)) as inboxes:
                    rows = account.track(self._outputs.make(inboxes, call.texts, settings))
                    await _all_or_first_error([self._collect(row, account) for row in rows])
                    return [row.final() for row in rows]

    async def stream(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Run a stream: what is known at once, the input tokens if wanted, then what each step adds."""
        account = self._request_log(call)
        with account, self._admission(call):
            settings = self._resolve_params(call)
            async with self._adapters.acquire(call.adapter) as prefix:
                requests = await self._prepare(call, settings, prefix, account)
                with self._client.submit(requests, eager=True) as inboxes:
                    (row,) = account.track(self._outputs.make(inboxes, call.texts, settings))
                    yield row.first_chunk()
                    while not row.stop_reason:
                        for reply in row.chunks(await row.queue.get()):
                            yield reply

    async def tokenize(self, call: TokenizeCall) -> list[TokenizeResult]:
        """Run a Tokenize call; it needs no permit."""
        return await tokenize(call, self._tokenizer, self._adapters, self._metrics)

    def _request_log(self, call: GenerateCall) -> RequestLog:
        return RequestLog(call.kind, len(call.fields), self._metrics, log_text=self.server_info.log_text)

    async def _collect(self, row: OutputBuilder, account: RequestLog) -> None:
        while not row.stop_reason:
            row.add(await row.queue.get())
        self._client.close(row.queue)
        account.finish(row)

    @contextmanager
    def _admission(self, call: GenerateCall) -> Iterator[None]:
        """Hold as many permits as the call has inputs; never wait for one."""
        inputs, most = len(call.fields), self.server_info.max_concurrent_inputs
        if not self._accepting:
            raise Unavailable("the server is shutting down")
        if self._num_inputs + inputs > most:
            raise Overloaded(f"Model is overloaded: {self._num_inputs} inputs in flight, at most {most} allowed")
        self._num_inputs += inputs
        try:
            yield
        finally:
            self._num_inputs -= inputs

    def _resolve_params(self, call: GenerateCall) -> ResolvedParams:
        """Check what can be checked before anything is looked up."""
        if len(call.texts) < len(call.fields):
            raise InvalidRequest("request", "missing request")
        return validate(call.params, self.server_info.limits)

    async def _prepare(
        self, call: GenerateCall, settings: ResolvedParams, prefix: AdapterRef | None, account: RequestLog
    ) -> list[Request]:
        """Tokenize, check the lengths, and make the engine's requests."""
        encoded = await self._tokenizer.encode(call.texts)
        account.inputs_tokenized([len(one.ids) for one in encoded])
        requests = [
            make_request(
                self._client.next_id(),
                self._tokenizer.truncate(one.ids, settings.truncate_input_tokens),
                prefix,
                params=settings,
                limits=self.server_info.limits,
                field=field,
                identity=call.identity,
            )
            for field, one in zip(call.fields, encoded, strict=True)
        ]
        self._check_capacity(call, requests)
        account.validated(requests, settings)
        return requests

    def _check_capacity(self, call: GenerateCall, requests: list[Request]) -> None:
        """Refuse what can never run, and what would make the queue too long: all inputs or none."""
        for field, request in zip(call.fields, requests, strict=True):
            size, largest = len(request.tokens) + request.max_new_tokens, self.server_info.max_request_tokens
            if size > largest:
                raise InvalidRequest(field, f"input and new tokens ({size}) are more than fit into memory ({largest})")
            if max(request.input_positions, request.output_positions) > self.server_info.max_positions:
                text = f"input tokens ({request.input_positions}) and new tokens ({request.output_positions})"
                raise InvalidRequest(field, f"{text} must each be <= {self.server_info.max_positions} for this model")
        most, queued = self.server_info.max_queued_tokens, self._client.queued_tokens
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
