"""tgis.frontend.generation: calls become requests of the engine, and its steps their outputs, without an engine;
limits of calls and inputs in total and for each client.
"""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from engine_clients import connected_client
from harness import run_async
from scraped_metrics import make_metrics, value
from scripted_api import LIMITS, byte_tokenizer

from tgis.config import Config
from tgis.errors import EngineFailure, InvalidRequest, OutOfMemory, Overloaded, QueueFull, RequestError, Unavailable
from tgis.frontend.admission import Quota
from tgis.frontend.calls import CallKind, GenerateCall, TokenizeCall
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.generation import Generator, ServerInfo, loaded
from tgis.frontend.lookups import Lookups
from tgis.frontend.output import RequestOutput
from tgis.frontend.params import Params
from tgis.ipc.lookups import Acquired, AdapterRef
from tgis.ipc.messages import Cancel, EngineInfo, Failed, FailureKind, Step, Submit
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, StopReason
from tgis.limits import admission

INFO = EngineInfo("fake", "Fake", "none", "none", 257, False, False, 4, 1000, 64)
A, B, C = 64, 65, 66  # tokens


class Front:
    """A generator whose engine the test plays."""

    def __init__(self, max_queued_tokens: int = 0, **options: Any) -> None:
        metrics, self.admission = make_metrics(), admission(Config(model_name="m", **options))
        self.client, self.transport = connected_client(metrics)
        decoder = TokenDecoder(byte_tokenizer(), (256,), encoder_decoder=False, output_special_tokens=False)
        lookups = Lookups(self.client, metrics, why_no_adapters=None, why_no_grammars="none here")
        info = ServerInfo(INFO, LIMITS, max_queued_tokens, random_seed=7, log_text=False)
        self.generator = Generator(info, self.client, decoder, lookups, metrics, self.admission)

    @property
    def discarded(self) -> float:
        return value(self.generator.metrics, "tgi_batch_discarded_tokens")

    async def start(self, work: Coroutine[Any, Any, Any]) -> "tuple[asyncio.Task[Any], list[Request]]":
        """The running call, and the requests that it has sent."""
        task = asyncio.create_task(work)
        return task, await self.submitted()

    async def submitted(self) -> list[Request]:
        while not (submits := [message for message in self.transport.sent if isinstance(message, Submit)]):
            await asyncio.sleep(0)
        self.transport.sent.clear()
        assert submits[0].arrival_time == pytest.approx(time.monotonic(), abs=60)
        return submits[0].requests

    def step(self, requests: list[Request], *tokens: int, end: StopReason = StopReason.NOT_FINISHED) -> None:
        count = len(requests)
        self.client.handle(Step([request.id for request in requests], [[*tokens]] * count, [end] * count, [], None))


def call(*texts: str, kind: CallKind = CallKind.BATCH, n: int = 1, fields: Any = None, **params: Any) -> GenerateCall:
    fields = [f"requests[{i}].text" for i in range(len(texts))] if fields is None else fields
    return GenerateCall(kind, [*texts], fields, Params(**params), b"me", identity=b"i", n=n, answer_deadline=9.0)


SAMPLED = SamplingParams(temperature=1.0, min_new_tokens=1)


@run_async
async def test_every_output_of_every_input_is_a_request() -> None:
    front = Front(max_concurrent_requests=4)
    options = LogprobOptions(generated_tokens=True)
    work = call("abc", "é", n=2, sampling=SAMPLED, seed=5, max_new_tokens=7, bad_words=(" b",), logprob_options=options)
    work.params.input_text, work.params.stop_sequences, work.params.prediction = True, ("abc",), "ab"
    task, requests = await front.start(front.generator.generate(work))
    e_acute, space_b = map(byte_tokenizer().encode_without_special_tokens, ("é", " b"))
    assert [request.tokens for request in requests] == [[A, B, C]] * 2 + [e_acute] * 2
    for number, request in enumerate(requests):
        sampling = msgspec.structs.replace(SAMPLED, seed=5 + number % 2, bad_words=request.sampling_params.bad_words)
        assert {*sampling.bad_words} == {(B,), tuple(space_b)}
        expected = Request(request.id, request.tokens, 7, False, sampling, options, cache_salt=b"i", client=b"me")
        assert request == msgspec.structs.replace(expected, answer_deadline=9.0, prediction=[A, B])
    front.step(requests, A, B)
    front.step(requests[:3], C)  # the stop sequence is complete
    while not front.transport.sent:  # they are cancelled before the last one ends
        await asyncio.sleep(0)
    front.step(requests[3:], C, end=StopReason.MAX_TOKENS)
    outputs: list[RequestOutput] = await task
    facts = [(output.index, output.text, output.input_token_count, output.seed) for output in outputs]
    assert facts == [(0, "abcabc", 3, 5), (1, "abcabc", 3, 6), (2, "éabc", 2, 5), (3, "éabc", 2, 6)]
    await asyncio.sleep(0)
    cancelled = [Cancel([request.id for request in requests[:3]])]
    assert (front.admission.inputs.total, front.transport.sent, front.discarded) == (0, cancelled, 0)
    lengths = [value(front.generator.metrics, f"tgi_request_raw_input_length_{kind}") for kind in ("count", "sum")]
    assert lengths == [4, 2 * 3 + 2 * 2]


@run_async
async def test_a_stream_says_what_is_known_before_the_prefill_and_then_what_each_step_adds() -> None:
    front, chunks = Front(), list[RequestOutput]()

    async def read() -> None:
        work = call("abc", kind=CallKind.STREAM, n=2, input_text=True, max_new_tokens=5, sampling=SAMPLED, seed=5)
        work.params.stop_sequences = ["ab"]
        async for chunk in front.generator.stream(work):
            chunks.append(chunk)

    task, (first, second) = await front.start(read())
    front.step([first], A, B)
    await asyncio.sleep(0)
    front.step([first], C)  # on its way when the stop sequence was found
    front.step([second], B)
    front.step([second], A, end=StopReason.MAX_TOKENS)
    await task
    facts = [(chunk.text, chunk.input_token_count, chunk.generated_token_count, chunk.seed) for chunk in chunks]
    assert facts[:2] == [("abc", 3, 0, 5), ("abc", 3, 0, 6)]
    assert facts[2:] == [("ab", 0, 2, 5), ("ba", 0, 2, 6)]  # in one message, since the reader came late
    assert front.discarded == 1


TOO_COMPLEX = "the grammar cannot be followed"
NO_TOKEN = "allowed_token_ids, bad_words, stop_token_ids and the grammar leave no token that may come next"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.ERROR, EngineFailure("Request failed during generation: it broke")),
        (FailureKind.OUT_OF_MEMORY, OutOfMemory("it broke")),
        (FailureKind.GRAMMAR, InvalidRequest("grammar", f"{TOO_COMPLEX}: it broke", logged=TOO_COMPLEX)),
        (FailureKind.NOTHING_LEFT, InvalidRequest("it broke", f"{NO_TOKEN}, or the model's scores are not finite")),
    ],
)
@run_async
async def test_the_first_output_that_fails_fails_the_call_and_cancels_the_others(
    kind: FailureKind, error: RequestError
) -> None:
    front = Front()
    task, requests = await front.start(front.generator.generate(call("a", "b", "c")))
    front.step(requests, A)
    front.client.handle(Failed([requests[1].id], kind, "it broke"))
    with pytest.raises(type(error)) as caught:
        await task
    assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))
    await asyncio.sleep(0)
    assert front.transport.sent == [Cancel([requests[0].id, requests[2].id])]
    assert front.discarded == 3


TOO_MANY = "requests has 5 inputs, at most 4 allowed"


@pytest.mark.parametrize(
    ("work", "field", "text"),
    [
        (call(*"abcde"), "requests", TOO_MANY),
        (call("a", n=5), "requests", TOO_MANY),
        (call("a", fields=["x", "y"]), "request", "missing request"),
        (call("a", max_new_tokens=101), "max_new_tokens", "max_new_tokens must be <= 100"),
        (call("a" * 801), "requests[0].text", "requests[0].text has 801 bytes, at most 800 fit into any input"),
        (call("a", "b" * 300), "requests[1].text", "input tokens (300) plus prefix length (0) must be < 200"),
        (call("a", ""), "requests[1].text", "requests[1].text gives no token"),
    ],
)
@run_async
async def test_calls_that_never_reach_the_engine(work: GenerateCall, field: str, text: str) -> None:
    front = Front(max_concurrent_requests=5, max_concurrent_requests_per_client=4)
    with pytest.raises(InvalidRequest) as caught:
        await front.generator.generate(work)
    assert (caught.value.field, str(caught.value), vars(caught.value).get("max_length", 200)) == (field, text, 200)
    assert (front.transport.sent, await front.generator.generate(call())) == ([], [])
    assert value(front.generator.metrics, "tgi_request_input_count") == len(work.fields) * work.n


@pytest.mark.parametrize(
    ("text", "ids", "expected"), [("a" * 900 + "bc", None, [0, C]), ("", [[A] * 900 + [B, C]], [B, C])]
)
@run_async
async def test_truncation_keeps_the_last_tokens_of_any_input_and_a_time_limit_is_a_deadline(
    text: str, ids: list[list[int]] | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a text has BOS, and gets it back."""
    monkeypatch.setattr(byte_tokenizer(), "bos_token_id", 0)
    front, before = Front(), time.monotonic()
    work = replace(call(text, truncate_input_tokens=2, time_limit_millis=1500), token_ids=ids)
    task, (request,) = await front.start(front.generator.generate(work))
    assert (request.tokens, request.input_length) == (expected, 2)
    assert request.deadline is not None
    assert before + 1.5 <= request.deadline <= time.monotonic() + 1.5
    task.cancel()


@run_async
async def test_overload_comes_before_validation_and_the_queue_is_limited_in_tokens() -> None:
    front = Front(max_queued_tokens=6, max_concurrent_requests=3)
    with front.admission.inputs.hold(b"other", 3), pytest.raises(Overloaded, match="Model is overloaded"):
        await front.generator.generate(call("a", max_new_tokens=9999))
    task, _ = await front.start(front.generator.generate(call("abcde")))  # any number while nothing waits
    with pytest.raises(QueueFull) as caught:
        await front.generator.generate(call("ab"))
    assert caught.value.reason == "5 input tokens are waiting, at most 6 may"
    failures = [value(front.generator.metrics, "tgi_request_failure", err=err) for err in ("conc_limit", "queue_full")]
    assert failures == [1, 1]
    last, _ = await front.start(front.generator.generate(call("a")))
    assert front.generator.num_queued_tokens == 6
    last.cancel()
    task.cancel()


@run_async
async def test_an_adapter_comes_before_the_input() -> None:
    front = Front()
    work = GenerateCall(CallKind.SINGLE, ["ab"], ["x"], Params(), adapter=("prefix_id", "p"))
    task = asyncio.create_task(front.generator.generate(work))
    await asyncio.sleep(0)
    front.client.handle(Acquired(1, adapter=AdapterRef("p", 3, 0, 1, 9)))
    (request,) = await front.submitted()
    assert (request.tokens, request.adapter and request.adapter.id) == ([0, 0, 0, A, B], "p")
    assert (request.cache_salt, front.generator.num_queued_tokens) == ((9).to_bytes(8), 5)
    front.step([request], C, end=StopReason.MAX_TOKENS)
    await task
    lengths = [value(front.generator.metrics, f"tgi_request_{name}_sum") for name in ("input_length", "total_tokens")]
    assert lengths == [2, 3]  # without the places of the adapter


@run_async
async def test_tokenize() -> None:
    texts, front = ["abc", "ab"], Front()
    (whole, _) = await front.generator.tokenize(TokenizeCall(texts, 0, return_tokens=True, return_offsets=False))
    assert (whole.ids, whole.num_tokens, [*whole.offsets]) == ([A, B, C], 3, [])
    (counted, _) = await front.generator.tokenize(TokenizeCall(texts, 0, return_tokens=False, return_offsets=False))
    assert (counted.ids, counted.num_tokens) == ([], 3)
    (cut, short) = await front.generator.tokenize(TokenizeCall(texts, 2, return_tokens=False, return_offsets=True))
    assert (cut.num_tokens, [*cut.offsets], short.num_tokens) == (2, [(1, 2), (2, 3)], 2)
    names = "count", "input_count", "duration_count", "tokens_sum"
    counts = [value(front.generator.metrics, f"tgi_tokenize_request_{name}") for name in names]
    assert counts == [3, 6, 3, 5 + 5 + 4]
    assert value(front.generator.metrics, "tgi_tokenize_request_duration_sum") < 60
    many = TokenizeCall(["a"] * 10_000, 0, return_tokens=True, return_offsets=False, max_tokens=10_000)
    assert len(await front.generator.tokenize(many)) == 10_000
    for refused in (replace(many, max_tokens=9_999), replace(many, texts=["a"] * 10_001)):
        with pytest.raises(InvalidRequest, match=r"more than 9999 tokens|10001 inputs, at most 10000 allowed"):
            await front.generator.tokenize(refused)


@run_async
async def test_a_server_that_loads_has_no_generator() -> None:
    with pytest.raises(Unavailable, match="the model is still loading"):
        loaded(asyncio.get_running_loop().create_future())


def refusal(quota: Quota, client: bytes, amount: int) -> str:
    with pytest.raises(Overloaded) as caught, quota.hold(client, amount):
        pass
    return caught.value.reason


def test_quotas_are_limited_in_total_and_for_each_client() -> None:
    quota = Quota("inputs", limit=5, per_client=3)
    assert (quota.most(b"a"), quota.most(b"")) == (3, 5)
    with quota.hold(b"a", 2), quota.hold(b"", 1):
        assert refusal(quota, b"a", 2) == "2 inputs of this client, at most 3 allowed"
        assert refusal(quota, b"b", 3) == "3 inputs, at most 5 allowed"
        with quota.hold(b"b", 2):
            assert quota.total == 5
    with quota.hold(b"", 5):  # a client without a name has no limit but the total
        assert quota.total == 5
    with quota.hold(b"a", 1):
        with quota.hold(b"a", 2):
            pass
        assert refusal(quota, b"a", 3) == "1 inputs of this client, at most 3 allowed"
    assert (quota.total, Quota("inputs", limit=2, per_client=3).most(b"a")) == (0, 2)
