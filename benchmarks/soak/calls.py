"""The calls of a soak: what a client may do, at random, and whether the answers are right."""

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc.aio

from benchmarks.soak.cases import Answer, Case, answer_of, difference
from benchmarks.soak.ledger import Ledger
from benchmarks.soak.requests import Bounds, Request, bad_calls, batched, single
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

STUCK_SECONDS = 120.0  # no honest call takes so long
_LONGEST_PATIENCE = 3.0  # seconds, of clients and of time limits
UnaryCall: TypeAlias = "grpc.aio.UnaryUnaryCall[Any, pb.BatchedGenerationResponse]"
StreamCall: TypeAlias = "grpc.aio.UnaryStreamCall[Any, pb.GenerationResponse]"
_METHOD = "/fmaas.GenerationService/Generate"


class Caller:
    """Makes one call after the other, each of a random sort, and keeps the ledger."""

    def __init__(
        self, channel: grpc.aio.Channel, cases: Sequence[Case], bounds: Bounds, ledger: Ledger, draw: random.Random
    ) -> None:
        self.ledger = ledger
        self._stub = GenerationServiceStub(channel)
        self._raw = channel.unary_unary(_METHOD, bytes, bytes)
        self._cases = cases
        self._singles = [case for case in cases if len(case.texts) == 1]
        self._bad = bad_calls(bounds)
        self._draw = draw
        self._sorts: list[Callable[[], Awaitable[None]]] = [
            *[self._whole] * 30,
            *[self._streamed] * 25,
            *[self._limited] * 12,
            *[self._sampled] * 5,
            *[self._impatient] * 5,
            *[self._cancelled] * 5,
            *[self._heard_enough] * 10,
            *[self._refused] * 7,
            self._undecodable,
        ]

    async def call(self, _due: float) -> bool:
        """Make one call, to its end; always a success for the load loop."""
        await self._draw.choice(self._sorts)()
        return True

    async def _whole(self) -> None:
        case = self._draw.choice(self._cases)
        await self._unary(case, case.params)

    async def _streamed(self) -> None:
        case = self._draw.choice(self._singles)
        await self._stream(case, case.params)

    async def _limited(self) -> None:
        """The server is to end in time: the answer may be cut."""
        case = self._draw.choice(self._cases)
        params = pb.Parameters()
        params.CopyFrom(case.params)
        params.stopping.time_limit_millis = 1 + int(1000 * self._patience())
        streamed = len(case.texts) == 1 and self._draw.random() < 0.5
        await (self._stream(case, params) if streamed else self._unary(case, params))

    async def _sampled(self) -> None:
        """Chosen by chance: the text cannot be compared."""
        params = pb.Parameters(method=pb.SAMPLE, stopping=pb.StoppingCriteria(max_new_tokens=5))
        params.sampling.temperature, params.sampling.top_k = 1.5, 50
        params.response.generated_tokens = True
        await self._unary(Case(self._draw.choice(self._cases).texts, params, []), params)

    async def _impatient(self) -> None:
        """A client with a deadline of its own."""
        case = self._draw.choice(self._cases)
        await self._unary(case, case.params, patience=self._patience())

    async def _cancelled(self) -> None:
        """A client that cancels before the answer."""
        case = self._draw.choice(self._cases)
        call = self._stub.Generate(batched(case.texts, case.params), timeout=STUCK_SECONDS)
        await asyncio.sleep(self._patience())
        call.cancel()
        await self._close(case, call, left=True)

    async def _heard_enough(self) -> None:
        """A client that leaves in the middle of a stream."""
        case = self._draw.choice(self._singles)
        await self._stream(case, case.params, enough=self._draw.randint(1, 20))

    async def _refused(self) -> None:
        status, request = self._draw.choice(self._bad)
        if isinstance(request, pb.SingleGenerationRequest):
            call, kind, inputs = self._stub.GenerateStream(request, timeout=STUCK_SECONDS), "stream", 1
            await _messages(call)
        else:
            call, inputs = self._stub.Generate(request, timeout=STUCK_SECONDS), len(request.requests)
            kind = _kind(inputs)
        code = await call.code()
        self.ledger.note_refused(code.name, kind, inputs)
        if code is not status:
            self._problem(request, f"{code.name} instead of {status.name}")

    async def _undecodable(self) -> None:
        self.ledger.undecodable += 1
        code = await self._raw(b"\xff" * 9, timeout=STUCK_SECONDS).code()
        if code is not grpc.StatusCode.INVALID_ARGUMENT:
            self.ledger.problem(f"{code.name} to bytes that are no message")

    async def _unary(self, case: Case, params: pb.Parameters, patience: float = STUCK_SECONDS) -> None:
        call = self._stub.Generate(batched(case.texts, params), timeout=patience)
        await self._close(case, call, left=patience < STUCK_SECONDS)

    async def _close(self, case: Case, call: UnaryCall, *, left: bool) -> None:
        code, inputs = await call.code(), len(case.texts)
        kind = _kind(inputs)
        if code is grpc.StatusCode.OK:
            self.ledger.note_call(kind, inputs)
            responses = (await call).responses
            if len(responses) != inputs:
                self.ledger.problem(f"{len(responses)} responses to {inputs} inputs")
            for number, response in enumerate(responses):
                self._check(case, number, kind, [response])
        elif left and code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
            self.ledger.note_unsure(kind, inputs)
        else:
            self.ledger.note_refused(code.name, kind, inputs)
            self._problem(batched(case.texts, case.params), f"{code.name}: {await call.details()}")

    async def _stream(self, case: Case, params: pb.Parameters, enough: float = math.inf) -> None:
        call = self._stub.GenerateStream(single(case.texts[0], params), timeout=STUCK_SECONDS)
        messages = await _messages(call, enough)
        code = await call.code()
        if code is not grpc.StatusCode.OK and len(messages) < enough:
            self.ledger.note_refused(code.name, "stream", 1)
            self._problem(single(case.texts[0], params), f"{code.name}: {await call.details()}")
        else:
            self.ledger.note_call("stream", 1)
            self._check(case, 0, "stream", messages, whole=len(messages) < enough)

    def _check(
        self, case: Case, number: int, kind: str, responses: list[pb.GenerationResponse], *, whole: bool = True
    ) -> None:
        """Note the end of an input; compare its answer with that of an idle server."""
        try:
            got = answer_of(responses)
        except ValueError as error:
            self.ledger.problem(f"{kind}: {error}")
            return
        if got.reason:
            self.ledger.note_end(kind, pb.StopReason.Name(got.reason), len(got.tokens))
        else:
            self.ledger.left[kind] += 1
        wrong = "no end" if whole and not got.reason else self._difference(case, number, got)
        if wrong:
            self._problem(batched(case.texts[number : number + 1], case.params), f"{kind}: {wrong}")

    def _difference(self, case: Case, number: int, got: Answer) -> str:
        if not case.answers:
            return ""
        self.ledger.compared += 1
        return difference(case.answers[number], got)

    def _problem(self, request: Request, text: str) -> None:
        self.ledger.problem(f"{text}; the request: {str(request)[:300]}")

    def _patience(self) -> float:
        """Seconds: about as long as a call takes."""
        return self._draw.random() * _LONGEST_PATIENCE


async def _messages(call: StreamCall, enough: float = math.inf) -> list[pb.GenerationResponse]:
    """The messages of a stream until its end, whatever that is; cancelled after so many."""
    messages: list[pb.GenerationResponse] = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for message in call:
            messages.append(message)
            if len(messages) >= enough:
                call.cancel()
                break
    return messages


def _kind(inputs: int) -> str:
    return "single" if inputs == 1 else "batch"
