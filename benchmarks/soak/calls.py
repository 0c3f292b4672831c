"""The calls of a soak: everything that a client may do, at random, with checks of the answers."""

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from benchmarks.soak.cases import Answer, Case, assemble_answer, difference
from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.requests import Request, ServerLimits, batch_request, invalid_requests, stream_request
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

CALL_TIMEOUT_SECONDS = 120.0  # no call takes this long unless it is stuck
_MAX_PATIENCE_SECONDS = 3.0  # of clients' deadlines and of time limits
UnaryCall: TypeAlias = "grpc.aio.UnaryUnaryCall[Any, pb.BatchedGenerationResponse]"
StreamCall: TypeAlias = "grpc.aio.UnaryStreamCall[Any, pb.GenerationResponse]"
_METHOD = "/fmaas.GenerationService/Generate"


class SoakClient:
    """Makes one random call after the other, and records them in the log."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        cases: Sequence[Case],
        bounds: ServerLimits,
        log: ClientLog,
        draw: random.Random,
    ) -> None:
        self.log = log
        self._stub = GenerationServiceStub(channel)
        self._raw = channel.unary_unary(_METHOD, bytes, bytes)
        self._cases = cases
        self._singles = [case for case in cases if len(case.texts) == 1]
        self._invalid = invalid_requests(bounds)
        self._draw = draw
        self._actions: list[Callable[[], Awaitable[None]]] = [
            *[self._complete_unary] * 30,
            *[self._complete_stream] * 25,
            *[self._with_time_limit] * 12,
            *[self._with_sampling] * 5,
            *[self._with_deadline] * 5,
            *[self._cancel_unary] * 5,
            *[self._cancel_stream] * 10,
            *[self._invalid_request] * 7,
            self._malformed_bytes,
        ]

    async def call(self, _due: float) -> bool:
        """Make one random call; failures are recorded in the log, not raised."""
        await self._draw.choice(self._actions)()
        return True

    async def _complete_unary(self) -> None:
        case = self._draw.choice(self._cases)
        await self._unary(case, case.params)

    async def _complete_stream(self) -> None:
        case = self._draw.choice(self._singles)
        await self._stream(case, case.params)

    async def _with_time_limit(self) -> None:
        """A call with a time limit, whose answer may be truncated."""
        case = self._draw.choice(self._cases)
        params = pb.Parameters()
        params.CopyFrom(case.params)
        params.stopping.time_limit_millis = 1 + int(1000 * self._random_patience())
        streamed = len(case.texts) == 1 and self._draw.random() < 0.5
        await (self._stream(case, params) if streamed else self._unary(case, params))

    async def _with_sampling(self) -> None:
        """A call that samples, whose text cannot be compared."""
        params = pb.Parameters(method=pb.SAMPLE, stopping=pb.StoppingCriteria(max_new_tokens=5))
        params.sampling.temperature, params.sampling.top_k = 1.5, 50
        params.response.generated_tokens = True
        await self._unary(Case(self._draw.choice(self._cases).texts, params, []), params)

    async def _with_deadline(self) -> None:
        """A call with a short deadline."""
        case = self._draw.choice(self._cases)
        await self._unary(case, case.params, patience=self._random_patience())

    async def _cancel_unary(self) -> None:
        """A unary call that is cancelled before its answer."""
        case = self._draw.choice(self._cases)
        call = self._stub.Generate(batch_request(case.texts, case.params), timeout=CALL_TIMEOUT_SECONDS)
        await asyncio.sleep(self._random_patience())
        call.cancel()
        await self._finish_unary(case, call, left=True)

    async def _cancel_stream(self) -> None:
        """A stream that is cancelled in the middle."""
        case = self._draw.choice(self._singles)
        await self._stream(case, case.params, max_messages=self._draw.randint(1, 20))

    async def _invalid_request(self) -> None:
        status, request = self._draw.choice(self._invalid)
        if isinstance(request, pb.SingleGenerationRequest):
            call, kind, inputs = self._stub.GenerateStream(request, timeout=CALL_TIMEOUT_SECONDS), "stream", 1
            await read_messages(call)
        else:
            call, inputs = self._stub.Generate(request, timeout=CALL_TIMEOUT_SECONDS), len(request.requests)
            kind = _call_kind(inputs)
        code = await call.code()
        self.log.record_refused(code.name, kind, inputs)
        if code is not status:
            self._problem(request, f"{code.name} instead of {status.name}")

    async def _malformed_bytes(self) -> None:
        self.log.malformed += 1
        code = await self._raw(b"\xff" * 9, timeout=CALL_TIMEOUT_SECONDS).code()
        if code is not grpc.StatusCode.INVALID_ARGUMENT:
            self.log.add_problem(f"{code.name} to bytes that are no message")

    async def _unary(self, case: Case, params: pb.Parameters, patience: float = CALL_TIMEOUT_SECONDS) -> None:
        call = self._stub.Generate(batch_request(case.texts, params), timeout=patience)
        await self._finish_unary(case, call, left=patience < CALL_TIMEOUT_SECONDS)

    async def _finish_unary(self, case: Case, call: UnaryCall, *, left: bool) -> None:
        code, inputs = await call.code(), len(case.texts)
        kind = _call_kind(inputs)
        if code is grpc.StatusCode.OK:
            self.log.record_call(kind, inputs)
            responses = (await call).responses
            if len(responses) != inputs:
                self.log.add_problem(f"{len(responses)} responses to {inputs} inputs")
            for number, response in enumerate(responses):
                self._check(case, number, kind, [response])
        elif left and code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
            self.log.record_uncertain(kind, inputs)
        else:
            self.log.record_refused(code.name, kind, inputs)
            self._problem(batch_request(case.texts, case.params), f"{code.name}: {await call.details()}")

    async def _stream(self, case: Case, params: pb.Parameters, max_messages: float = math.inf) -> None:
        call = self._stub.GenerateStream(stream_request(case.texts[0], params), timeout=CALL_TIMEOUT_SECONDS)
        messages = await read_messages(call, max_messages)
        code = await call.code()
        if code is not grpc.StatusCode.OK and len(messages) < max_messages:
            self.log.record_refused(code.name, "stream", 1)
            self._problem(stream_request(case.texts[0], params), f"{code.name}: {await call.details()}")
        else:
            self.log.record_call("stream", 1)
            self._check(case, 0, "stream", messages, whole=len(messages) < max_messages)

    def _check(
        self, case: Case, number: int, kind: str, responses: list[pb.GenerationResponse], *, whole: bool = True
    ) -> None:
        """Record the end of an input, and compare its answer with that of the idle server."""
        try:
            got = assemble_answer(responses)
        except ValueError as error:
            self.log.add_problem(f"{kind}: {error}")
            return
        if got.reason:
            self.log.record_end(kind, pb.StopReason.Name(got.reason), len(got.tokens))
        else:
            self.log.abandoned[kind] += 1
        wrong = "no end" if whole and not got.reason else self._difference(case, number, got)
        if wrong:
            self._problem(batch_request(case.texts[number : number + 1], case.params), f"{kind}: {wrong}")

    def _difference(self, case: Case, number: int, got: Answer) -> str:
        if not case.answers:
            return ""
        self.log.compared += 1
        return difference(case.answers[number], got)

    def _problem(self, request: Request, text: str) -> None:
        self.log.add_problem(f"{text}; the request: {str(request)[:300]}")

    def _random_patience(self) -> float:
        """A random number of seconds, about as long as a call takes."""
        return self._draw.random() * _MAX_PATIENCE_SECONDS


async def read_messages(call: StreamCall, max_messages: float = math.inf) -> list[pb.GenerationResponse]:
    """The messages of a stream until it ends or fails; cancel it after `max_messages`."""
    messages: list[pb.GenerationResponse] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in call:
            messages.append(message)
            if len(messages) >= max_messages:
                call.cancel()
                break
    return messages


def _call_kind(inputs: int) -> str:
    return "single" if inputs == 1 else "batch"
