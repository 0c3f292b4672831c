"""Soft prompts on a real server: PEFT's answers, under load, while files change and break."""

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import tuning
from harness import Server, adapter_request, as_stream_request, output_tokens, running_server
from prompt_files import matrix, peft, write
from transformers import AutoTokenizer
from tuning import Tuned

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
LENGTH, ROWS, PROMPTS = 512, 200, 50  # sequence length, virtual tokens of each prompt; ten such prompts fit into 1 MiB
NEW_TOKENS = 6
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def tuned(glassllm_dir: Path, cache_dir: Path) -> Tuned:
    return tuning.tuned("glassllm", glassllm_dir, cache_dir)


@pytest.fixture(scope="module")
def store(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "store"
    shutil.copytree(tuned.store, path)
    return path


@pytest.fixture(scope="module")
def server(store: Path, glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {
        "PREFIX_STORE_PATH": store,
        "PROMPT_CACHE_SIZE_MB": 1,
        "MAX_SEQUENCE_LENGTH": LENGTH,
        "DTYPE": "float32",
        "NUM_THREADS": 1,
    }
    with running_server(tmp_path_factory.mktemp("server"), glassllm_dir, **options) as running:
        yield running


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as made:
        yield made


def call(text: str, prompt: str | None, new: int = NEW_TOKENS) -> pb.BatchedGenerationRequest:
    return adapter_request(text, new, prefix_id=prompt)


def failure(stub: Stub, request: pb.BatchedGenerationRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(request, timeout=20)
    error: Any = caught.value
    return error.code(), error.details()


def test_trained_prompts_give_what_peft_generates(stub: Stub, tuned: Tuned, glassllm_dir: Path) -> None:
    """All prompts at once, beside inputs without one; unary and streamed."""
    tokenizer = AutoTokenizer.from_pretrained(glassllm_dir)

    def ask(one: tuning.Continuation) -> tuple[list[str], list[str]]:
        text = next(text for text in tuning.TUNING_PLANS["glassllm"].inputs if tokenizer(text).input_ids == one.tokens)
        request = call(text, one.prompt or None, tuning.MAX_NEW_TOKENS)
        stream = stub.GenerateStream(as_stream_request(request), timeout=60)
        streamed = [token.text for message in stream for token in message.tokens]
        return output_tokens(stub, request), streamed

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, tuned.trained.continuations))
    for one, (unary, streamed) in zip(tuned.trained.continuations, answers, strict=True):
        assert unary == streamed == tokenizer.convert_ids_to_tokens(one.generated)


def test_unsupported_adapter_types_are_named(stub: Stub, store: Path) -> None:
    write(store / "ia3", peft({"ia3": matrix()}, peft_type="IA3"))
    wanted = (grpc.StatusCode.INVALID_ARGUMENT, "adapter type IA3 is not currently supported")
    inputs = [pb.GenerationRequest(text="a")]
    assert failure(stub, pb.BatchedGenerationRequest(requests=inputs, prefix_id="ia3")) == wanted
    assert failure(stub, pb.BatchedGenerationRequest(requests=inputs, adapter_id="ia3")) == wanted


def test_long_and_hostile_ids_are_truncated_and_escaped(stub: Stub) -> None:
    _, details = failure(stub, call("a", "x" * 100_000))
    assert details.startswith(f"can't retrieve prompt prefix with id '{'x' * 100}...': the id must contain only")
    _, details = failure(stub, call("a", "a\nfake log line\x1b[2J"))
    assert details.startswith("can't retrieve prompt prefix with id 'a?fake log line?[2J': ")


def test_a_replaced_prompt_is_used_at_once_and_a_deleted_one_is_not_found(stub: Stub, store: Path) -> None:
    shutil.copytree(store / "queen", store / "changing")
    request = call("The Hatter", "changing")
    first = output_tokens(stub, request)
    (store / "new").mkdir()
    shutil.copy(store / "nested" / "king" / "adapter_model.bin", store / "new" / "adapter_model.bin")
    shutil.rmtree(store / "changing")
    (store / "new").rename(store / "changing")
    second = output_tokens(stub, request)
    assert first != second == output_tokens(stub, call("The Hatter", "nested/king"))
    shutil.rmtree(store / "changing")
    assert 'prefix id "changing" not found' in failure(stub, request)[1]


def test_a_prompt_stays_valid_for_the_requests_that_have_resolved_it(stub: Stub, store: Path) -> None:
    """Its files are deleted and its cache entry is evicted while requests wait and run."""
    shutil.copytree(store / "queen", store / "leaving")
    request = call("The Hatter", "leaving", 60)
    expected = output_tokens(stub, request)
    running = [stub.GenerateStream(as_stream_request(request), timeout=60) for _ in range(80)]  # 64 run at once
    for one in running:
        next(one)  # the first message shows that the prompt is resolved
    shutil.rmtree(store / "leaving")
    assert "not found" in failure(stub, request)[1]
    assert all([token.text for message in one for token in message.tokens] == expected for one in running)


def test_clients_that_disconnect_during_lookups_leave_nothing_running(server: Server, stub: Stub) -> None:
    for _ in range(30):
        stub.Generate.future(call("a", "queen", 400)).cancel()
    assert output_tokens(stub, call("a", "queen"))
    server.wait_for_metric("tgi_batch_current_size 0.0")


def test_a_dead_engine_fails_pending_lookups(server: Server, stub: Stub) -> None:
    """The last test of this file: it kills the engine."""
    os.kill(server.engine_pid(), signal.SIGSTOP)
    waiting = [stub.Generate.future(call("a", "queen")) for _ in range(3)]
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert {one.exception().code() for one in waiting} == {grpc.StatusCode.UNAVAILABLE}
    assert server.process.wait(20) == 1
