"""LoRA adapters and soft prompts on a real server: PEFT's answers, under load, with more than the cache holds."""

import itertools
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tuning
from harness import Server, adapter_request, as_stream_request, failure, output_tokens, running_server
from transformers import AutoTokenizer
from tuning import Continuation, Tuned

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
COPIES = 6  # of the largest adapter; three of them fit into the 1 MiB cache


@pytest.fixture(scope="module")
def tuned(glassllm_dir: Path, cache_dir: Path) -> list[Tuned]:
    """LoRA adapters, and soft prompts."""
    return [tuning.tuned(name, glassllm_dir, cache_dir) for name in ("glassllm-lora", "glassllm")]


@pytest.fixture(scope="module", params=["tgis_native", pytest.param("hf_transformers", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, tuned: list[Tuned], glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    shutil.copytree(tuned[0].store, directory / "store")
    shutil.copytree(tuned[1].store, directory / "store" / "soft")
    for number in range(COPIES):
        shutil.copytree(tuned[0].store / "queen", directory / "store" / "copies" / str(number))
    options: dict[str, Any] = {
        "DEPLOYMENT_FRAMEWORK": request.param,
        "ADAPTER_CACHE": directory / "store",
        "PROMPT_CACHE_SIZE_MB": 1,
        "MAX_SEQUENCE_LENGTH": 256,
        "DTYPE": "float32",
    }
    with running_server(directory, glassllm_dir, **options) as running:
        yield running


@pytest.fixture
def store(server: Server) -> Path:
    return server.log.parent / "store"


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as made:
        yield made


def call(text: str, adapter: str | None, new: int = tuning.MAX_NEW_TOKENS) -> pb.BatchedGenerationRequest:
    return adapter_request(text, new, adapter_id=adapter)


def test_more_adapters_than_fit_into_the_cache_under_load(
    server: Server, stub: Stub, tuned: list[Tuned], glassllm_dir: Path
) -> None:
    """All adapters and soft prompts at once, beside inputs without one; unary and streamed."""
    tokenizer = AutoTokenizer.from_pretrained(glassllm_dir)
    texts = {tuple(tokenizer(text).input_ids): text for text in tuning.INPUTS}
    loras, prompts = (one.continuations for one in tuned)
    copies = itertools.cycle(range(COPIES))
    wanted = [(one, f"copies/{next(copies)}" if one.prompt == "queen" else one.prompt) for one in 4 * loras]
    wanted += [(one, f"soft/{one.prompt}") for one in prompts if one.prompt]
    random.Random(1).shuffle(wanted)

    def ask(one: Continuation, name: str) -> tuple[list[str], list[str]]:
        request = call(texts[tuple(one.tokens)], name or None)
        stream = stub.GenerateStream(as_stream_request(request), timeout=60)
        return output_tokens(stub, request), [token.text for message in stream for token in message.tokens]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, *zip(*wanted, strict=True)))
    for (one, _), (unary, streamed) in zip(wanted, answers, strict=True):
        assert unary == streamed == tokenizer.convert_ids_to_tokens(one.generated)
    assert server.metric("tgi_prompt_load_duration_count") > len({name for _, name in wanted}) + 10
    assert server.metric("tgi_prompt_load_failure") == 0


def test_adapters_in_use_are_in_the_metrics(server: Server, stub: Stub) -> None:
    scrape = ""
    while 'running_lora_adapters="queen"' not in scrape:  # the stream may have ended before the scrape
        time.sleep(0.25)  # then a scrape does not wait
        stream = stub.GenerateStream(as_stream_request(call("The Queen", "queen", 100)), timeout=60)
        next(stream), next(stream)
        scrape = server.get("/metrics")[1]
        assert len(list(stream)) > 0
    assert server.metric("tgi_lora_running_adapters") == 0


def test_either_field_may_name_a_soft_prompt_or_an_adapter(stub: Stub) -> None:
    """The files in the directory decide which it is; an adapter adds no input tokens."""
    assert output_tokens(stub, call("The Queen", "soft/queen", 4)) != output_tokens(stub, call("The Queen", None, 4))
    by_adapter = stub.Generate(call("The Queen", "queen"), timeout=60).responses[0]
    request = call("The Queen", None)
    assert by_adapter.input_token_count == stub.Generate(request, timeout=60).responses[0].input_token_count
    request.prefix_id = "queen"
    assert stub.Generate(request, timeout=60).responses[0] == by_adapter
    tokenized = stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="a")], adapter_id="queen"))
    assert tokenized.responses[0].token_count == 1


def test_a_replaced_adapter_is_used_at_once(stub: Stub, store: Path) -> None:
    shutil.copytree(store / "queen", store / "changing")
    request = call("The Hatter", "changing")
    first = output_tokens(stub, request)
    shutil.copytree(store / "mouse", store / "new")
    running = [stub.GenerateStream(as_stream_request(request), timeout=60) for _ in range(8)]
    for one in running:
        next(one)  # its adapter is resolved
    shutil.rmtree(store / "changing")
    (store / "new").rename(store / "changing")
    assert first != output_tokens(stub, request) == output_tokens(stub, call("The Hatter", "mouse"))
    assert all([token.text for message in one for token in message.tokens] == first for one in running)


def prompt_call(prompt: str, new: int = 6) -> pb.BatchedGenerationRequest:
    return adapter_request("The Hatter", new, prefix_id=prompt)


def failed(stub: Stub, request: pb.BatchedGenerationRequest) -> tuple[grpc.StatusCode, str]:
    return failure(lambda: stub.Generate(request, timeout=20))


def test_long_and_hostile_ids_are_truncated_and_escaped(stub: Stub) -> None:
    _, details = failed(stub, prompt_call("x" * 100_000))
    assert details.startswith(f"can't retrieve prompt prefix with id '{'x' * 100}...': the id must contain only")
    _, details = failed(stub, prompt_call("a\nfake log line\x1b[2J"))
    assert details.startswith("can't retrieve prompt prefix with id 'a?fake log line?[2J': ")


def test_a_prompt_stays_valid_for_the_requests_that_have_resolved_it(stub: Stub, store: Path) -> None:
    """Its files are deleted and its cache entry is evicted while requests wait and run."""
    shutil.copytree(store / "soft/queen", store / "leaving")
    request = prompt_call("leaving", 60)
    expected = output_tokens(stub, request)
    running = [stub.GenerateStream(as_stream_request(request), timeout=60) for _ in range(80)]  # 64 run at once
    for one in running:
        next(one)  # the first message shows that the prompt is resolved
    shutil.rmtree(store / "leaving")
    assert "not found" in failed(stub, request)[1]
    assert all([token.text for message in one for token in message.tokens] == expected for one in running)


def test_clients_that_disconnect_during_lookups_leave_nothing_running(server: Server, stub: Stub) -> None:
    for _ in range(30):
        stub.Generate.future(prompt_call("soft/queen", 100)).cancel()
    assert output_tokens(stub, prompt_call("soft/queen"))
    server.wait_for_metric("tgi_batch_current_size 0.0")
