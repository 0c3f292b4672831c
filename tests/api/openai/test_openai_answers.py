"""From outputs of the generator to the answers of the OpenAI API, field by field."""

import math
from typing import Any

import pytest
from harness import run_async
from scripted_api import ask, token, whole

from tgis.api.http.errors import HttpError
from tgis.api.openai.completions import split_prompt
from tgis.api.openai.errors import ERRORS
from tgis.errors import (
    ClientTimeout,
    EngineFailure,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    RequestError,
    TooLong,
    Unavailable,
)
from tgis.frontend.output import RequestOutput
from tgis.ipc.request import StopReason

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hello"}]}
EOS = StopReason.EOS_TOKEN
FIRST = RequestOutput(input_token_count=5, seed=7)  # of a stream, before any token
TOOLS = {"tools": [{"function": {"name": "weather"}}]}
CALL = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def part(text: str, count: int, **fields: Any) -> RequestOutput:
    """A message of a stream."""
    return RequestOutput(text=text, generated_token_count=count, **fields)


def without_ids(value: Any) -> Any:
    """Ids, times and versions differ from call to call."""
    if isinstance(value, dict):
        return {
            k: without_ids(v) for k, v in value.items() if k not in ("id", "created", "system_fingerprint", "model")
        }
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


INF = math.inf
A_B = [token("a", -0.5, 1, ("a", -0.5), ("b", -INF)), token("b", -1.5, 3, ("a", -0.25), ("b", -1.5))]


def logprob(text: str, value: float, **more: Any) -> dict[str, Any]:
    return {"token": text, "bytes": [*text.encode()], "logprob": value} | more


LOGPROBS = [
    logprob("a", -0.5, top_logprobs=[logprob("a", -0.5), logprob("b", -9999.0)]),
    logprob("b", -1.5, top_logprobs=[logprob("a", -0.25), logprob("b", -1.5)]),
]
CALLED = {"arguments": '{"city": "Oslo"}', "name": "weather"}


def chat_choice(index: int, content: str | None, reason: str, logprobs: Any = None, **more: Any) -> dict[str, Any]:
    said = {"content": content, "role": "assistant", "refusal": None} | more
    return {"index": index, "message": said, "logprobs": logprobs, "finish_reason": reason}


@pytest.mark.parametrize(
    ("fields", "outputs", "choices", "used"),
    [
        ({}, [whole("hé", 3, EOS)], [chat_choice(0, "hé", "stop")], (5, 3)),
        ({}, [whole("", 0, StopReason.TIME_LIMIT)], [chat_choice(0, "", "length")], (5, 0)),
        (
            {"n": 2},
            [whole("a", 1), whole("b", 2, index=1)],
            [chat_choice(0, "a", "length"), chat_choice(1, "b", "length")],
            (5, 3),
        ),
        (
            {"logprobs": True, "top_logprobs": 2},
            [whole("ab", 2, tokens=A_B)],
            [chat_choice(0, "ab", "length", {"content": LOGPROBS, "refusal": None})],
            (5, 2),
        ),
        (
            TOOLS,
            [whole(CALL, 60, EOS)],
            [chat_choice(0, "I look.", "tool_calls", tool_calls=[{"function": CALLED, "type": "function"}])],
            (5, 60),
        ),
        (TOOLS | {"tool_choice": "none"}, [whole(CALL, 60, EOS)], [chat_choice(0, CALL, "stop")], (5, 60)),
    ],
    ids=["text", "expired", "two", "logprobs", "tools", "no tools"],
)
@run_async
async def test_chat(fields: Any, outputs: Any, choices: Any, used: tuple[int, int]) -> None:
    answer = await ask(CHAT, USER | fields, *outputs)
    assert answer.body["id"].startswith("chatcmpl-")
    assert answer.body["model"] == "m"
    assert without_ids(answer.body) == {"object": "chat.completion", "usage": usage(*used), "choices": choices}
    assert [answer.headers[name] for name in ("x-prompt-tokens", "x-generated-tokens")] == [*map(str, used)]
    assert [answer.headers[f"x-compute-{name}"] for name in ("type", "characters")] == ["1-cpu", "5"]


def chat_chunk(reason: str | None = None, logprobs: Any = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


USAGE: Any = {"stream_options": {"include_usage": True}}
CONTINUOUS: Any = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BEGUN = {"role": "assistant"}


@pytest.mark.parametrize(
    ("fields", "outputs", "chunks", "used"),
    [
        (
            {},
            [part("a", 1), part("b", 2, stop_reason=EOS)],
            [chat_chunk(content="a", **BEGUN), chat_chunk("stop", content="b")],
            None,
        ),
        ({}, [part("", 0, stop_reason=StopReason.TIME_LIMIT)], [chat_chunk("length", **BEGUN)], None),
        (
            USAGE | {"n": 2},
            [part("a", 1), part("b", 1, index=1, stop_reason=EOS), part("c", 2, stop_reason=EOS)],
            [
                chat_chunk(content="a", **BEGUN),
                chat_chunk("stop", index=1, content="b", **BEGUN),
                chat_chunk("stop", content="c"),
            ],
            [None, None, None, usage(5, 3)],
        ),
        (
            CONTINUOUS,
            [part("a", 1), part("b", 3, stop_reason=EOS)],
            [chat_chunk(content="a", **BEGUN), chat_chunk("stop", content="b")],
            [usage(5, 1), usage(5, 3), usage(5, 3)],
        ),
        (
            {"logprobs": True, "top_logprobs": 2},
            [part("", 1, tokens=A_B[:1]), part("ab", 2, tokens=A_B[1:], stop_reason=EOS)],
            [
                chat_chunk(None, {"content": LOGPROBS[:1], "refusal": None}, content="", **BEGUN),
                chat_chunk("stop", {"content": LOGPROBS[1:], "refusal": None}, content="ab"),
            ],
            None,
        ),
    ],
    ids=["text", "expired", "two", "usage", "logprobs"],
)
@run_async
async def test_streamed_chat(fields: Any, outputs: Any, chunks: Any, used: Any) -> None:
    answer = await ask(CHAT, USER | {"stream": True} | fields, FIRST, *outputs)
    *events, done = answer.body
    assert done == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert [choice for event in without_ids(events) for choice in event["choices"]] == chunks
    assert [event.get("usage") for event in events] == (used or [None] * len(chunks))
    assert [len(event["choices"]) for event in events] == [1] * len(chunks) + [0] * bool(used)
    assert all(("usage" in event) == bool(used) for event in events)


@run_async
async def test_a_streamed_tool_call() -> None:
    reasons = [StopReason.NOT_FINISHED] * (len(CALL) - 1) + [EOS]
    messages = [
        part(text, n, stop_reason=reason) for n, (text, reason) in enumerate(zip(CALL, reasons, strict=True), 1)
    ]
    answer = await ask(CHAT, USER | TOOLS | {"stream": True}, FIRST, *messages)
    choices = [choice for event in answer.body[:-1] for choice in event["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "I look."
    first, *rest = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert (first["index"], first["type"], first["function"]["name"], len(first["id"])) == (0, "function", "weather", 9)
    assert all(call.keys() == {"index", "function"} for call in rest)
    assert "".join(call["function"]["arguments"] for call in (first, *rest)) == CALLED["arguments"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]


def completion(index: int, text: str, reason: str | None, logprobs: Any = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason} | more


def text_logprobs(offsets: list[int], values: list[Any], tokens: list[str], tops: Any) -> dict[str, Any]:
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


PROMPT = [token("x", math.nan), token("b", -1.5, 3, ("a", -0.25))]
PROMPT_LOGPROBS = [
    None,
    {
        "65": {"logprob": -1.5, "rank": 3, "decoded_token": "b"},
        "64": {"logprob": -0.25, "rank": 1, "decoded_token": "a"},
    },
]


@pytest.mark.parametrize(
    ("fields", "outputs", "choices", "used"),
    [
        (
            {"prompt": ["xb", "y"], "n": 2, "temperature": 1},
            [whole(text, 1, index=i) for i, text in enumerate("abcd")],
            [completion(i, text, "length") for i, text in enumerate("abcd")],
            (10, 4),
        ),
        ({"prompt": "xb", "echo": True}, [whole("c", 1, EOS)], [completion(0, "xbc", "stop")], (5, 1)),
        (
            {"prompt": [87, 65], "echo": True},  # ids of the tokens of "xb"
            [whole("c", 1, EOS)],
            [completion(0, "xbc", "stop")],
            (5, 1),
        ),
        (
            {"prompt": "xb", "logprobs": 0},
            [whole("ab", 2, tokens=A_B)],
            [completion(0, "ab", "length", text_logprobs([0, 1], [-0.5, -1.5], ["a", "b"], None))],
            (5, 2),
        ),
        (
            {"prompt": "xb", "logprobs": 1, "echo": True},
            [whole("b", 1, tokens=A_B[1:], input_tokens=PROMPT)],
            [
                completion(
                    0,
                    "xbb",
                    "length",
                    text_logprobs(
                        [0, 1, 2],
                        [None, -1.5, -1.5],
                        ["x", "b", "b"],
                        [None, {"a": -0.25, "b": -1.5}, {"a": -0.25, "b": -1.5}],
                    ),
                )
            ],
            (5, 1),
        ),
        (  # as tools that rate texts ask for it
            {"prompt": "xb", "logprobs": 0, "echo": True, "max_tokens": 0},
            [whole("c", 1, EOS, tokens=A_B[:1], input_tokens=PROMPT)],
            [completion(0, "xb", "length", text_logprobs([0, 1], [None, -1.5], ["x", "b"], None))],
            (5, 0),
        ),
        (
            {"prompt": "xb", "prompt_logprobs": 1},
            [whole("c", 1, EOS, input_tokens=PROMPT)],
            [completion(0, "c", "stop", prompt_logprobs=PROMPT_LOGPROBS)],
            (5, 1),
        ),
        (
            {"prompt": "xb", "best_of": 2},
            [whole("a", 1, tokens=A_B[1:]), whole("b", 2, tokens=A_B[:1], index=1)],
            [completion(0, "b", "length")],
            (5, 3),
        ),
    ],
    ids=["several", "echo", "echoed ids", "logprobs", "echoed logprobs", "echo only", "prompt logprobs", "best of"],
)
@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_completions(fields: Any, outputs: Any, choices: Any, used: tuple[int, int], stream: bool) -> None:
    if stream and fields.keys() & {"prompt_logprobs", "best_of"}:
        assert (await ask(COMPLETIONS, {"stream": True} | fields)).status == 400
        return
    answer = await ask(COMPLETIONS, ({"stream": True} | USAGE if stream else {}) | fields, *outputs)
    events = answer.body[:-1] if stream else [answer.body]
    assert [choice for event in events for choice in event["choices"]] == choices
    assert events[-1]["usage"] == usage(*used)
    assert {event["object"] for event in events} == {"text_completion"}
    assert events[0]["id"].startswith("cmpl-")


@run_async
async def test_prompt_logprobs_of_a_chat() -> None:
    answer = await ask(CHAT, USER | {"prompt_logprobs": 1}, whole("c", 1, EOS, input_tokens=PROMPT))
    assert answer.body["prompt_logprobs"] == PROMPT_LOGPROBS


ERROR_BODIES = [  # status, type, param, code and TGI's type, then the message
    (InvalidRequest("top_n_tokens", "top_n_tokens must be <= 20", "21"), "400 invalid_request_error top_logprobs None"),
    (
        TooLong("prompt[0]", "plus max_new_tokens (9)", 200),
        "400 invalid_request_error prompt[0] context_length_exceeded",
    ),
    (Overloaded("8 inputs"), "429 rate_limit_error None rate_limit_exceeded"),
    (EngineFailure("it broke"), "500 server_error None None"),
    (OutOfMemory("too large"), "500 server_error None None"),
    (Unavailable("gone"), "503 service_unavailable_error None None"),
    (ClientTimeout(1.0), "408 timeout_error None None"),
    (HttpError(401, "no token"), "401 authentication_error None invalid_api_key"),
    (HttpError(404, "no model"), "404 not_found_error None model_not_found"),
    (HttpError(413, "too large"), "413 invalid_request_error None None"),
]
MESSAGES = {
    "InvalidRequest": "top_logprobs must be <= 20, got 21",
    "TooLong": "This model's maximum context length is 200 tokens, the prompt is too long: plus max_tokens (9)",
    "Overloaded": "Model is overloaded: 8 inputs",
}
TGI_KINDS = {400: "validation", 401: "authentication", 404: "not_found", 408: "timeout", 413: "validation"}
TGI_KINDS |= {429: "overloaded", 500: "generation", 503: "unavailable"}


@pytest.mark.parametrize(("error", "expected"), ERROR_BODIES)
def test_errors(error: RequestError, expected: str) -> None:
    status, body = ERRORS.convert(error)
    detail = body.error
    assert f"{status} {detail.type} {detail.param} {detail.code}" == expected
    assert detail.message == MESSAGES.get(type(error).__name__, str(error))
    assert (detail.http_status_code, body.error_type) == (status, TGI_KINDS[status])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        ([1, 2], ([""], [[1, 2]])),
        ([[1], [2, 3]], (["", ""], [[1], [2, 3]])),
        ([[]], ([""], [[]])),
        ([], "prompt cannot be empty"),
        ([1, "a"], "prompt must be a text, token ids, or several of one of them"),
        ([*["a"] * 5], "prompt must have at most 4 prompts (MAX_CLIENT_BATCH_SIZE), got 5"),
        ([1, "a", *[1] * 10], ([""], [[1, "a", *[1] * 10]])),  # too long, which is found later
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    if not isinstance(expected, str):
        assert split_prompt(prompt, max_prompts=4, max_tokens=10) == expected
        return
    with pytest.raises(InvalidRequest) as caught:
        split_prompt(prompt, max_prompts=4, max_tokens=10)
    assert (caught.value.field, caught.value.detail) == ("prompt", expected)
