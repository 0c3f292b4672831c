"""The honest clients: those of the soak, some that use the adapter, and some that connect anew for each call."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import grpc.aio

from benchmarks.chaos.attacks import channel
from benchmarks.chaos.fault_log import FaultLog, Notice
from benchmarks.chaos.files import ADAPTER, AdapterFiles, CredentialFiles
from benchmarks.chaos.http2 import Target
from benchmarks.chaos.http_clients import ApiAnswer, ask
from benchmarks.soak.calls import CALL_TIMEOUT_SECONDS, SoakClient, read_messages
from benchmarks.soak.cases import Answer, Case, assemble_answer, difference, make_cases
from benchmarks.soak.client_log import ClientLog
from benchmarks.soak.idle import server_limits
from benchmarks.soak.requests import ServerLimits, stream_request
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

_NUM_CASES = 8  # without the adapter, and as many with it
_WITH_ADAPTER, _CONNECTING, _HTTP = 2, 1, 3  # calls in flight that use the adapter, that open a connection, over HTTP
_CLEAN_STATUSES = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED")  # of calls whose process ended


class _Bearer(grpc.AuthMetadataPlugin):
    """Call credentials that send the current token."""

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files

    def __call__(self, _context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        callback((("authorization", f"Bearer {self._files.token}"),), None)


@dataclass(slots=True)
class HonestClients:
    """All honest clients; `log` has the calls since it was last replaced."""

    target: Target
    credentials: CredentialFiles
    adapters: AdapterFiles
    faults: FaultLog
    draw: random.Random
    log: ClientLog = field(default_factory=ClientLog)
    made: grpc.aio.Channel = field(init=False)  # the connection that most calls share
    bounds: ServerLimits = field(init=False)
    _cases: list[Case] = field(init=False)
    _adapter_cases: list[dict[str, Case]] = field(init=False)  # by version

    async def prepare(self, max_inputs: int) -> None:
        """Connect, and collect expected answers from the idle server."""
        self.made = self.connect()
        self.bounds = await server_limits(self.stub, max_inputs)
        self._cases = await make_cases(self.stub, self.bounds, _NUM_CASES, self.draw)
        found = await make_cases(self.stub, self.bounds, _NUM_CASES, self.draw, ADAPTER)
        singles = [case for case in found if len(case.texts) == 1]
        self.adapters.use("b")
        others = [await self._answer_again(case) for case in singles]
        self.adapters.use("a")
        self._adapter_cases = [
            {"a": case, "b": other}
            for case, other in zip(singles, others, strict=True)
            if other.answers != case.answers
        ]
        assert self._adapter_cases, "the versions of the adapter do not differ"

    @property
    def stub(self) -> GenerationServiceStub:
        return GenerationServiceStub(self.made)

    def connect(self) -> grpc.aio.Channel:
        """Open a new connection."""
        assert self.target.ca is not None
        tls = grpc.ssl_channel_credentials(self.target.ca.read_bytes())
        bearer = grpc.metadata_call_credentials(_Bearer(self.credentials))
        return channel(self.target, grpc.composite_channel_credentials(tls, bearer))

    async def run(self, seconds: float, in_flight: int) -> None:
        """Make calls for `seconds`, and wait until they end."""
        soak = SoakClient(self.made, self._cases, self.bounds, self.log, self.draw, self._excuse)
        until = time.monotonic() + seconds
        calls: list[Callable[[], Awaitable[object]]] = [self._with_adapter] * _WITH_ADAPTER
        calls += [self._connecting] * _CONNECTING
        calls += [self._over_http] * _HTTP
        calls += [lambda: soak.call(0.0)] * (in_flight - len(calls))
        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(_repeat(call, until))

    async def _answer_again(self, case: Case) -> Case:
        stream = self.stub.GenerateStream(stream_request(case.texts[0], case.params, ADAPTER))
        return replace(case, answers=[assemble_answer(await read_messages(stream))])

    async def _with_adapter(self) -> None:
        """A call that names the adapter; the answer must match a version that was in place during the call."""
        started, cases = time.monotonic(), self.draw.choice(self._adapter_cases)
        case = cases["a"]
        stream = self.stub.GenerateStream(
            stream_request(case.texts[0], case.params, ADAPTER), timeout=CALL_TIMEOUT_SECONDS
        )
        messages = await read_messages(stream)
        if (code := await stream.code()) is grpc.StatusCode.OK:
            expected = [cases[version].answers[0] for version in self.adapters.versions_since(started) & {"a", "b"}]
            self._record_stream(messages, expected)
            return
        self.log.record_refused(code.name, "stream", 1)
        excused = code is grpc.StatusCode.INVALID_ARGUMENT and self.faults.noticeable(Notice.ADAPTERS, started)
        if not (excused or self._excuse(code.name, started)):
            self.log.add_problem(f"a call with an adapter: {code.name}: {await stream.details()}")

    async def _connecting(self) -> None:
        """A call on a new connection."""
        started, case = time.monotonic(), self.draw.choice(self._cases)
        async with self.connect() as made:
            stream = GenerationServiceStub(made).GenerateStream(
                stream_request(case.texts[0], case.params), timeout=CALL_TIMEOUT_SECONDS
            )
            messages = await read_messages(stream)
            if (code := await stream.code()) is grpc.StatusCode.OK:
                self._record_stream(messages, case.answers[:1])
            elif code is not grpc.StatusCode.UNAVAILABLE or not self.faults.noticeable(Notice.CONNECTIONS, started):
                self.log.record_refused(code.name, "stream", 1)
                if not self._excuse(code.name, started):
                    self.log.add_problem(f"a call on a new connection: {code.name}: {await stream.details()}")

    async def _over_http(self) -> None:
        """A call to TGI's or OpenAI's API, on a new connection."""
        started, case = time.monotonic(), self.draw.choice([case for case in self._cases if len(case.texts) == 1])
        expected, stream = case.answers[0], self.draw.random() < 0.5
        kind, openai = "stream" if stream else "single", self.draw.random() < 0.5
        got = await ask(self.target, self.credentials.token, case, stream=stream, openai=openai)
        if isinstance(got, ApiAnswer):
            self.log.record_call(kind, 1)
            self.log.record_end(kind, pb.StopReason.Name(expected.reason), got.num_tokens)
            self.log.compared += 1
            if got != ApiAnswer(expected.text, len(expected.tokens), expected.reason == pb.MAX_TOKENS):
                self.log.add_problem(f"{kind} over HTTP: {got} instead of {expected}")
            return
        status, reason = got
        if status:
            self.log.record_refused(status, kind, 1)
        else:
            self.log.record_uncertain(kind, 1)
        broken = not status and self.faults.noticeable(Notice.CONNECTIONS, started)
        if not broken and not self._excuse(status or "UNAVAILABLE", started):
            self.log.add_problem(f"{kind} over HTTP: {reason}")

    def _record_stream(self, messages: Sequence[pb.GenerationResponse], expected: Sequence[Answer]) -> None:
        got = assemble_answer(messages)
        self.log.record_call("stream", 1)
        self.log.record_end("stream", pb.StopReason.Name(got.reason), len(got.tokens))
        self.log.compared += 1
        wrong = [difference(answer, got) for answer in expected]
        if all(wrong):
            self.log.add_problem(f"stream: {wrong[0]}")

    def _excuse(self, status: str, since: float) -> bool:
        return status in _CLEAN_STATUSES and self.faults.noticeable(Notice.CALLS, since)


async def _repeat(call: Callable[[], Awaitable[object]], until: float) -> None:
    while time.monotonic() < until:
        await call()
        await asyncio.sleep(0.05)  # a server that is down refuses at once
