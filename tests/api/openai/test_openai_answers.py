"""From outputs of the generator to the answers of the OpenAI API, field by field."""

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import tables
from harness import run_async
from scripted_api import ask, output
from tables import table

from tgis.api.openai.completions import split_prompt
from tgis.api.openai.errors import ERRORS
from tgis.api.openai.logprobs import TokenTexts
from tgis.errors import InvalidRequest
from tgis.frontend.output import TokenInfo

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hello"}]}
MODEL = {"model": "m", "system_fingerprint": "fp_1"}
FIRST = output(input_token_count=5, seed=7)  # of a stream, before any token


def without_ids(value: Any) -> Any:
    """Ids and times differ from call to call."""
    if isinstance(value, dict):
        return {name: without_ids(part) for name, part in value.items() if name not in ("id", "created")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"prompt_tokens_details": {"cached_tokens": cached}}


@table("answers", "chat")
@run_async
async def test_chat(row: dict[str, Any]) -> None:
    answer, used = await ask(CHAT, USER | row["body"], *(output(**fields) for fields in row["outputs"])), row["usage"]
    assert (answer.body["id"][:9], answer.body["created"] > 1.7e9) == ("chatcmpl-", True)  # in seconds of UTC
    expected = {"object": "chat.completion", "usage": usage(*used), "choices": row["choices"]}
    assert without_ids(answer.body) == MODEL | expected
    assert [answer.headers[name] for name in ("x-prompt-tokens", "x-generated-tokens")] == [*map(str, used[:2])]
    assert [answer.headers[f"x-compute-{name}"] for name in ("type", "characters")] == ["1-cpu", "5"]


@table("answers", "streamed chat")
@run_async
async def test_streamed_chat(row: dict[str, Any]) -> None:
    answer = await ask(
        CHAT, USER | {"stream": True} | row["body"], FIRST, *(output(**fields) for fields in row["outputs"])
    )
    *events, done = answer.body
    assert done == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert all(event.items() >= (MODEL | {"object": "chat.completion.chunk"}).items() for event in events)
    assert [choice for event in without_ids(events) for choice in event["choices"]] == row["choices"]
    used = [used and usage(*used) for used in row.get("usage", ())]
    assert [event["usage"] for event in events if "usage" in event] == used
    assert [len(event["choices"]) for event in events] == [1] * len(row["choices"]) + [0] * bool(used)


@table("answers", "completions")
@pytest.mark.parametrize("stream", [False, True])
@run_async
async def test_completions(row: dict[str, Any], stream: bool) -> None:
    if stream and row["body"].keys() & {"prompt_logprobs", "best_of"}:
        return  # these are refused
    outputs, options = [output(**fields) for fields in row["outputs"]], {"stream_options": {"include_usage": True}}
    outputs = [*([FIRST] if stream else ()), *outputs]
    answer = await ask(COMPLETIONS, ({"stream": True} | options if stream else {}) | row["body"], *outputs)
    events = answer.body[:-1] if stream else [answer.body]
    assert [choice for event in events for choice in event["choices"]] == row["choices"]
    assert events[-1]["usage"] == usage(*row["usage"])
    assert all(event.items() >= (MODEL | {"object": "text_completion"}).items() for event in events)
    assert events[0]["id"].startswith("cmpl-")


@run_async
async def test_prompt_logprobs_of_a_chat() -> None:
    made = output(reason="EOS_TOKEN", input_tokens=[("x", math.nan), ("b", -1.5, 3)])
    answer = await ask(CHAT, USER | {"prompt_logprobs": 0}, made)
    assert answer.body["prompt_logprobs"] == [None, {"65": {"logprob": -1.5, "rank": 3, "decoded_token": "b"}}]


@table("errors", "errors")
def test_errors(row: dict[str, Any]) -> None:
    status, body = ERRORS.convert(tables.error(row))
    expected = row["openai"] | {"message": row["openai_message"], "http_status_code": status}
    assert msgspec.to_builtins(body.error) | {"status": status, "error_type": body.error_type} == expected


@table("parameters", "openai prompts")
def test_prompts(row: dict[str, Any]) -> None:
    if "texts" in row:
        assert split_prompt(row["prompt"], max_prompts=4, max_tokens=10) == (row["texts"], row.get("ids"))
        return
    with pytest.raises(InvalidRequest) as caught:
        split_prompt(row["prompt"], max_prompts=4, max_tokens=10)
    assert (caught.value.field, caught.value.detail) == ("prompt", row["error"])


def test_text_offsets_count_characters() -> None:
    texts = {(None, 0): "é", (0, 1): "日本", (1, 2): "b"}  # by the token before and the token
    decoder: Any = SimpleNamespace(token_bytes=lambda *ids: texts[ids].encode())
    infos = [TokenInfo(ids[1], text, -0.5, 1, []) for ids, text in texts.items()]
    assert [token.token for token in TokenTexts(decoder).chat_logprobs(infos, 0).content] == [*texts.values()]
    assert TokenTexts(decoder).completion_logprobs(infos, 0).text_offset == [0, 1, 3]
