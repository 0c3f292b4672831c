"""Honest calls over HTTP, to TGI's API and to OpenAI's."""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.chaos.http2 import Target
from benchmarks.soak.calls import CALL_TIMEOUT_SECONDS
from benchmarks.soak.cases import Case

_STATUSES = {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
_INTERNAL = (424, 500)  # of TGI, and of OpenAI


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """What both APIs tell of an output."""

    text: str
    num_tokens: int
    cut_off: bool  # by the limit of tokens


async def ask(
    target: Target, token: str, case: Case, *, stream: bool, openai: bool
) -> ApiAnswer | tuple[str | None, str]:
    """The answer to a case with one text; or the status of gRPC that it has failed with, None without any, and why."""
    path, body = _openai_request(case, stream) if openai else _tgi_request(case, stream)
    url, headers = f"https://localhost:{target.api_port}{path}", {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(CALL_TIMEOUT_SECONDS)
    tls = target.tls("http/1.1")
    assert tls is not None
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
            http.post(url, json=body, ssl=tls) as answer,
        ):
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        return None, repr(error)
    events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")] if stream else [text]
    values = [json.loads(event) for event in events if event != "[DONE]"] if answer.status == 200 else []
    if not values or "error" in values[-1]:
        status = "INTERNAL" if answer.status in (200, *_INTERNAL) else _STATUSES.get(answer.status, str(answer.status))
        return status, f"{answer.status}: {text[-300:]}"
    return _openai_answer(values) if openai else _tgi_answer(values, stream=stream)


def _tgi_request(case: Case, stream: bool) -> tuple[str, Any]:
    stopping = case.params.stopping
    params = {"max_new_tokens": stopping.max_new_tokens, "stop": list(stopping.stop_sequences), "details": True}
    return "/generate_stream" if stream else "/generate", {"inputs": case.texts[0], "parameters": params}


def _tgi_answer(values: list[Any], *, stream: bool) -> ApiAnswer:
    last = values[-1]
    details = last["details"]
    num_tokens = len(values) if stream else len(details["tokens"])
    assert num_tokens == details["generated_tokens"], "an event or a token is missing"
    return ApiAnswer(last["generated_text"], num_tokens, details["finish_reason"] == "length")


def _openai_request(case: Case, stream: bool) -> tuple[str, Any]:
    stopping = case.params.stopping
    body = {"prompt": case.texts[0], "max_tokens": stopping.max_new_tokens, "stop": list(stopping.stop_sequences)}
    body |= {"include_stop_str_in_output": True, "temperature": 0, "stream": stream}
    return "/v1/completions", body | ({"stream_options": {"include_usage": True}} if stream else {})


def _openai_answer(values: list[Any]) -> ApiAnswer:
    choices = [choice for value in values for choice in value["choices"]]
    num_tokens = values[-1]["usage"]["completion_tokens"]
    return ApiAnswer("".join(each["text"] for each in choices), num_tokens, choices[-1]["finish_reason"] == "length")
