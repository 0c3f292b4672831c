"""LoRA adapters on a real server: PEFT's answers, under load, with more adapters than the cache holds."""

import itertools
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tuning
from harness import Server, adapter_request, as_stream_request, output_tokens, running_server
from lora_files import BROKEN_LORA
from prompt_files import matrix, tgis, write
from transformers import AutoTokenizer
from tuning import Continuation, Tuned

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
COPIES = 6  # of the largest adapter; three of them fit into the 1 MiB cache


@pytest.fixture(scope="module")
def tuned(glassllm_dir: Path, cache_dir: Path) -> Tuned:
    return tuning.tuned("glassllm-lora", glassllm_dir, cache_dir)


@pytest.fixture(scope="module", params=["tgis_native", pytest.param("hf_transformers", marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, tuned: Tuned, glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    shutil.copytree(tuned.store, directory / "store")
    for number in range(COPIES):
        shutil.copytree(tuned.store / "queen", directory / "store" / "copies" / str(number))
    options: dict[str, Any] = {
        "DEPLOYMENT_FRAMEWORK": request.param,
        "ADAPTER_CACHE": directory / "store",
        "PROMPT_CACHE_SIZE_MB": 1,
        "MAX_SEQUENCE_LENGTH": 256,
        "DTYPE": "float32",
        "NUM_THREADS": 1,
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
    server: Server, stub: Stub, tuned: Tuned, glassllm_dir: Path
) -> None:
    """All adapters at once, beside inputs without one; unary and streamed."""
    tokenizer = AutoTokenizer.from_pretrained(glassllm_dir)
    texts = {tuple(tokenizer(text).input_ids): text for text in tuning.TUNING_PLANS["glassllm-lora"].inputs}

    rng, copies = random.Random(1), itertools.cycle(range(COPIES))
    wanted = rng.sample(4 * tuned.trained.continuations, 4 * len(tuned.trained.continuations))
    names = [f"copies/{next(copies)}" if one.prompt == "queen" else one.prompt for one in wanted]

    def ask(one: Continuation, name: str) -> tuple[list[str], list[str]]:
        request = call(texts[tuple(one.tokens)], name or None)
        stream = stub.GenerateStream(as_stream_request(request), timeout=60)
        return output_tokens(stub, request), [token.text for message in stream for token in message.tokens]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, wanted, names))
    for one, (unary, streamed) in zip(wanted, answers, strict=True):
        assert unary == streamed == tokenizer.convert_ids_to_tokens(one.generated)
    assert server.metric("tgi_prompt_load_duration_count") > len(set(names)) + 10
    assert server.metric("tgi_prompt_load_failure") == 0


def test_adapters_in_use_are_in_the_metrics(server: Server, stub: Stub) -> None:
    scrape = ""
    while 'running_lora_adapters="queen"' not in scrape:  # the stream may have ended before the scrape
        stream = stub.GenerateStream(as_stream_request(call("The Queen", "queen", 100)), timeout=60)
        next(stream), next(stream)
        scrape = server.get("/metrics")[1]
        assert len(list(stream)) > 0
    assert server.metric("tgi_lora_running_adapters") == 0


def test_broken_adapters_have_clear_errors_and_affect_no_other_request(server: Server, stub: Stub, store: Path) -> None:
    request = call("The Queen", "queen", 100)
    undisturbed = output_tokens(stub, request)
    running = stub.GenerateStream(as_stream_request(request), timeout=60)
    exact = 0
    for at, (files, text) in enumerate(BROKEN_LORA.values()):
        write(store / f"broken/{at}", files)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(call("a", f"broken/{at}"), timeout=20)
        error: Any = caught.value
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert error.details().startswith(f"can't retrieve adapter with id 'broken/{at}': ")
        exact += text in error.details()  # the other files do not even fit this model
        assert text in error.details() or "the model's layer has" in error.details() or "no linear" in error.details()
    assert exact > 30
    assert [token.text for message in running for token in message.tokens] == undisturbed
    assert output_tokens(stub, request) == undisturbed
    assert "Traceback" not in server.log.read_text()


def test_either_field_may_name_a_soft_prompt_or_an_adapter(stub: Stub, store: Path) -> None:
    """The files in the directory decide which it is; an adapter adds no input tokens."""
    write(store / "soft", tgis(matrix(3, 128)))
    assert output_tokens(stub, call("The Queen", "soft", 4)) != output_tokens(stub, call("The Queen", None, 4))
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
