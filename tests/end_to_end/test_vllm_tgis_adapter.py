"""`python -m vllm_tgis_adapter` with an ordinary command line of vLLM, on a real server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tuning
from harness import Server, running_module, unary_request
from transformers import AutoTokenizer
from tuning import Tuned

from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb

ADAPTER = "vllm_tgis_adapter"
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def tuned(glassllm_dir: Path, cache_dir: Path) -> Tuned:
    return tuning.tuned("glassllm-lora", glassllm_dir, cache_dir)


@pytest.fixture(scope="module")
def server(tuned: Tuned, glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    again = f'{{"name": "the king", "path": "{tuned.store}/nested/king", "base_model_name": "glassllm"}}'
    flags = [
        *("--model", str(glassllm_dir), "--served-model-name", "alice", "other"),
        *("--dtype", "float", "--host", "localhost", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "32"),
        *("--gpu-memory-utilization", "0.9", "--swap-space", "4", "--max-logprobs", "20", "--disable-log-requests"),
        *("--enable-lora", "--max-lora-rank", "64", "--lora-modules", f"queen={tuned.store}/queen", again),
    ]
    with running_module([ADAPTER, *flags], tmp_path_factory.mktemp("server"), DEBUG_BATCH=True) as running:
        yield running


def test_grpc_healthcheck(server: Server) -> None:
    probe = [str(Path(sys.executable).parent / "grpc_healthcheck"), "--server-url", server.target, "--timeout", "10"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "SERVING\n"), done.stderr


@pytest.mark.parametrize("max_new_tokens", [0, 1024])
def test_all_that_fits_where_more_or_nothing_is_asked_for(server: Server, max_new_tokens: int) -> None:
    request = unary_request("Once upon a time", max_new_tokens)
    with server.stub() as stub:
        assert stub.ModelInfo(pb.ModelInfoRequest()).max_new_tokens == 1024  # the default of MAX_NEW_TOKENS
        counted = stub.Tokenize(pb.BatchedTokenizeRequest(requests=[pb.TokenizeRequest(text="Once upon a time")]))
        room = MAX_MODEL_LEN - counted.responses[0].token_count
        request.params.stopping.min_new_tokens = room  # no EOS before
        (response,) = stub.Generate(request, timeout=60).responses
    assert (response.generated_token_count, response.stop_reason) == (room, pb.TOKEN_LIMIT)


def test_lora_modules_are_adapter_ids(server: Server, tuned: Tuned, glassllm_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(glassllm_dir)
    text = tuning.INPUTS[0]
    expected = {one.prompt: one for one in tuned.continuations if one.tokens == tokenizer(text).input_ids}
    request = unary_request(text, tuning.MAX_NEW_TOKENS)
    request.params.response.generated_tokens = True
    with server.stub() as stub:
        for name, trained in (("queen", "queen"), ("the king", "nested/king"), ("", "")):
            request.adapter_id = name
            (response,) = stub.Generate(request, timeout=60).responses
            assert [token.text for token in response.tokens] == tokenizer.convert_ids_to_tokens(
                expected[trained].generated
            )
        request.adapter_id = "nested/king"
        with pytest.raises(grpc.RpcError, match="it is no LoRA module, and no adapter store was configured"):
            stub.Generate(request, timeout=60)


def test_max_logprobs_is_the_most_candidates(server: Server) -> None:
    request = unary_request("Once upon a time", 1)
    request.params.response.CopyFrom(pb.ResponseOptions(generated_tokens=True, token_logprobs=True, top_n_tokens=20))
    with server.stub() as stub:
        (response,) = stub.Generate(request, timeout=60).responses
        assert len(response.tokens[0].top_tokens) == 20
        request.params.response.top_n_tokens = 21
        with pytest.raises(grpc.RpcError, match="top_n_tokens must be <= 20"):
            stub.Generate(request, timeout=60)


def test_a_step_has_at_most_so_many_input_tokens(server: Server) -> None:
    _, text = server.get("/debug/batch")
    assert json.loads(text)["max_prefill_tokens"] == 32


def test_what_the_server_says(server: Server) -> None:
    """After the other tests: of all requests only the one that was cut short has a line."""
    log = server.log.read_text()
    assert "ignored options: --max-lora-rank, --swap-space" in log
    assert "serving alice after" in log
    assert 'model="alice"' in server.get("/metrics")[1]
    (line,) = [line for line in log.splitlines() if " request: " in line]
    assert " WARNING " in line
    assert "TOKEN_LIMIT" in line


@pytest.mark.slow
def test_a_lora_module_that_cannot_be_loaded_stops_the_start(glassllm_dir: Path, tuned: Tuned, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    arguments = [ADAPTER, "--model", str(glassllm_dir), "--lora-modules", f"sql={broken}"]
    with (
        pytest.raises(AssertionError, match=r"(?s)no server \(exit code 1\).*LORA_MODULES: sql: "),
        running_module(arguments, tmp_path),
    ):
        pass


def test_requests_without_a_seed_get_the_same_ones_in_every_run(tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "model")

    def seeds(*arguments: str, **options: Any) -> list[int]:
        options |= {"MODEL_NAME": model, "DEPLOYMENT_FRAMEWORK": "fake"}
        with running_module([*arguments], tmp_path, **options) as running, running.stub() as stub:
            request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")] * 3)
            request.params.method = pb.SAMPLE
            request.params.stopping.max_new_tokens = 1
            return [response.seed for response in stub.Generate(request, timeout=30).responses]

    first = seeds(ADAPTER, "--seed", "7")
    assert len(set(first)) == 3
    assert seeds("tgis", "serve", RANDOM_SEED=7) == first
