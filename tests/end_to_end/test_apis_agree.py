"""One request through every API of a real server: gRPC, TGI's REST API and OpenAI's give the same tokens."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from golden_model import write_prompts
from harness import Server, running_server
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_exports import exported
from tokenizers import Tokenizer
from tuning import tuned

from benchmarks.soak.reconcile import parse_metrics
from tgis.pb import generation_pb2 as pb

PROMPTS = ["The Queen", "“Off with her head!” the Queen shouted", "very very very very"]
SOFT_PROMPT, LORAS = "tuned/hatter", ["queen", "nested/king", "alice"]
HITS = ("tgi_prefix_cache_hit_tokens_total",)
TITLES = ["the meeting of the team", "notes about the budget of next year"]


def requests(prompts: list[str], adapters: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    optional: dict[str, st.SearchStrategy[Any]] = {
        "top_k": st.integers(1, 40),
        "top_p": st.sampled_from([0.2, 0.9]),
        "repetition_penalty": st.sampled_from([0.9, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "stop": st.sampled_from([["e"], [" the", "\n"], ["never there"]]),
    }
    return st.fixed_dictionaries(
        {
            "prompt": st.sampled_from(prompts),
            "max_tokens": st.integers(1, 24),
            "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.5]),
            "seed": st.integers(0, 2**32 - 1),
        },
        optional=optional | ({"adapter": st.sampled_from(adapters)} if adapters else {}),
    )


@pytest.fixture(scope="module")
def server(glassllm_dir: Path, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("apis")
    shutil.copytree(tuned("glassllm-lora", glassllm_dir, cache_dir).store, directory / "store")
    write_prompts({SOFT_PROMPT: {"decoder.pt": "The Hatter was"}}, glassllm_dir, directory / "store")
    model = directory / "model"
    shutil.copytree(glassllm_dir, model)
    config = model / "generation_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"temperature": 0.001})
    )  # the best token, nearly always
    with running_server(directory, model, PREFIX_STORE_PATH=directory / "store", **OPTIONS) as running:
        yield running


OPTIONS: dict[str, Any] = {"DTYPE": "float32", "MAX_BEST_OF": 4, "MAX_SEQUENCE_LENGTH": 128}


@dataclass(frozen=True)
class Padded:
    """A server with padded batches."""

    server: Server
    tokenizer: Tokenizer
    prompts: list[str]
    start: str | None = None  # what the decoder of an encoder-decoder begins with


@pytest.fixture(scope="module", params=["hf_transformers", pytest.param("hf_optimum_ort", marks=pytest.mark.slow)])
def padded(
    request: pytest.FixtureRequest, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Padded]:
    """An encoder-decoder by transformers, a decoder by ONNX Runtime."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "hf_transformers":
        model, prompts, start = request.getfixturevalue("titles_dir"), TITLES, "<pad>"
    else:
        model, prompts, start = exported(request.getfixturevalue("glassllm_dir"), cache_dir), PROMPTS, None
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with running_server(directory, model, DEPLOYMENT_FRAMEWORK=request.param, **OPTIONS) as running:
        yield Padded(running, tokenizer, prompts, start)


@pytest.fixture(scope="module")
def tokenizer(glassllm_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(glassllm_dir / "tokenizer.json"))


def over_grpc(server: Server, request: dict[str, Any]) -> pb.GenerationResponse:
    names = ("temperature", "top_k", "top_p", "seed", "min_p")
    params = pb.Parameters(
        method=pb.SAMPLE if request["temperature"] else pb.GREEDY,
        sampling=pb.SamplingParameters(**{name: request[name] for name in names if name in request}),
        stopping=pb.StoppingCriteria(
            max_new_tokens=request["max_tokens"],
            stop_sequences=request.get("stop", []),
            stop_token_ids=request.get("stop_token_ids", ()),
        ),
        decoding=pb.DecodingParameters(
            repetition_penalty=request.get("repetition_penalty", 0),
            frequency_penalty=request.get("frequency_penalty", 0),
            bad_words=request.get("bad_words", ()),
            allowed_token_ids=request.get("allowed_token_ids", ()),
        ),
        response=pb.ResponseOptions(generated_tokens=True, token_logprobs=True, token_ids=True),
    )
    inputs = [pb.GenerationRequest(text=request["prompt"])]
    message = pb.BatchedGenerationRequest(requests=inputs, params=params, adapter_id=request.get("adapter"))
    response: pb.GenerationResponse
    with server.stub() as stub:
        (response,) = stub.Generate(message, timeout=60).responses
    return response


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    status, answer = server.post(path, body)
    assert status == 200, answer
    return answer


def over_tgi(server: Server, request: dict[str, Any]) -> Any:
    names = ("top_k", "top_p", "repetition_penalty", "frequency_penalty", "stop")
    parameters: dict[str, Any] = {name: request[name] for name in names if name in request}
    parameters |= {"max_new_tokens": request["max_tokens"], "details": True, "adapter_id": request.get("adapter")}
    if request["temperature"]:
        parameters |= {"do_sample": True, "temperature": request["temperature"], "seed": request["seed"]}
    else:
        parameters = {name: value for name, value in parameters.items() if name not in ("top_k", "top_p")}
    return post(server, "/generate", {"inputs": request["prompt"], "parameters": parameters})


def over_openai(server: Server, request: dict[str, Any]) -> Any:
    body = {name: value for name, value in request.items() if name != "adapter"}
    model = request.get("adapter")
    return post(server, "/v1/completions", body | {"model": model, "logprobs": 0, "include_stop_str_in_output": True})


@settings(max_examples=30, deadline=None)
@given(request=requests(PROMPTS, [SOFT_PROMPT, *LORAS]))
def test_all_apis_give_the_same_tokens(server: Server, tokenizer: Tokenizer, request: dict[str, Any]) -> None:
    check_apis(server, tokenizer, request)


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_all_apis_give_the_same_tokens_of_padded_batches(padded: Padded, data: st.DataObject) -> None:
    check_apis(padded.server, padded.tokenizer, data.draw(requests(padded.prompts, [])))


def check_apis(server: Server, tokenizer: Tokenizer, request: dict[str, Any]) -> None:
    grpc, tgi, openai = over_grpc(server, request), over_tgi(server, request), over_openai(server, request)
    (choice,) = openai["choices"]
    assert tgi["generated_text"] == choice["text"] == grpc.text
    details = tgi["details"]
    assert [(token["id"], token["special"]) for token in details["tokens"]] == [
        (token.id, token.special) for token in grpc.tokens
    ]
    assert [tokenizer.id_to_token(token["id"]) for token in details["tokens"]] == [one.text for one in grpc.tokens]
    logprobs = [one.logprob for one in grpc.tokens]
    assert [token["logprob"] for token in details["tokens"]] == pytest.approx(logprobs, abs=1e-6)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-6)
    assert details["seed"] == (grpc.seed if request["temperature"] else None)
    usage = openai["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (grpc.input_token_count, grpc.generated_token_count)
    assert details["generated_tokens"] == grpc.generated_token_count
    ended = grpc.stop_reason in (pb.EOS_TOKEN, pb.STOP_SEQUENCE)
    assert choice["finish_reason"] == ("stop" if ended else "length")
    reasons = {pb.EOS_TOKEN: "eos_token", pb.STOP_SEQUENCE: "stop_sequence", pb.MAX_TOKENS: "length"}
    at_most = grpc.generated_token_count == request["max_tokens"]  # comes first in TGI
    assert details["finish_reason"] == ("length" if at_most else reasons[grpc.stop_reason])


@pytest.mark.parametrize("field", ["min_p", "bad_words", "stop_token_ids", "allowed_token_ids"])
def test_parameters_of_vllm_are_the_same_over_grpc(server: Server, tokenizer: Tokenizer, field: str) -> None:
    request: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 1.0, "seed": 5}
    without = over_grpc(server, request)
    ids = [token.id for token in without.tokens]
    given = {
        "min_p": 0.6,
        "bad_words": [tokenizer.decode([ids[4]])],
        "stop_token_ids": [ids[4]],
        "allowed_token_ids": sorted({*range(20, 60)} - {*ids}),
    }
    request[field] = given[field]
    (choice,), grpc = over_openai(server, request)["choices"], over_grpc(server, request)
    assert choice["text"] == grpc.text != without.text
    assert choice["finish_reason"] == ("stop" if grpc.stop_reason == pb.EOS_TOKEN else "length")


def test_sampling_defaults_are_the_models_in_openais_api_only(server: Server) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 20}
    texts = {post(server, "/v1/completions", body | {"seed": seed})["choices"][0]["text"] for seed in range(3)}
    assert texts == {over_grpc(server, body | {"temperature": 0}).text}
    sampled = {"do_sample": True, "max_new_tokens": 20}
    others = [{"inputs": PROMPTS[0], "parameters": sampled | {"seed": seed}} for seed in range(3)]
    assert len({post(server, "/generate", other)["generated_text"] for other in others}) > 1
    given = [over_openai(server, body | {"seed": seed, "temperature": 1})["choices"][0]["text"] for seed in range(3)]
    assert len(set(given)) > 1


def test_logprobs_of_a_prompt_are_those_of_its_echo(server: Server, tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    (choice,) = post(server, "/v1/completions", body)["choices"]
    ids = tokenizer.encode(PROMPTS[0]).ids
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [{rank for each in one.values() if (rank := each["rank"]) == 1} for one in others] == [{1}] * len(others)
    own = [one[str(token)] for token, one in zip(ids[1:], others, strict=True)]
    assert [one["logprob"] for one in own] == choice["logprobs"]["token_logprobs"][1:]
    assert [one["decoded_token"] for one in own] == choice["logprobs"]["tokens"][1:]
    candidates = choice["logprobs"]["top_logprobs"][1:]
    for one, tops, text in zip(own, candidates, choice["logprobs"]["tokens"][1:], strict=True):
        assert tops[text] == one["logprob"]  # whether or not it is one of the best
        assert len(tops) == 3 + (one["rank"] > 3)


def test_outputs_of_one_prompt_share_its_prefill(server: Server) -> None:
    """And are those of the seeds that follow the given one."""
    prompt = " ".join(f"the {word} said" for word in ("Queen", "King", "Hatter", "Hare", "Mouse") * 4)
    before = parse_metrics(server.get("/metrics")[1])
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 1.2, "seed": 41}
    many = post(server, "/v1/completions", body | {"n": 4})
    after = parse_metrics(server.get("/metrics")[1])
    length = many["usage"]["prompt_tokens"]
    assert length > 48
    found = after[HITS] - before[HITS]
    assert found >= 3 * (length - length % 16 - 16)
    alone = [post(server, "/v1/completions", body | {"seed": 41 + number}) for number in range(4)]
    assert [choice["text"] for choice in many["choices"]] == [one["choices"][0]["text"] for one in alone]
    assert len({choice["text"] for choice in many["choices"]}) > 1


def test_several_outputs_of_padded_batches(padded: Padded) -> None:
    """Each is what its seed gives alone; the best has the highest mean logprob."""
    body = {"prompt": padded.prompts[0], "max_tokens": 12, "temperature": 1.3, "seed": 41, "logprobs": 0}
    many = post(padded.server, "/v1/completions", body | {"n": 4})
    alone = [post(padded.server, "/v1/completions", body | {"seed": 41 + number})["choices"][0] for number in range(4)]
    assert [choice["text"] for choice in many["choices"]] == [choice["text"] for choice in alone]
    assert len({choice["text"] for choice in alone}) > 1
    best = post(padded.server, "/v1/completions", body | {"best_of": 4})["choices"][0]["text"]
    means = [sum(logprobs) / len(logprobs) for logprobs in (choice["logprobs"]["token_logprobs"] for choice in alone)]
    assert best == alone[means.index(max(means))]["text"]
    parameters = {"best_of": 3, "do_sample": True, "max_new_tokens": 8, "details": True, "decoder_input_details": True}
    details = post(padded.server, "/generate", {"inputs": padded.prompts[0], "parameters": parameters})["details"]
    others = details["best_of_sequences"]
    means = [sum(token["logprob"] for token in one["tokens"]) / len(one["tokens"]) for one in (details, *others)]
    assert (len(others), max(means)) == (2, means[0])
    expected = [padded.start] if padded.start else padded.tokenizer.encode(padded.prompts[0]).tokens
    for one in (details, *others):
        assert [padded.tokenizer.id_to_token(token["id"]) for token in one["prefill"]] == expected
        assert one["prefill"][0]["logprob"] is None
