"""The life of one call, top to bottom: admission, validation, tokenization, submission, output.

Knows neither proto nor socket: APIs hand over a `GenerateCall` and get `RequestOutput` values.
"""

import asyncio
import functools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from tgis.errors import InvalidRequest, QueueFull, Unavailable
from tgis.frontend.calls import Account, CallKind, GenerateCall, TokenizeCall
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.lookups import Lookups
from tgis.frontend.metric_families import FailureReason
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import OutputBuilder, RequestOutput
from tgis.frontend.output_queue import OutputQueue
from tgis.frontend.request_log import RequestLog
from tgis.frontend.sampling_params import RawParams, ResolvedParams
from tgis.frontend.tokenizer import Encoding, Wanted
from tgis.frontend.validation import RequestLimits, check_num_bytes, make_request, validate
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import EngineInfo
from tgis.ipc.request import Request

# What calls hold in the memory of this process, in bytes, as measured.
_INPUT_BYTES = 2048  # of an input: its message, request, queue and output, without the text
_DETAIL_BYTES = 32  # of an input token or a candidate for it: as the engine sends it, and in the reply
_TOKENS_PER_BYTE = 16  # ids and strings for a byte of a text in Tokenize, those in the reply included
_OFFSETS_PER_BYTE = 24
_TOKENS_PER_MICROSECOND = 16  # of inputs, to make requests of them
_MICROSECONDS_PER_TOKEN = 10  # of an output, to make text of it


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and how."""

    engine: EngineInfo
    limits: RequestLimits
    max_concurrent_inputs: int
    max_tokenize_inputs: int  # of a call
    max_queued_tokens: int  # of inputs that wait; 0 is no limit
    random_seed: int | None  # None: different seeds in every run
    log_text: bool


@dataclass(frozen=True, slots=True)
class TokenizeResult:
    """One text; there are no tokens and offsets unless requested."""

    token_count: int
    ids: Sequence[int]
    tokens: Iterable[str]  # to be read once
    offsets: Iterable[tuple[int, int]]  # likewise


class Generator:
    """Runs calls. One per process, made once the engine is ready."""

    def __init__(
        self,
        server_info: ServerInfo,
        client: EngineClient,
        decoder: TokenDecoder,
        lookups: Lookups,
        metrics: Metrics,
    ) -> None:
        self.server_info = server_info
        self._client = client
        self._decoders = {  # by `skip_special_tokens` of a request
            None: decoder,
            True: decoder.variant(output_special_tokens=False),
            False: decoder.variant(output_special_tokens=True),
        }
        self.token_decoder = decoder.variant(output_special_tokens=True, hide_eos=False)  # of every token
        self._tokenizer = decoder.tokenizer
        self._lookups = lookups
        self._metrics = metrics
        self.pool = decoder.tokenizer.pool  # of all work that would hold the event loop
        self._seeds = random.Random(server_info.random_seed)
        self.num_inputs = 0  # of open calls
        self.num_cancelled = 0  # ever, by clients or by the end of the server
        self._accepting = True

    def stop_accepting(self) -> None:
        """Reject new calls from now on."""
        self._accepting = False

    async def generate(self, call: GenerateCall) -> list[RequestOutput]:
        """Run a unary call: the outputs of each input, in order; the first that fails fails the call."""
        log = RequestLog(call, self._metrics, log_text=self.server_info.log_text)
        if not call.texts:
            return []
        with log, self._admission(call):
            params = self._resolve_params(call)
            async with self._look_up(call, params) as (adapter, grammar):
                requests = await self._prepare(call, params, adapter, grammar, log)
                eager = bool(params.given.stop_sequences)
                with self._client.submit(requests, eager=eager, arrived=log.started) as queues:
                    outputs = log.track(self._output_builders(queues, call, params))
                    await _gather([self._collect(output, log) for output in outputs])
                    return [output.final() for output in outputs]

    def refused(self, kind: CallKind) -> None:
        """Count a call of one input that breaks a rule of its API."""
        self._metrics.request_started(kind, 1)
        self._metrics.request_failed(FailureReason.VALIDATION)

    async def stream(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Run a stream: what is known before the prefill, the input tokens if wanted, then what each step adds.

        Of several outputs, whichever has something new comes next; `RequestOutput.index` tells them apart.
        """
        log = RequestLog(call, self._metrics, log_text=self.server_info.log_text)
        with log, self._admission(call):
            params = self._resolve_params(call)
            async with self._look_up(call, params) as (adapter, grammar):
                requests = await self._prepare(call, params, adapter, grammar, log)
                with self._client.submit(requests, eager=True, arrived=log.started) as queues:
                    outputs = log.track(self._output_builders(queues, call, params))
                    for output in outputs:
                        output.queue.on_end = functools.partial(_output_ended, call.account, outputs)
                    for output in outputs:
                        yield output.first_chunk()
                    if len(outputs) > 1:
                        async with aclosing(_merged_chunks(outputs)) as chunks:
                            async for chunk in chunks:
                                yield chunk
                        return
                    (output,) = outputs  # nearly always, and without another generator
                    while not output.stop_reason:
                        await output.queue.ready()
                        for chunk in output.chunks():
                            yield chunk

    async def tokenize(self, call: TokenizeCall) -> list[TokenizeResult]:
        """Tokenize texts, special tokens included. An adapter must exist, but changes nothing. Takes no places."""
        started = time.monotonic()
        self._metrics.tokenize_started(len(call.texts))
        _check_num_inputs(len(call.texts), self.server_info.max_tokenize_inputs)
        per_byte = _TOKENS_PER_BYTE * call.return_tokens + _OFFSETS_PER_BYTE * call.return_offsets
        call.account.charge(_INPUT_BYTES * len(call.texts) + per_byte * call.num_bytes)
        async with self._lookups.adapter(call.adapter):
            limit = call.truncate_input_tokens or None
            keep = limit if call.return_tokens or call.return_offsets else 0
            wanted = Wanted(call.return_offsets, keep, limit, call.add_special_tokens, call.max_tokens)
            encodings = await self._tokenizer.encode(call.texts, wanted)
        results = [
            self._tokenize_result(encoding.keep_last(call.truncate_input_tokens), call) for encoding in encodings
        ]
        num_tokens = sum(result.token_count for result in results)
        self._metrics.tokenize_succeeded(num_tokens, time.monotonic() - started)
        return results

    def _tokenize_result(self, encoding: Encoding, call: TokenizeCall) -> TokenizeResult:
        return TokenizeResult(
            token_count=encoding.num_tokens,
            ids=encoding.packed_ids,
            tokens=map(self._tokenizer.token_text, encoding.packed_ids if call.return_tokens else ()),
            offsets=encoding.offsets,
        )

    def _output_builders(
        self, queues: list[OutputQueue], call: GenerateCall, params: ResolvedParams
    ) -> list[OutputBuilder]:
        """At once, so that nothing ends before somebody takes note of it."""
        separator = "\n\n" if self.server_info.engine.encoder_decoder else ""
        decoder = self._decoders[params.given.skip_special_tokens]
        return [
            OutputBuilder(queue, call.texts[index // call.n], params, decoder, separator=separator, index=index)
            for index, queue in enumerate(queues)
        ]

    async def _collect(self, output: OutputBuilder, log: RequestLog) -> None:
        while not output.stop_reason:
            await output.queue.ready()
            # Before the end, tokens may come while a thread takes them; until then there are few, if any.
            cost = _MICROSECONDS_PER_TOKEN * len(output.queue.new_tokens) if output.queue.ended else 0
            await self.pool.run(cost, output.collect)
        self._client.close(output.queue)
        log.finish(output)

    @contextmanager
    def _admission(self, call: GenerateCall) -> Iterator[None]:
        """Count the inputs of the call as in flight; reject instead of waiting."""
        num_inputs = call.num_outputs
        if not self._accepting:
            raise Unavailable("the server is shutting down")
        _check_num_inputs(num_inputs, call.account.max_inputs)
        call.account.charge(_INPUT_BYTES * num_inputs)
        call.account.take_places(num_inputs)
        self.num_inputs += num_inputs
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += num_inputs
            raise
        finally:
            self.num_inputs -= num_inputs
            call.account.give_back_places()

    def _resolve_params(self, call: GenerateCall) -> ResolvedParams:
        """Check what can be checked before anything is looked up."""
        if len(call.texts) < len(call.fields):
            raise InvalidRequest("request", "missing request")
        return validate(call.params, self.server_info.limits)

    @asynccontextmanager
    async def _look_up(
        self, call: GenerateCall, params: ResolvedParams
    ) -> AsyncIterator[tuple[AdapterRef | None, int | None]]:
        """What the engine process keeps for the call until the block is left."""
        async with (
            self._lookups.adapter(call.adapter) as adapter,
            self._lookups.grammar(params.given.grammar) as grammar,
        ):
            yield adapter, grammar

    async def _prepare(
        self,
        call: GenerateCall,
        params: ResolvedParams,
        adapter: AdapterRef | None,
        grammar: int | None,
        log: RequestLog,
    ) -> list[Request]:
        """Tokenize, check the lengths, and make the engine's requests."""
        limits, limit = self.server_info.limits, params.given.truncate_input_tokens
        encodings = await self._encode(call, params.given)
        log.inputs_tokenized([encoding.num_tokens for encoding in encodings for _ in range(call.n)])
        cost = sum(len(encoding.packed_ids) for encoding in encodings) / _TOKENS_PER_MICROSECOND
        inputs = await self.pool.run(cost, lambda: [self._tokenizer.truncate(one.ids, limit) for one in encodings])
        requests = [
            make_request(
                self._client.next_id(),
                tokens,
                adapter,
                length=min(encoding.num_tokens, limit or encoding.num_tokens),
                params=params.seeded(self._seeds.getrandbits(32), number),
                limits=limits,
                field=field,
                identity=call.identity,
                answer_deadline=call.answer_deadline,
                grammar=grammar,
                client=call.account.client,
            )
            for field, encoding, tokens in zip(call.fields, encodings, inputs, strict=True)
            for number in range(call.n)
        ]
        options, num_tokens = params.given.logprob_options, sum(len(request.tokens) for request in requests)
        call.account.charge(_DETAIL_BYTES * num_tokens * options.details_per_token if options.input_tokens else 0)
        self._check_queue(requests)  # from here on nobody else can queue until the caller has
        log.validated(requests, params)
        return requests

    async def _encode(self, call: GenerateCall, params: RawParams) -> list[Encoding]:
        limits = self.server_info.limits
        if call.token_ids is not None:
            return [Encoding.of_ids(ids, limits.max_sequence_length) for ids in call.token_ids]
        if not params.truncate_input_tokens:
            check_num_bytes(call.texts, call.fields, limits, self._tokenizer.max_bytes_per_token)
        return await self._tokenizer.encode(call.texts, _wanted(limits.max_sequence_length, params))

    def _check_queue(self, requests: list[Request]) -> None:
        """Reject what would make the queue too long: all inputs or none."""
        limit, queued = self.server_info.max_queued_tokens, self._client.queued_tokens
        if limit and queued and queued + sum(len(request.tokens) for request in requests) > limit:
            raise QueueFull(f"{queued} input tokens are waiting, at most {limit} may")


def _wanted(max_length: int, params: RawParams) -> Wanted:
    """The tokens of an input: all that may fit, or the last ones, and one more to know whether any are cut off."""
    limit, special_tokens = params.truncate_input_tokens, params.add_special_tokens
    if not limit:
        return Wanted(keep=max_length, special_tokens=special_tokens)
    return Wanted(keep=min(limit, max_length) + 1, enough=max(limit, max_length), special_tokens=special_tokens)


async def _gather(work: Sequence[Coroutine[None, None, None]]) -> None:
    """Run coroutines together until all have ended, or one has failed, which cancels the others."""
    if len(work) == 1:
        await work[0]
        return
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        while tasks:  # they keep their errors, whose tracebacks have this frame
            tasks.pop().cancel()


async def _merged_chunks(outputs: list[OutputBuilder]) -> AsyncGenerator[RequestOutput, None]:
    """The messages of several outputs after the first ones."""
    waiting = {asyncio.create_task(output.queue.wait()): output for output in outputs}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in waiting if each in done]:
                output = waiting.pop(task)
                await output.queue.ready()
                for chunk in output.chunks():
                    yield chunk
                if not output.stop_reason:
                    waiting[asyncio.create_task(output.queue.wait())] = output
    finally:
        for task in waiting:
            task.cancel()


def _output_ended(account: Account, outputs: list[OutputBuilder]) -> None:
    if all(output.queue.ended for output in outputs):
        account.output_complete(sum(output.unread_bytes for output in outputs))


def _check_num_inputs(num_inputs: int, limit: int) -> None:
    """Unlike too many of several calls, too many of one will never be accepted."""
    if num_inputs > limit:
        raise InvalidRequest("requests", f"requests has {num_inputs} inputs, at most {limit} allowed")
