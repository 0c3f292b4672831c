"""OpenAI's API with OpenAI's client: a server in this process with the fake engine, which repeats its prompt."""

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import msgspec
import openai
import pytest
from chat_templates import LAST_MESSAGE, write_template
from harness import wait_until
from local_server import LocalServer, serving_locally
from openai.types.chat import ChatCompletionChunk
from tables import table
from tokenizers import Tokenizer

from benchmarks.soak.reconcile import parse_metrics
from demo.fake_model import make_fake_model
from tgis import __version__
from tgis.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from tgis.api.openai.responses import ResponsesRequest
from tgis.api.tgi.schema import GenerateParameters, GenerateRequest
from tgis.pb import generation_pb2 as pb

MAX_LENGTH, NAME = 200, "served"
IM_END = "<|im_end|>"  # a special token, 257, that the model's configuration does not know as an end


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("openai")
    model = make_fake_model(directory / "model", MAX_LENGTH, step_seconds=0.002, poison_token=0, block_size=16)
    write_template(model, LAST_MESSAGE)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([IM_END])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 258}))
    adapter = directory / "store" / "tuned" / "one"
    adapter.mkdir(parents=True)
    (adapter / "decoder.pt").touch()
    options = {"SERVED_MODEL_NAME": NAME, "PREFIX_STORE_PATH": directory / "store", "MAX_NEW_TOKENS": 169}
    with serving_locally(directory, model, **options) as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    url = f"http://localhost:{server.http_port}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=50) as made:
        yield made


def chat(client: openai.OpenAI, content: str, **params: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(**{"model": NAME, "messages": messages, "max_tokens": 20} | params)


def streamed(client: openai.OpenAI, content: str, **params: Any) -> list[ChatCompletionChunk]:
    return list(chat(client, content, stream=True, **params))


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_a_chat_and_its_stream(client: openai.OpenAI) -> None:
    answer = chat(client, "hällo ")
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("hällo hällo hällo"[:17], "length")
    assert (answer.model, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (NAME, 7, 20)
    *rest, last = streamed(client, "hällo ", stream_options={"include_usage": True})
    assert text_of(rest) == choice.message.content
    assert (last.usage, rest[-1].choices[0].finish_reason) == (answer.usage, "length")


@pytest.mark.parametrize("parts", [False, True])
def test_a_prediction_changes_nothing_but_usage(client: openai.OpenAI, parts: bool) -> None:
    plain, text = chat(client, "abcd"), "abcdXabc"
    content = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}] if parts else text
    prediction = {"type": "content", "content": content}
    answer = chat(client, "abcd", prediction=prediction)
    assert (answer.choices, answer.usage.prompt_tokens) == (plain.choices, plain.usage.prompt_tokens)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 2)  # not X, and a behind it
    *_, last = streamed(client, "abcd", prediction=prediction, stream_options={"include_usage": True})
    assert last.usage is not None
    assert last.usage.completion_tokens_details == details
    with pytest.raises(openai.BadRequestError, match="prediction must have at most 169 tokens") as caught:
        chat(client, "abcd", prediction={"type": "content", "content": "x" * 170})
    assert caught.value.param == "prediction"


CITIES: Any = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"]}
CITIES |= {"additionalProperties": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "content", "cities"),
    [
        ("required", "What is the weather?", ["Oslo"]),  # the engine takes the first token that is allowed
        ("auto", CALL.replace("Paris", "Paree"), ["Paris"]),
        ("auto", "It rains.", []),
    ],
)
def test_calls_that_match_their_schema(client: openai.OpenAI, choice: Any, content: str, cities: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITIES, "strict": True}}]
    params: Any = {"tools": tools, "tool_choice": choice, "max_tokens": 100, "parallel_tool_calls": False}
    params |= {"stop": "rains."} if not cities else {}
    (said,) = chat(client, content, **params).choices
    calls = [call.function for call in said.message.tool_calls or ()]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": c}) for c in cities]
    chunks = streamed(client, content, **params)
    pieces: Any = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.arguments for piece in pieces) == "".join(call.arguments for call in calls)
    assert text_of(chunks) == (said.message.content or "")
    assert chunks[-1].choices[0].finish_reason == said.finish_reason == ("tool_calls" if cities else "stop")


def test_several_prompts_of_token_ids(client: openai.OpenAI) -> None:
    params: Any = {"model": NAME, "prompt": [[64, 65], [2, 256, 2]], "max_tokens": 4, "n": 2, "temperature": 1}
    answer = client.completions.create(**params)
    assert [choice.text for choice in answer.choices] == ["abab", "abab", "#", "#"]
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2 * 4 + 2 * 2)
    chunks = list(client.completions.create(**params, echo=True, logprobs=0, stream=True))
    for choice, prompt in zip(answer.choices, ["ab", "ab", "#</s>#", "#</s>#"], strict=True):
        mine = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in mine) == prompt + choice.text
        assert "".join(token for part in mine for token in part.logprobs.tokens).startswith(prompt + choice.text)
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


@table("parameters", "stops at tokens")
def test_stops_at_tokens(client: openai.OpenAI, row: dict[str, Any]) -> None:
    ways: list[dict[str, Any]] = [{}, {"stream": True, "stream_options": {"include_usage": True}}]
    for options in ways:
        answer: Any = client.completions.create(model="", prompt=f"ab{IM_END}d", extra_body=row["fields"], **options)
        chunks = list(answer) if options else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
        assert "".join(choice.text for choice in choices) == row["text"]
        assert (choices[-1].finish_reason, chunks[-1].usage.completion_tokens) == ("stop", row["tokens"])


def test_models(client: openai.OpenAI) -> None:
    _, second = client.models.list().data
    assert client.models.retrieve("tuned/one") == second
    with pytest.raises(openai.NotFoundError, match="`two\nlines` does not exist"):
        client.models.retrieve("two\nlines")
    with pytest.raises(openai.BadRequestError, match="takes no adapters"):
        chat(client, "ab", model="tuned/one")


NO_NOT = {"function": {"name": "x", "strict": True, "parameters": {"not": {}}}}


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_the_generator_refuses(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=r'keywords: \["not"\] in tools\[0\].function.param') as caught:
        chat(client, "abc", stream=stream, tools=[NO_NOT])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match=r"prompt\[1\] gives token id 258"):
        client.completions.create(model=NAME, prompt=[[1], [258]], stream=stream)
    with pytest.raises(openai.InternalServerError, match="failed during generation"):
        chat(client, "!", stream=stream)  # a poisoned token


def test_an_answer_is_shortened_to_what_fits(client: openai.OpenAI) -> None:
    answer = chat(client, "x" * 190, max_tokens=2048)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (10, "length")


def test_cached_tokens_are_counted(client: openai.OpenAI) -> None:
    usages = [chat(client, "cached " * 20, max_tokens=2).usage for _ in range(2)]
    usages += [streamed(client, "cached " * 20, stream_options={"include_usage": True})[-1].usage]
    first, second, third = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert (first, second, third) == (0, 128, 128)  # full blocks


def test_routes_of_vllm(server: LocalServer) -> None:
    ids, chats = [71, 127, 102], {"messages": [{"role": "user", "content": "hé"}]}
    for body, strings in (({"prompt": "hé", "return_token_strs": "true"}, ["h", "Ã", "©"]), (chats, None)):
        expected = {"count": 3, "max_model_len": MAX_LENGTH, "tokens": ids, "token_strs": strings}
        assert server.post("/tokenize", body) == (200, expected)
    assert server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "hé"})
    assert server.post("/chat/completions", chats | {"max_tokens": "1"})[0] == 200
    models = json.loads(server.get("/models")[1])["data"]
    common = {"created": min(1e10, max(models[0]["created"], 1.7e9)), "owned_by": "tgis", "max_model_len": MAX_LENGTH}
    named: Any = [{"id": NAME, "parent": None}, {"id": "tuned/one", "parent": NAME}]
    assert models == [common | {"object": "model"} | names for names in named]
    assert json.loads(server.get("/load")[1]) == {"server_load": 0}
    assert server.get("/debug/batch")[0] == 404
    assert json.loads(server.get("/version")[1]) == {"version": __version__}


SECRET = "a secret of a client that no error tells to anyone else"
SCHEMA = {"properties": {"x": {"pattern": f"{SECRET}("}, SECRET: {"$ref": SECRET, "const": f"{SECRET}\\ud800"}}}
BODIES: dict[str, list[type]] = {
    "/v1/chat/completions": [ChatCompletionRequest],
    "/v1/completions": [CompletionRequest],
    "/v1/responses": [ResponsesRequest],
    "/generate": [GenerateRequest, GenerateParameters],
    "/invocations": [ChatCompletionRequest],
}


@pytest.mark.parametrize("path", BODIES)
def test_errors_tell_no_text_of_a_request(server: LocalServer, path: str) -> None:
    function = {"name": SECRET, "parameters": SCHEMA, "arguments": SECRET, "strict": True}
    messages = [{"role": "assistant", "content": SECRET, "tool_calls": [{"function": function}]}]
    base: dict[str, Any] = {"messages": messages, "prompt": SECRET, "inputs": SECRET, "max_tokens": 1}
    if path == "/v1/responses":
        base = {"input": [{"role": "assistant", "content": SECRET}, {"type": "function_call", **function}]}
    changes: list[dict[str, Any]] = [{"tools": [{"function": function}], "tool_choice": "required"}]
    changes += [{"grammar": {"type": kind, "value": SCHEMA}} for kind in ("json", "regex", SECRET)]
    for name in sorted(field.encode_name for kind in BODIES[path] for field in msgspec.structs.fields(kind)):
        changes += [{name: value} for value in (SECRET, [SECRET], SCHEMA)]
    for change in changes:
        body = base | {"parameters": {"max_new_tokens": 1} | change} | change
        status, answer = server.post(path, body)
        assert status == 200 or (status < 500 and SECRET[:41] not in json.dumps(answer)), (change, answer)


def test_calls_are_counted_and_logged_with_their_api(server: LocalServer, client: openai.OpenAI) -> None:
    def counts() -> dict[tuple[str, ...], float]:
        values = parse_metrics(server.get("/metrics")[1])
        return {name[1:]: value for name, value in values.items() if name[0] == "tgi_call_count_total"}

    before, chats = counts(), "/v1/chat/completions"
    chat(client, "abc")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            chat(client, "abc", temperature=-1, stream=stream)
    with pytest.raises(openai.APIError):
        list(chat(client, "abc!", stream=True))  # fails after three tokens
    server.post("/generate", {"inputs": ""})
    with server.stub() as stub, pytest.raises(grpc.RpcError):
        stub.GenerateStream(pb.SingleGenerationRequest()).next()
    wanted = {("openai", chats, "200"): 1, ("openai", chats, "400"): 2, ("openai", chats, "500"): 1}
    wanted |= {("tgi", "/generate", "422"): 1, ("grpc", "GenerateStream", "INVALID_ARGUMENT"): 1}

    def all_counted() -> bool:
        grown = {name: value - before.get(name, 0) for name, value in counts().items()}
        return {name: value for name, value in grown.items() if value} == wanted

    wait_until(all_counted, f"counts {wanted}")  # a call over gRPC ends for its client before it is counted
    assert re.search(r"single request: 20 tokens, MAX_TOKENS .*api=openai ", server.log.read_text())


def test_routes_of_tgi_take_chats(server: LocalServer) -> None:
    body = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 3, "temperature": 0}
    status, answer = server.post("/chat_tokenize", body)
    assert (status, answer["templated_text"]) == (200, "hé")
    spans = [(token["start"], token["stop"], token["text"]) for token in answer["tokenize_response"]]
    assert spans == [(0, 1, "h"), (1, 3, "é"), (1, 3, "é")]
    status, answer = server.post("/invocations", body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "hé")
