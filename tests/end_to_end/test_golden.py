"""Golden cases: real servers answer what an oracle built on transformers answers, and all APIs give the same tokens.

A case is an entry in golden/cases/*.yaml. A new one needs no code, only `python tests/support/golden_oracle.py`.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_runner
import pytest
from golden_cases import Case, cases, expected_answers, servers
from golden_model import write_prompts
from harness import Server, running_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import REPOSITORY, python_path
from tokenizers import Tokenizer
from tuning import tuned

from tgis.pb import generation_pb2 as pb

SEED = 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MARKS = {name: [pytest.mark.slow] if spec.slow else [] for name, spec in servers().items()}
CASES = [pytest.param(case.server, case, id=case.id, marks=MARKS[case.server]) for case in cases()]


@pytest.fixture(scope="module")
def name(request: pytest.FixtureRequest) -> str:
    """The name of a server in golden/servers.yaml."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    name: str, request: pytest.FixtureRequest, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    spec, directory = servers()[name], tmp_path_factory.mktemp(name)
    original = request.getfixturevalue(f"{spec.model}_dir")
    model = spec.model_directory(original, directory / "model")
    options = spec.options | {"DTYPE": "float32"}
    if spec.hub_cache:
        model, options[spec.hub_cache] = Path(f"tgis/{name}"), _hub_cache(directory / "hub", f"tgis/{name}", model)
    if name == "glassllm":
        shutil.copytree(tuned("glassllm-lora", original, cache_dir).store, directory / "prompts")
    if spec.prompts:
        write_prompts(spec.prompts, original, directory / "prompts")
        options["PREFIX_STORE_PATH"] = directory / "prompts"
    with running_server(directory, model, **options) as running:
        yield running
        assert running.get("/metrics")[0] == 200
        assert running.stop() == 0


@pytest.fixture(scope="module")
def problems(name: str, server: Server) -> dict[str, list[str]]:
    """The problems of all cases of one server, by case id."""
    found = asyncio.run(golden_runner.run(server.target, [case for case in cases() if case.server == name], SEED))
    if any(found.values()):
        print(server.log.read_text()[-10_000:])
    return found


def _hub_cache(cache: Path, name: str, model: Path) -> Path:
    """A cache as huggingface_hub lays it out, with one model."""
    entry = cache / "--".join(["models", *name.split("/")])
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    (entry / "snapshots").mkdir()
    (entry / "snapshots" / COMMIT).symlink_to(model.absolute())
    return cache


@pytest.mark.parametrize(("name", "case"), CASES, indirect=["name"], scope="module")
def test_case(problems: dict[str, list[str]], case: Case) -> None:
    if lines := problems[case.id]:
        pytest.fail("\n".join(lines), pytrace=False)


@pytest.mark.slow
def test_the_oracle_still_gives_the_expected_answers() -> None:
    """The expected answers belong to the current cases, models and oracle."""
    command = [sys.executable, "tests/support/golden_oracle.py", "--check"]
    environ = os.environ | {"PYTHONPATH": python_path(REPOSITORY), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, check=False, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


def test_every_expected_answer_has_a_case() -> None:
    for file in {case.file for case in cases()}:
        names = [case.name for case in cases() if case.file == file and case.needs_oracle]
        assert list(expected_answers(file)) == names, f"{file}: run `python tests/support/golden_oracle.py`"


def test_the_cases_that_the_documentation_names_exist() -> None:
    """As `file: case` of a golden case, or as the node id of another test."""
    text = (REPOSITORY / "docs" / "compatibility.md").read_text()
    table = text.split("| Behaviour | Cases |")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+: [^`]+)`", table))
    assert len(named) > 50
    assert named <= {case.id for case in cases()}
    for file, _, test in (name.partition("::") for name in re.findall(r"`(tests/[^`]+)`", table)):
        assert f"def {test}" in (REPOSITORY / file).read_text(), test


# One request through every API: gRPC, TGI's REST API and the OpenAI API

on_glassllm = pytest.mark.parametrize("name", ["glassllm"], indirect=True, scope="module")
PROMPTS = ["The Queen", "“Off with her head!” the Queen shouted", "very very very very"]
REQUESTS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS),
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.5]),
        "seed": st.integers(0, 2**32 - 1),
    },
    optional={
        "top_k": st.integers(1, 40),
        "top_p": st.sampled_from([0.2, 0.9]),
        "repetition_penalty": st.sampled_from([0.9, 1.3]),
        "frequency_penalty": st.sampled_from([-0.5, 0.7]),
        "stop": st.sampled_from([["e"], [" the", "\n"], ["never there"]]),
        "adapter": st.sampled_from(["tuned/hatter", "queen", "nested/king", "alice"]),
    },
)


@pytest.fixture(scope="module")
def tokenizer(glassllm_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(glassllm_dir / "tokenizer.json"))


def over_grpc(server: Server, request: dict[str, Any]) -> pb.GenerationResponse:
    names = ("temperature", "top_k", "top_p", "seed")
    params = pb.Parameters(
        method=pb.SAMPLE if request["temperature"] else pb.GREEDY,
        sampling=pb.SamplingParameters(**{name: request[name] for name in names if name in request}),
        stopping=pb.StoppingCriteria(
            max_new_tokens=request["max_tokens"],
            stop_sequences=request.get("stop", []),
        ),
        decoding=pb.DecodingParameters(
            repetition_penalty=request.get("repetition_penalty", 0),
            frequency_penalty=request.get("frequency_penalty", 0),
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


@on_glassllm
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(request=REQUESTS)
def test_all_apis_give_the_same_tokens(server: Server, tokenizer: Tokenizer, request: dict[str, Any]) -> None:
    grpc, tgi, openai = over_grpc(server, request), over_tgi(server, request), over_openai(server, request)
    (choice,) = openai["choices"]
    assert tgi["generated_text"] == choice["text"] == grpc.text
    details = tgi["details"]
    assert [(each["id"], each["special"]) for each in details["tokens"]] == [(t.id, t.special) for t in grpc.tokens]
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


@on_glassllm
def test_sampling_defaults_are_the_models_in_the_openai_api_only(server: Server) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 20}
    texts = {post(server, "/v1/completions", body | {"seed": seed})["choices"][0]["text"] for seed in range(3)}
    assert texts == {over_grpc(server, body | {"temperature": 0}).text}
    sampled = [over_tgi(server, body | {"seed": seed, "temperature": 1})["generated_text"] for seed in range(3)]
    assert len(set(sampled)) > 1
