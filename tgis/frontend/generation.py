"""The life of one call, top to bottom: admission, validation, tokenization, submission, output.

Knows neither proto nor socket: APIs hand over a `GenerateCall` and get `RequestOutput` values.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from tgis.errors import LOADING, InvalidRequest, QueueFull, Unavailable
from tgis.frontend.admission import Admission
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_client import EngineClient
from tgis.frontend.engine_output import EngineOutput, ReadyOutputs
from tgis.frontend.lookups import Lookups
from tgis.frontend.metrics import Metrics
from tgis.frontend.output import Output, RequestOutput
from tgis.frontend.params import Params
from tgis.frontend.recorder import CallRecorder
from tgis.frontend.records import Recorder
from tgis.frontend.tokenizer import EncodeOptions, Encoding
from tgis.frontend.validation import RequestLimits, check_num_bytes, make_request, validate
from tgis.ipc.lookups import AdapterRef
from tgis.ipc.messages import BatchState, EngineInfo
from tgis.ipc.request import Request
from tgis.tracing import Tracer

MAX_TOKENIZE_INPUTS = 10_000  # texts of a call to Tokenize


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is served, and how."""

    engine: EngineInfo
    limits: RequestLimits
    max_queued_tokens: int  # limit of tokens in waiting inputs; 0: no limit
    random_seed: int | None  # None: different seeds in every run
    log_text: bool


class Generator:
    """Runs calls. One per process, made once the engine is ready."""

    def __init__(
        self,
        server_info: ServerInfo,
        client: EngineClient,
        decoder: TokenDecoder,
        lookups: Lookups,
        metrics: Metrics,
        admission: Admission,
        tracer: Tracer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.server_info = server_info
        self._recorder = recorder or Recorder(server_info.engine)
        self.admission = admission
        self._tracer = tracer
        self._client = client
        self._decoders = {  # decoders by `skip_special_tokens`
            None: decoder,
            True: decoder.variant(output_special_tokens=False),
            False: decoder.variant(output_special_tokens=True),
        }
        self.token_decoder = decoder.variant(output_special_tokens=True, hide_eos=False)  # shows every token
        self._tokenizer = decoder.tokenizer
        self.is_special = decoder.tokenizer.is_special
        self._lookups = lookups
        self.metrics = metrics
        self.pool = decoder.tokenizer.pool  # runs all work that would hold up the event loop
        self._seeds = random.Random(server_info.random_seed)

    def special_token_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The ids of the texts that are special tokens, as far as the model can generate them."""
        ids, vocab_size = map(self._tokenizer.special_token_id, texts), self.server_info.limits.vocab_size
        return tuple(token_id for token_id in ids if token_id is not None and token_id < vocab_size)

    async def generate(self, call: GenerateCall) -> list[RequestOutput]:
        """Run a unary call: the outputs of each input, in order; the first that fails fails the call."""
        if not call.texts:
            self.metrics.request_started(call.kind, 0)
            return []
        async with self._running(call) as (outputs, ready, recorder):
            num_open = len(outputs)
            while num_open:
                output = outputs[await ready.get()]
                # Before the end, tokens may come while a thread takes them; until then there are few, if any.
                received = output.engine_output
                await self.pool.run(len(received.new_tokens) if received.ended else 0, output.collect)
                if output.stop_reason:
                    self._client.cancel(received)
                    recorder.finish(output)
                    num_open -= 1
            return [self._with_record(call, output, output.final()) for output in outputs]

    async def stream(self, call: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        """Run a stream: what is known before the prefill, the input tokens if wanted, then what each step adds.

        Of several outputs, whichever has something new comes next; `RequestOutput.index` tells them apart.
        """
        async with self._running(call) as (outputs, ready, _):
            for output in outputs:
                yield output.first_chunk()
            num_open = len(outputs)
            while num_open:
                output = outputs[await ready.get()]
                if not output.stop_reason:  # else the engine goes on behind a stop sequence
                    for chunk in output.chunks():
                        yield self._with_record(call, output, chunk)
                    num_open -= bool(output.stop_reason)

    def _with_record(self, call: GenerateCall, output: Output, message: RequestOutput) -> RequestOutput:
        if call.params.record and message.stop_reason:
            message.record = self._recorder.record(call, output)
        return message

    @property
    def num_queued_tokens(self) -> int:
        """Input tokens of the requests that have never been scheduled."""
        return sum(len(request.tokens) for request in self._client.queued())

    async def batch_state(self) -> BatchState:
        """What runs and waits; Unavailable after the death of the engine, or if it hangs."""
        return await self._client.batch_state()

    def flush_cache(self) -> None:
        """Let no later request find a prefix that is cached now; Unavailable after the death of the engine."""
        self._client.flush_cache()

    def close(self) -> None:
        """Send the spans that are left."""
        if self._tracer:
            self._tracer.close()

    async def tokenize(self, call: TokenizeCall) -> list[Encoding]:
        """Tokenize texts, special tokens included; there are no ids unless tokens or offsets are wanted.

        An adapter must exist, but changes nothing. Takes no places.
        """
        started = time.monotonic()
        self.metrics.tokenize.count.inc()
        self.metrics.tokenize.input_count.inc(len(call.texts))
        _check_num_inputs(len(call.texts), MAX_TOKENIZE_INPUTS)
        if call.adapter:
            with ExitStack() as resources:
                await self._lookups.adapter(call.adapter, resources)
        limit = call.truncate_input_tokens or sys.maxsize
        keep_last = limit if call.return_tokens or call.return_offsets else 0
        options = EncodeOptions(call.return_offsets, keep_last, call.add_special_tokens, call.max_tokens)
        whole = await self._tokenizer.encode(call.texts, options)
        encodings = [replace(encoding, num_tokens=min(encoding.num_tokens, limit)) for encoding in whole]
        self.metrics.tokenize.tokens.observe(sum(encoding.num_tokens for encoding in encodings))
        self.metrics.tokenize.duration.observe(time.monotonic() - started)
        return encodings

    @asynccontextmanager
    async def _running(self, call: GenerateCall) -> AsyncIterator[tuple[list[Output], ReadyOutputs, CallRecorder]]:
        """The outputs of a call that has passed its checks; those that have not ended after the block are cancelled."""
        recorder = CallRecorder(call, self.metrics, self._tracer, log_text=self.server_info.log_text)
        with recorder, ExitStack() as resources:
            inputs = self.admission.inputs
            _check_num_inputs(call.num_outputs, inputs.most(call.client))
            resources.enter_context(inputs.hold(call.client, call.num_outputs))
            if len(call.texts) < len(call.fields):
                raise InvalidRequest("request", "missing request")
            params = call.params
            validate(params, self.server_info.limits)
            ready = ReadyOutputs(eager=call.kind is CallKind.STREAM or bool(params.stop_sequences))
            adapter = await self._lookups.adapter(call.adapter, resources) if call.adapter else None
            grammar = await self._lookups.grammar(params.grammar, resources) if params.grammar else None
            requests = await self._prepare(call, params, adapter, grammar, arrived=recorder.started)
            outputs = self._outputs(call, params, requests, ready, recorder.started)
            resources.callback(self._recorder.write, call, outputs)
            with self._client.submit([output.engine_output for output in outputs]):
                recorder.submitted(outputs)
                yield outputs, ready, recorder

    def _outputs(
        self, call: GenerateCall, params: Params, requests: list[Request], ready: ReadyOutputs, arrived: float
    ) -> list[Output]:
        decoder, texts = self._decoders[params.skip_special_tokens], call.texts
        keeps_all = params.record or self._recorder.file is not None
        separator = "\n\n" if self.server_info.engine.encoder_decoder else ""
        return [
            Output(
                EngineOutput(request, n, ready, arrived),
                texts[n // call.n],
                params,
                decoder,
                separator,
                keeps_all=keeps_all,
            )
            for n, request in enumerate(requests)
        ]

    async def _prepare(
        self, call: GenerateCall, params: Params, adapter: AdapterRef | None, grammar: int | None, *, arrived: float
    ) -> list[Request]:
        """Tokenize, check the lengths, and make the engine's requests."""
        limits, limit = self.server_info.limits, params.truncate_input_tokens
        bad_words = await self._tokenize_words(params.bad_words) if params.bad_words else ()
        prediction = await self._predicted_tokens(params.prediction)
        encodings = await self._encode(call, params)
        for encoding in encodings * call.n:
            self.metrics.requests.raw_length.observe(encoding.num_tokens)
        requests = [
            make_request(
                self._tokenizer.truncate(encoding.ids, limit),
                adapter,
                params,
                limits,
                field,
                length=min(encoding.num_tokens, limit or encoding.num_tokens),
                id=self._client.next_id(),
                sampling_params=params.sampling_params(self._seeds.getrandbits(32), number, bad_words),
                deadline=arrived + params.time_limit_millis / 1000 if params.time_limit_millis else None,
                identity=call.identity,
                answer_deadline=call.answer_deadline,
                grammar=grammar,
                client=call.client,
                prediction=prediction,
            )
            for field, encoding in zip(call.fields, encodings, strict=True)
            for number in range(call.n)
        ]
        if max_queued := self.server_info.max_queued_tokens:
            num_tokens = sum(len(request.tokens) for request in requests)
            queued = self.num_queued_tokens
            if queued and queued + num_tokens > max_queued:  # all inputs or none
                raise QueueFull(f"{queued} input tokens are waiting, at most {max_queued} may")
        return requests  # nobody else can queue until the caller has

    async def _tokenize_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of words at the beginning of a text and behind a space; none that cannot be generated."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        found = {tuple(one.ids) for one in await self._tokenizer.encode(texts, EncodeOptions(special_tokens=False))}
        vocab_size = self.server_info.limits.vocab_size
        return tuple(ids for ids in found if ids and max(ids) < vocab_size)

    async def _predicted_tokens(self, prediction: str | Sequence[int]) -> list[int]:
        """The tokens of a prediction; InvalidRequest if it has more than any output."""
        most, tokens = self.server_info.limits.max_new_tokens, prediction
        if isinstance(tokens, str):
            options = EncodeOptions(keep_last=most + 1, special_tokens=False)
            tokens = (await self._tokenizer.encode([tokens], options))[0].ids if tokens else ()
        if len(tokens) > most:
            raise InvalidRequest("prediction", f"prediction must have at most {most} tokens")
        return list(tokens)

    async def _encode(self, call: GenerateCall, params: Params) -> list[Encoding]:
        """All that may fit of each input, or the last tokens; of texts one more, to know whether any are cut off."""
        limits, max_length = self.server_info.limits, self.server_info.limits.max_sequence_length
        keep_last = min(params.truncate_input_tokens or max_length, max_length)
        if call.token_ids is not None:  # used as they are: `truncate`, which puts BOS back, has nothing left to cut off
            return [Encoding.of_ids(ids, keep_last) for ids in call.token_ids]
        if not params.truncate_input_tokens:
            check_num_bytes(call.texts, call.fields, limits, self._tokenizer.max_bytes_per_token)
        options = EncodeOptions(keep_last=keep_last + 1, special_tokens=params.add_special_tokens)
        return await self._tokenizer.encode(call.texts, options)


def loaded(generator: asyncio.Future[Generator]) -> Generator:
    """The generator of a server; Unavailable while its model loads."""
    if not generator.done():
        raise Unavailable(LOADING)
    return generator.result()


def _check_num_inputs(num_inputs: int, limit: int) -> None:
    """Unlike too many of several calls, too many of one will never be accepted."""
    if num_inputs > limit:
        raise InvalidRequest("requests", f"requests has {num_inputs} inputs, at most {limit} allowed")
