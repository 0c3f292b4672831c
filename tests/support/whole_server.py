"""A real server, and a random client that does everything to it that clients and operators do, as a state machine."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from harness import Server, as_stream_request, running_server, unary_request
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from benchmarks.chaos.files import ADAPTER, AdapterFiles, CredentialFiles
from benchmarks.chaos.usage import Usage
from benchmarks.soak.cases import assemble_answer
from benchmarks.soak.reconcile import MetricValues, nonzero_gauges, parse_metrics
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

MAX_CONCURRENT_REQUESTS = 16
MAX_INPUTS = 3
MAX_OPEN = MAX_CONCURRENT_REQUESTS // MAX_INPUTS
TEXTS = ("the engine says what its prompt said", "over and over", "again")
LENGTHS = (1, 7, 40, 80)
SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))
PATIENCE_SECONDS = 60.0

Expected = Callable[[str, int, str], str]  # text, new tokens and version of the adapter ("" without) -> the answer


@dataclass
class Arena:
    """The server, which is started again after a drain, and its files."""

    directory: Path
    model: Path
    options: dict[str, Any]
    adapters: AdapterFiles | None
    expected: Expected
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    server: Server | None = None

    def __post_init__(self) -> None:
        self.credentials = CredentialFiles(self.directory)

    def start(self) -> Server:
        if self.server is None:
            files = self.credentials
            options: dict[str, Any] = {
                "TLS_CERT_PATH": files.cert,
                "TLS_KEY_PATH": files.key,
                "AUTH_TOKEN_PATH": files.tokens,
            }
            options |= {"MAX_CONCURRENT_REQUESTS": MAX_CONCURRENT_REQUESTS} | self.options
            running = running_server(self.directory, self.model, **options)
            self.server = self.stack.enter_context(running)
        return self.server

    def ended(self) -> None:
        self.server = None
        self.stack.close()

    def connect(self, *options: tuple[str, int]) -> grpc.Channel:
        """A connection of its own, with the token that is in use now."""
        assert self.server is not None
        tls = grpc.ssl_channel_credentials(self.credentials.ca.read_bytes())
        bearer = grpc.access_token_call_credentials(self.credentials.token)
        own = [*options, ("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(self.server.target, grpc.composite_channel_credentials(tls, bearer), own)


@dataclass
class OpenCall:
    """A call that has neither been read to its end nor cancelled."""

    call: Any
    texts: tuple[str, ...]
    tokens: int
    versions: set[str]  # of the adapter since it began; "" without
    messages: list[pb.GenerationResponse] = field(default_factory=list)
    streamed: bool = True


class WholeServer(RuleBasedStateMachine):
    """Every call ends once, with the answer of an idle server; then the server has everything back."""

    open_calls = Bundle("open_calls")

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.paused: dict[str, int] = {}  # processes that are stopped
        self.calls: list[OpenCall] = []
        self.channels: list[grpc.Channel] = []
        self.drained = False

    @initialize()
    def connect(self) -> None:
        self.server = self.arena.start()
        self.channels = [self.arena.connect(), self.arena.connect(*SMALL_WINDOW)]
        self.before, self.usage = self.scrape(), self.current_usage()

    @precondition(lambda self: len(self.calls) < MAX_OPEN and not self.drained)
    @rule(
        target=open_calls,
        texts=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=MAX_INPUTS),
        tokens=st.sampled_from(LENGTHS),
        adapter=st.booleans(),
    )
    def submit(self, texts: list[str], tokens: int, adapter: bool) -> OpenCall:
        request = self._request(texts, tokens, adapter)
        call = self._stub(0).Generate.future(request, timeout=PATIENCE_SECONDS)
        return self._opened(OpenCall(call, tuple(texts), tokens, self._versions(request), streamed=False))

    @precondition(lambda self: len(self.calls) < MAX_OPEN and not self.drained)
    @rule(
        target=open_calls,
        text=st.sampled_from(TEXTS),
        tokens=st.sampled_from(LENGTHS),
        adapter=st.booleans(),
        window=st.integers(0, 1),
    )
    def stream(self, text: str, tokens: int, adapter: bool, window: int) -> OpenCall:
        request = self._request([text], tokens, adapter)
        call = self._stub(window).GenerateStream(as_stream_request(request), timeout=PATIENCE_SECONDS)
        return self._opened(OpenCall(call, (text,), tokens, self._versions(request)))

    @precondition(lambda self: not self.paused)
    @rule(opened=open_calls, count=st.integers(1, 5))
    def read_some(self, opened: OpenCall, count: int) -> None:
        """And then no more, until somebody does."""
        if opened.streamed and opened in self.calls:
            for _, message in zip(range(count), opened.call, strict=False):
                opened.messages.append(message)

    @precondition(lambda self: not self.paused)
    @rule(opened=consumes(open_calls))
    def finish(self, opened: OpenCall) -> None:
        if opened in self.calls:
            self._check_answer(opened)

    @rule(opened=consumes(open_calls))
    def cancel(self, opened: OpenCall) -> None:
        if opened in self.calls:
            self.calls.remove(opened)
            opened.call.cancel()

    @precondition(lambda self: not self.drained)
    @rule(name=st.sampled_from(("front end", "engine")))
    def pause(self, name: str) -> None:
        self.paused[name] = self.server.process.pid if name == "front end" else self.server.engine_pid()
        os.kill(self.paused[name], signal.SIGSTOP)

    @rule()
    def resume(self) -> None:
        for pid in self.paused.values():
            os.kill(pid, signal.SIGCONT)
        self.paused.clear()

    @precondition(lambda self: self.arena.adapters is not None)
    @rule(version=st.sampled_from("ab"))
    def swap_adapter(self, version: str) -> None:
        assert self.arena.adapters is not None
        self.arena.adapters.use(version)
        for opened in self.calls:
            if opened.versions != {""}:
                opened.versions.add(version)

    @rule()
    def rotate_certificate(self) -> None:
        """Connections go on; later ones get the new certificate or, for a second, the old one."""
        self.arena.credentials.issue()

    @precondition(lambda self: not self.paused and not self.drained)
    @rule()
    def connect_again(self) -> None:
        with self.arena.connect() as channel:
            info = GenerationServiceStub(channel).ModelInfo(pb.ModelInfoRequest(), timeout=PATIENCE_SECONDS)
            assert info.max_sequence_length > 0

    @precondition(lambda self: not self.paused and not self.drained)
    @rule()
    def count(self) -> None:
        """Inputs never end more often than they have begun."""
        now = self.scrape()
        assert self._ends(now) <= self._grown(now, "tgi_request_input_count_total")

    @precondition(lambda self: not self.paused and not self.drained)
    @rule()
    def drain(self) -> None:
        self.drained = True
        self.server.process.send_signal(signal.SIGTERM)

    @invariant()
    def is_healthy(self) -> None:
        if not self.paused and not self.drained and hasattr(self, "server"):
            assert self.server.get("/health", timeout=PATIENCE_SECONDS)[0] == 200

    def teardown(self) -> None:
        self.resume()
        try:
            for opened in list(self.calls):
                self._check_answer(opened)
            if self.channels:  # else it has not started
                (self._check_end if self.drained else self._check_resources)()
        finally:
            for channel in self.channels:
                channel.close()

    def _check_answer(self, opened: OpenCall) -> None:
        """After a drain, calls whose requests came too late are refused."""
        self.calls.remove(opened)
        try:
            answers = self._read_answers(opened)
        except grpc.RpcError as error:
            if self.drained and error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                return
            raise
        for text, messages in zip(opened.texts, answers, strict=True):
            got = assemble_answer(messages)
            assert got.text in {self.arena.expected(text, opened.tokens, version) for version in opened.versions}
            assert got.reason != pb.NOT_FINISHED

    def _read_answers(self, opened: OpenCall) -> list[list[pb.GenerationResponse]]:
        """The messages of each input."""
        if opened.streamed:
            return [[*opened.messages, *opened.call]]
        return [[response] for response in opened.call.result().responses]

    def _check_end(self) -> None:
        assert self.server.process.wait(PATIENCE_SECONDS) == 0
        self.arena.ended()

    def _check_resources(self) -> None:
        """One call that needs every permit succeeds, all inputs have ended, and no descriptor is left behind."""
        self._until(lambda: not nonzero_gauges(self.scrape()))
        self._stub(0).Generate(self._request([TEXTS[0]] * MAX_CONCURRENT_REQUESTS, 1, False), timeout=PATIENCE_SECONDS)
        now = self.scrape()
        assert self._ends(now) == self._grown(now, "tgi_request_input_count_total")
        self._until(lambda: not any(now.exceeds(self.usage[name]) for name, now in self.current_usage().items()))

    def _until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.02)

    def scrape(self) -> MetricValues:
        return parse_metrics(self.server.get("/metrics", timeout=PATIENCE_SECONDS)[1])

    def current_usage(self) -> dict[str, Usage]:
        return {"front end": Usage.of(self.server.process.pid), "engine": Usage.of(self.server.engine_pid())}

    def _ends(self, now: MetricValues) -> float:
        return self._grown(now, "tgi_request_success_total") + self._grown(now, "tgi_request_failure_total")

    def _grown(self, now: MetricValues, name: str) -> float:
        return sum(value - self.before.get(key, 0.0) for key, value in now.items() if key[0] == name)

    def _stub(self, window: int) -> GenerationServiceStub:
        return GenerationServiceStub(self.channels[window])

    def _opened(self, call: OpenCall) -> OpenCall:
        self.calls.append(call)
        return call

    def _request(self, texts: list[str], tokens: int, adapter: bool) -> pb.BatchedGenerationRequest:
        request = unary_request(texts[0], tokens)
        del request.requests[:]
        request.requests.extend(pb.GenerationRequest(text=text) for text in texts)
        request.params.response.generated_tokens = True
        if adapter and self.arena.adapters:
            request.adapter_id = ADAPTER
        return request

    def _versions(self, request: pb.BatchedGenerationRequest) -> set[str]:
        if not request.adapter_id:
            return {""}
        assert self.arena.adapters is not None
        return self.arena.adapters.versions_since(time.monotonic())


@contextlib.contextmanager
def serving(arena: Arena) -> Iterator[Arena]:
    """End the server with the block."""
    with arena.stack:
        yield arena
