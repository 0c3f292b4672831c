"""The life of one call, top to bottom: admission, validation, tokenization, submission, output.

Knows neither proto nor socket: faces hand over a `GenerateCall` and get `RequestOutput` values.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tgis.errors import InvalidRequest, QueueFull, RequestError, Unavailable
from tgis.frontend.adapters import AdapterClient
from tgis.frontend.budget import INPUT, OFFSETS_PER_BYTE, TOKENS_PER_BYTE, MemoryBudget, details_price
from tgis.frontend.calls import GenerateCall, TokenizeCall
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import OutputBuilder, RequestOutput
from tgis.frontend.output_queue import OutputQueue
from tgis.frontend.permits import Permit, Permits
from tgis.frontend.request_log import RequestLog
from tgis.frontend.sampling_params import ResolvedParams
from tgis.frontend.tokenizer import Encoding, Wanted
from tgis.frontend.validation import RequestLimits, check_num_bytes, make_request, validate
from tgis.ipc.adapters import AdapterRef
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import Request
from tgis.utils.slices import Slicer

_INPUT_COST = 16  # units of a slice
_TOKENS_PER_UNIT = 128  # of a slice, to send them to the engine


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and how."""

    engine: EngineInfo
    limits: RequestLimits
    max_concurrent_inputs: int
    max_client_inputs: int  # of the calls of one client
    max_tokenize_inputs: int  # of a call
    max_memory: int  # bytes that all calls hold
    max_client_memory: int  # bytes that the calls of one client hold, or one call
    max_queued_tokens: int  # of inputs that wait; 0 is no limit
    random_seed: int | None  # None: different seeds in every run
    log_text: bool


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """One text; there are no tokens and offsets unless requested."""

    token_count: int
    tokens: Iterable[str]  # to be read once
    offsets: Iterable[tuple[int, int]]  # likewise


class Generator:
    """Runs calls. One per process, made once the engine is ready."""

    def __init__(
        self,
        server_info: ServerInfo,
        client: EngineClient,
        decoder: TokenDecoder,
        adapters: AdapterClient,
        metrics: Metrics,
    ) -> None:
        self.server_info = server_info
        self._client = client
        self._decoder = decoder
        self._tokenizer = decoder.tokenizer
        self._adapters = adapters
        self._metrics = metrics
        self.slicer = Slicer()  # of all long work on the loop
        self._seeds = random.Random(server_info.random_seed)
        self.memory = MemoryBudget(server_info.max_memory, server_info.max_client_memory)
        self._permits = Permits(server_info.max_concurrent_inputs, server_info.max_client_inputs)
        self.num_inputs = 0  # of open calls
        self.num_cancelled = 0  # ever, by clients or by the end of the server
        self._accepting = True

    def stop_accepting(self) -> None:
        """Reject new calls from now on."""
        self._accepting = False

    async def generate(self, call: GenerateCall) -> list[RequestOutput]:
        """Run a unary call: one output per input, in order; the first input that fails fails the call."""
        log = RequestLog(call, self._metrics, log_text=self.server_info.log_text)
        if not call.texts:
            return []
        with log, self._admission(call):
            params = self._resolve_params(call)
            async with self._adapters.acquire(call.adapter) as adapter:
                requests = await self._prepare(call, params, adapter, log)
                eager = bool(params.given.stop_sequences)
                with self._client.submit(requests, eager=eager, arrived=log.started) as queues:
                    outputs = log.track(self._output_builders(queues, call, params))
                    await _all_or_first_error([self._collect(output, log) for output in outputs])
                    return [output.final() for output in outputs]

    async def stream(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Run a stream: what is known before the prefill, the input tokens if wanted, then what each step adds."""
        log = RequestLog(call, self._metrics, log_text=self.server_info.log_text)
        with log, self._admission(call) as permit:
            params = self._resolve_params(call)
            async with self._adapters.acquire(call.adapter) as adapter:
                requests = await self._prepare(call, params, adapter, log)
                with self._client.submit(requests, eager=True, arrived=log.started) as queues:
                    (output,) = log.track(self._output_builders(queues, call, params))
                    output.queue.on_end = lambda: permit.output_complete(output.unread_bytes)
                    yield output.first_chunk()
                    while not output.stop_reason:
                        for chunk in output.chunks(await output.queue.get()):
                            yield chunk

    async def tokenize(self, call: TokenizeCall) -> list[TokenizeResult]:
        """Tokenize texts, special tokens included. An adapter must exist, but changes nothing. Takes no permit."""
        started = time.monotonic()
        self._metrics.tokenize_started(len(call.texts))
        _check_num_inputs(len(call.texts), self.server_info.max_tokenize_inputs)
        per_byte = TOKENS_PER_BYTE * call.return_tokens + OFFSETS_PER_BYTE * call.return_offsets
        call.account.charge(INPUT * len(call.texts) + per_byte * call.num_bytes)
        async with self._adapters.acquire(call.adapter):
            limit = call.truncate_input_tokens or None
            keep = limit if call.return_tokens or call.return_offsets else 0
            encodings = await self._tokenizer.encode(call.texts, Wanted(call.return_offsets, keep, enough=limit))
        results: list[TokenizeResult] = []
        async for some in self.slicer.slices(encodings):
            kept = [encoding.keep_last(call.truncate_input_tokens) for encoding in some]
            results += [self._tokenize_result(encoding, call) for encoding in kept]
        num_tokens = sum(result.token_count for result in results)
        self._metrics.tokenize_succeeded(num_tokens, time.monotonic() - started)
        return results

    def _tokenize_result(self, encoding: Encoding, call: TokenizeCall) -> TokenizeResult:
        return TokenizeResult(
            token_count=encoding.num_tokens,
            tokens=map(self._tokenizer.token_text, encoding.id_array if call.return_tokens else ()),
            offsets=encoding.offsets,
        )

    def _output_builders(
        self, queues: list[OutputQueue], call: GenerateCall, params: ResolvedParams
    ) -> list[OutputBuilder]:
        """At once, so that nothing ends before somebody takes note of it."""
        separator = "\n\n" if self.server_info.engine.encoder_decoder else ""
        return [
            OutputBuilder(queue, text, params, self._decoder, separator=separator)
            for queue, text in zip(queues, call.texts, strict=True)
        ]

    async def _collect(self, output: OutputBuilder, log: RequestLog) -> None:
        cost = output.details_per_token
        while not output.stop_reason:
            async for _ in self.slicer.slices(output.add(await output.queue.get()), cost):
                pass
        self._client.close(output.queue)
        log.finish(output)

    @contextmanager
    def _admission(self, call: GenerateCall) -> Iterator[Permit]:
        """Count the inputs of the call as in flight; reject instead of waiting."""
        num_inputs = len(call.fields)
        if not self._accepting:
            raise Unavailable("the server is shutting down")
        _check_num_inputs(num_inputs, self._permits.most_of_a_call(call.account.client))
        call.account.charge(INPUT * num_inputs)
        permit = self._permits.take(num_inputs, call.account.client)
        self.num_inputs += num_inputs
        try:
            yield permit
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += num_inputs
            raise
        finally:
            self.num_inputs -= num_inputs
            permit.give_back()

    def _resolve_params(self, call: GenerateCall) -> ResolvedParams:
        """Check what can be checked before anything is looked up."""
        if len(call.texts) < len(call.fields):
            raise InvalidRequest("request", "missing request")
        return validate(call.params, self.server_info.limits)

    async def _prepare(
        self, call: GenerateCall, params: ResolvedParams, adapter: AdapterRef | None, log: RequestLog
    ) -> list[Request]:
        """Tokenize, check the lengths, and make the engine's requests."""
        limits, limit = self.server_info.limits, params.given.truncate_input_tokens
        if not limit:
            check_num_bytes(call.texts, call.fields, limits, self._tokenizer.max_bytes_per_token)
        encodings = await self._tokenizer.encode(call.texts, _wanted(limits.max_sequence_length, limit))
        log.inputs_tokenized([encoding.num_tokens for encoding in encodings])
        requests = []
        async for some in self.slicer.slices(zip(call.fields, encodings, strict=True), cost=_INPUT_COST):
            requests += [
                make_request(
                    self._client.next_id(),
                    self._tokenizer.truncate(encoding.ids, limit),
                    adapter,
                    length=min(encoding.num_tokens, limit or encoding.num_tokens),
                    params=params.seeded(self._seeds.getrandbits(32)),
                    limits=limits,
                    field=field,
                    identity=call.identity,
                    answer_deadline=call.answer_deadline,
                )
                for field, encoding in some
            ]
        call.account.charge(details_price(sum(len(one.tokens) for one in requests), params.given.logprob_options))
        await self.slicer.turn(sum(len(one.tokens) // _TOKENS_PER_UNIT + _INPUT_COST for one in requests))
        self._check_queue(requests)  # from here on nobody else can queue until the caller has
        log.validated(requests, params)
        return requests

    def _check_queue(self, requests: list[Request]) -> None:
        """Reject what would make the queue too long: all inputs or none."""
        limit, queued = self.server_info.max_queued_tokens, self._client.queued_tokens
        if limit and queued and queued + sum(len(request.tokens) for request in requests) > limit:
            raise QueueFull(f"{queued} input tokens are waiting, at most {limit} may")


def _wanted(max_length: int, limit: int) -> Wanted:
    """The tokens of an input: all that may fit, or the last ones, and one more to know whether any are cut off."""
    if not limit:
        return Wanted(keep=max_length)
    return Wanted(keep=min(limit, max_length) + 1, enough=max(limit, max_length))


def _check_num_inputs(num_inputs: int, limit: int) -> None:
    """Unlike too many of several calls, too many of one will never be accepted."""
    if num_inputs > limit:
        raise InvalidRequest("requests", f"requests has {num_inputs} inputs, at most {limit} allowed")


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
