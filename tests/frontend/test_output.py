"""tgis.frontend.output: unary calls and streams give the same output, however tokens are grouped into steps.

And when a call is woken, by which of its outputs.
"""

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from batches import request
from engine_clients import engine_outputs
from harness import run_async
from hypothesis import given
from hypothesis import strategies as st
from scripted_api import byte_tokenizer

from tgis.errors import Unavailable
from tgis.frontend.detokenizer import TokenDecoder
from tgis.frontend.engine_output import EngineOutput, ReadyOutputs, RequestTimings
from tgis.frontend.output import Output, RequestOutput, TokenInfo
from tgis.frontend.params import Params
from tgis.ipc.messages import PromptLogprobs
from tgis.ipc.request import LogprobOptions, Request, SamplingParams, StopReason, TokenLogprobs

NOT_FINISHED, MAX_TOKENS, STOP_SEQUENCE = StopReason.NOT_FINISHED, StopReason.MAX_TOKENS, StopReason.STOP_SEQUENCE
ALPHABET = "ab\né"
Steps = list[list[int]]


@pytest.fixture(scope="module")
def decoder() -> TokenDecoder:
    """A decoder of byte tokens: the ids of a text are those of its UTF-8 bytes."""
    return TokenDecoder(byte_tokenizer(), (), encoder_decoder=False, output_special_tokens=False)


def params(stops: list[str], *, tokens: bool, minimum: int = 0) -> Params:
    options = LogprobOptions(generated_tokens=tokens, logprobs=tokens)
    sampling = SamplingParams(min_new_tokens=minimum, seed=9)
    fields: dict[str, Any] = {"stop_sequences": stops, "include_stop_sequence": True, "max_new_tokens": 99}
    return Params(logprob_options=options, sampling=sampling, **fields)


def builder(decoder: TokenDecoder, wanted: Params, prediction: list[int] | None = None) -> Output:
    request = Request(1, [5, 6], 99, False, wanted.sampling, wanted.logprob_options, prediction=prediction or [])
    engine_output = EngineOutput(request, 0, ReadyOutputs(eager=True), 0.0)
    engine_output.timings = RequestTimings(arrived=0.0, submitted=0.0)
    return Output(engine_output, "prompt", wanted, decoder, "--")


def ids(decoder: TokenDecoder, text: str) -> list[int]:
    return decoder.tokenizer.encode_without_special_tokens(text)


def deliver(output: Output, steps: Steps) -> Iterator[None]:
    """Put these steps into its queue, the last of which ends the request; yield after each until the output ends."""
    logprobs = output.params.logprob_options.logprobs
    for number, tokens in enumerate(steps, 1):
        reason = MAX_TOKENS if number == len(steps) else NOT_FINISHED
        output.engine_output.put(tokens, [TokenLogprobs(-float(i)) for i in tokens] if logprobs else [], reason, 0.0)
        if not output.stop_reason:
            yield


def unary(decoder: TokenDecoder, wanted: Params, steps: Steps) -> RequestOutput:
    output = builder(decoder, wanted)
    for _ in deliver(output, steps):
        output.collect()
    return output.final()


def streamed(decoder: TokenDecoder, wanted: Params, steps: Steps, *, late: bool = False) -> list[RequestOutput]:
    """The messages of a reader that keeps up, or that comes when all steps have been made."""
    output = builder(decoder, wanted)
    chunks = [chunk for _ in deliver(output, steps) if not late for chunk in output.chunks()]
    return chunks + list(output.chunks()) if late else chunks


@st.composite
def spread_ids(draw: st.DrawFn, decoder: TokenDecoder) -> tuple[list[int], Steps]:
    """The ids of a text, at least one, and the same ids in steps of one to four."""
    rest = whole = ids(decoder, draw(st.text(ALPHABET, min_size=1, max_size=12)))
    steps = []
    while rest:
        size = draw(st.integers(1, 4))
        steps.append(rest[:size])
        rest = rest[size:]
    return whole, steps


@pytest.mark.parametrize("tokens", [False, True])
@given(data=st.data())
def test_steps_and_streaming_do_not_change_an_output(decoder: TokenDecoder, tokens: bool, data: st.DataObject) -> None:
    whole, steps = data.draw(spread_ids(decoder))
    stops = data.draw(st.lists(st.text(ALPHABET, min_size=1, max_size=3), max_size=2))
    wanted = params(stops, tokens=tokens, minimum=data.draw(st.integers(0, 3)))
    expected = unary(decoder, wanted, [[token] for token in whole])
    assert unary(decoder, wanted, steps) == expected
    chunks = streamed(decoder, wanted, steps)
    if not tokens:  # as if each token were a step, and those without text left out
        single = streamed(decoder, wanted, [[token] for token in whole])
        assert chunks == single
        assert all(chunk.text or chunk.stop_reason for chunk in chunks)
    late = streamed(decoder, wanted, steps, late=True)
    assert late == chunks if tokens else len(late) == 1 or len(steps) == 1
    for messages in (chunks, late):
        last = messages[-1]
        assert "".join(chunk.text for chunk in messages) == expected.text
        assert list(itertools.chain.from_iterable(chunk.tokens for chunk in messages)) == list(expected.tokens)
        assert (last.stop_reason, last.stop_sequence) == (expected.stop_reason, expected.stop_sequence)
        assert last.generated_token_count == expected.generated_token_count
        assert all(not chunk.stop_reason for chunk in messages[:-1])


@pytest.mark.parametrize(
    ("late", "stops", "tokens", "texts", "messages", "reason"),
    [
        (False, [], False, ["abé", "de"], [("a", 2), ("b", 4), ("é", 5), ("de", 6)], MAX_TOKENS),
        (False, ["b"], False, ["xb"], [("xb", 2)], MAX_TOKENS),  # the reason of a step is its last token's
        (False, ["b"], False, ["xby"], [("xb", 2)], STOP_SEQUENCE),
        (False, ["b"], True, ["abcde"], [("", 1), ("ab", 2)], STOP_SEQUENCE),  # later tokens are dropped
        (True, [], False, ["ab", "cd", "é"], [("abcdé", 6)], MAX_TOKENS),
        (True, ["c"], False, ["ab", "cd", "e"], [("abc", 3)], STOP_SEQUENCE),
        (True, [], True, ["ab", "c"], [("", 1), ("a", 2), ("bc", 3)], MAX_TOKENS),
    ],
)
def test_messages(
    decoder: TokenDecoder, late: bool, stops: Any, tokens: bool, texts: Any, messages: Any, reason: StopReason
) -> None:
    """One for each token that has text, or for each token if they are requested; one for all that waits otherwise."""
    steps = [ids(decoder, text) for text in texts]
    chunks = streamed(decoder, params(stops, tokens=tokens), steps, late=late)
    assert [(chunk.text, chunk.generated_token_count) for chunk in chunks] == messages
    assert [chunk.stop_reason for chunk in chunks] == [NOT_FINISHED] * (len(chunks) - 1) + [reason]
    assert [chunk.seed for chunk in chunks] == [0] * (len(chunks) - 1) + [9]
    assert all(token.logprob == -token.id for chunk in chunks for token in chunk.tokens)
    assert chunks[-1].stop_sequence == (stops[0] if reason is STOP_SEQUENCE else "")


def test_the_input_tokens_of_a_stream_come_once_and_before_the_output(decoder: TokenDecoder) -> None:
    options = LogprobOptions(input_tokens=True, logprobs=True, top_n_tokens=2)
    output = builder(decoder, Params(logprob_options=options, max_new_tokens=99, include_stop_sequence=True))
    output.index = 3
    details = [TokenLogprobs(-1.0, 4, [(7, -2.0)]), TokenLogprobs(-3.0)]
    output.engine_output.prompt_logprobs += [PromptLogprobs.encode(1, [each]) for each in details]
    chunks = [chunk for _ in deliver(output, [ids(decoder, letter) for letter in "abc"]) for chunk in output.chunks()]
    text = decoder.tokenizer.token_text
    tokens = [TokenInfo(5, text(5), -1.0, 4, [(7, text(7), -2.0)]), TokenInfo(6, text(6), -3.0, 0, [])]
    first, *others = chunks
    first.input_tokens = [*first.input_tokens]
    assert first == RequestOutput(3, input_tokens=tokens, input_token_count=2, num_details=6)
    assert [(chunk.index, chunk.text, [*chunk.input_tokens]) for chunk in others] == [(3, "a", []), (3, "bc", [])]


def test_the_answer_of_a_unary_call_has_all(decoder: TokenDecoder) -> None:
    wanted = params([], tokens=True)
    wanted.logprob_options, wanted.input_text = LogprobOptions(True, True, top_n_tokens=2), True
    output = builder(decoder, wanted, ids(decoder, "abxx"))
    output.engine_output.prompt_logprobs.append(PromptLogprobs.encode(1, [TokenLogprobs(-1.0)] * 2))
    output.engine_output.num_cached_tokens = 1
    for _ in deliver(output, [ids(decoder, "a"), ids(decoder, "bc")]):
        output.collect()
    final, text = output.final(), decoder.tokenizer.token_text
    final.input_tokens = [*final.input_tokens]
    assert final == RequestOutput(
        text="prompt--abc",
        input_token_count=2,
        generated_token_count=3,
        stop_reason=MAX_TOKENS,
        seed=9,
        tokens=[TokenInfo(token, text(token), 0.0, 0, []) for token in ids(decoder, "abc")],
        input_tokens=[TokenInfo(token, text(token), -1.0, 0, []) for token in (5, 6)],
        num_details=(2 + 3) * 3,
        num_cached_tokens=1,
        timings=output.engine_output.timings,
        prediction_tokens={"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 2},
    )
    output.texts = ["x" * 20] * 2
    assert output.logged_text == "x" * 32


def test_a_stop_sequence_counts_from_the_last_token_of_the_minimum_on(decoder: TokenDecoder) -> None:
    steps = [ids(decoder, letter) for letter in "abcd"]
    texts = [unary(decoder, params(["b"], tokens=False, minimum=minimum), steps).text for minimum in (1, 2, 3)]
    assert texts == ["ab", "ab", "abcd"]


@pytest.mark.parametrize("late", [False, True])
def test_an_error_is_raised_after_the_tokens_before_it(decoder: TokenDecoder, late: bool) -> None:
    output, chunks = builder(decoder, params([], tokens=True)), list[RequestOutput]()
    output.engine_output.put(ids(decoder, "ab"), [], StopReason.NOT_FINISHED, 0.0)
    if not late:
        chunks += output.chunks()
        output.engine_output.put(ids(decoder, "c"), [], StopReason.NOT_FINISHED, 0.0)
    output.engine_output.fail(Unavailable("it is gone"))
    with pytest.raises(Unavailable, match="it is gone"):
        chunks.extend(output.chunks())
    assert [chunk.tokens[0].text for chunk in chunks] == list("ab" if late else "abc")
    assert not output.stop_reason


def test_a_request_that_expires_in_the_queue_has_only_a_stop_reason(decoder: TokenDecoder) -> None:
    output = builder(decoder, params([], tokens=True))
    output.engine_output.put([], [], StopReason.TIME_LIMIT, 0.0)
    (chunk,) = output.chunks()
    assert chunk == RequestOutput(stop_reason=StopReason.TIME_LIMIT)
    assert output.final() == RequestOutput(stop_reason=StopReason.TIME_LIMIT, input_token_count=2)


@pytest.mark.parametrize("late", [False, True])
def test_an_end_without_a_token_gives_what_is_held_back(decoder: TokenDecoder, late: bool) -> None:
    steps = [ids(decoder, "xab"), []]  # "b" may be the first letter of a stop sequence
    chunks = streamed(decoder, params(["bc"], tokens=False), steps, late=late)
    assert "".join(chunk.text for chunk in chunks) == "xab"
    assert (chunks[-1].generated_token_count, chunks[-1].stop_reason) == (3, StopReason.MAX_TOKENS)
    assert unary(decoder, params(["bc"], tokens=False), steps).text == "xab"


async def pending(ready: ReadyOutputs) -> "asyncio.Task[int]":
    """A call that already waits."""
    task = asyncio.create_task(ready.get())
    await asyncio.sleep(0)
    assert not task.done()
    return task


@run_async
async def test_an_eager_call_wakes_at_every_step_of_any_output() -> None:
    outputs = engine_outputs(request(n) for n in range(3))
    ready = outputs[0]._ready
    for index in (1, 1, 0):
        call = await pending(ready)
        outputs[index].put([1, 2], [], NOT_FINISHED, 0.0)
        assert await call == index
    for index in (2, 0, 2, 1):  # while it does not wait
        outputs[index].put([1], [], NOT_FINISHED, 0.0)
    assert [await ready.get() for _ in range(3)] == [2, 0, 1]
    await pending(ready)


@run_async
async def test_any_other_call_wakes_at_the_ends() -> None:
    outputs = engine_outputs((request(n) for n in range(2)), eager=False)
    call = await pending(outputs[0]._ready)
    for output in outputs:
        output.put([1], [], NOT_FINISHED, 0.0)
    await asyncio.sleep(0)
    assert not call.done()
    outputs[1].put([2], [], MAX_TOKENS, 0.0)
    assert await call == 1
    assert outputs[1].new_tokens == [1, 2]
    await pending(outputs[0]._ready)
