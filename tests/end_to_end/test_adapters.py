"""LoRA adapters and soft prompts on a real server with a command line of vLLM: PEFT's answers, under load."""

import itertools
import json
import random
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from harness import Server, adapter_request, as_stream_request, failure, output_tokens, running_module
from tiny_models import check_greedy
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tgis.pb import generation_pb2 as pb
from tgis.pb import generation_pb2_grpc as pb_grpc

Stub = pb_grpc.GenerationServiceStub
ADAPTER = "vllm_tgis_adapter"
COPIES = 6  # of the largest adapter; three of them fit into the 1 MiB cache
MAX_MODEL_LEN = 256
SEED = 7
INPUTS = [
    "Once upon a time",
    "“What a curious feeling!” said Alice; “I must be shutting up like a telescope.” And so",
    "I",
    "He said, “It is",
]
KINDS = {"LORA": peft.LoraConfig, "P_TUNING": peft.PromptEncoderConfig, "PROMPT_TUNING": peft.PromptTuningConfig}
PATTERNS: dict[str, Any] = {
    "r": 5,
    "target_modules": r".*layers\.\d+\.(mlp\.(up|down)_proj|self_attn\.k_proj)",
    "rank_pattern": {"up_proj": 2, "layers.0.self_attn.k_proj": 7},
    "alpha_pattern": {"mlp.down_proj": 20, "up_proj": 3},
}
PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {  # by path in the store: the kind, its file, and options of PEFT
    "queen": ("LORA", "safetensors", {"r": 8, "target_modules": "all-linear", "lora_alpha": 16}),
    "nested/king": ("LORA", "bin", {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "alice": ("LORA", "safetensors", {"r": 1, "target_modules": ["o_proj"], "lora_alpha": 2}),
    "patterns": ("LORA", "safetensors", PATTERNS),
    "first": ("LORA", "safetensors", {"r": 16, "target_modules": ["q_proj", "o_proj"], "layers_to_transform": [0]}),
    "hatter": ("LORA", "bin", {"r": 3}),
    "mouse": ("LORA", "safetensors", {"r": 8, "lora_alpha": 64}),
    "gate": ("LORA", "safetensors", {"r": 2, "target_modules": ["gate_proj", "up_proj"]}),
    "soft/queen": ("PROMPT_TUNING", "safetensors", {"num_virtual_tokens": 8}),
    "soft/nested/king": ("PROMPT_TUNING", "bin", {"num_virtual_tokens": 5}),
    "soft/encoded": ("P_TUNING", "safetensors", {"num_virtual_tokens": 6, "encoder_hidden_size": 64}),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def models(store: Path, glassllm_dir: Path) -> dict[str, Any]:
    """What PEFT saves to the store, with random weights, and the bare model."""
    models = {"": AutoModelForCausalLM.from_pretrained(glassllm_dir, dtype=torch.float32).eval()}
    for seed, (name, (kind, file, options)) in enumerate(PLANS.items()):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(glassllm_dir, dtype=torch.float32)
        with warnings.catch_warnings(action="ignore"):  # PEFT's own, about deprecations in transformers
            models[name] = peft.get_peft_model(base, KINDS[kind](task_type="CAUSAL_LM", **options)).eval()
        for path, weight in models[name].named_parameters():
            if "lora_" in path or "prompt_encoder.default.embedding" in path:
                torch.nn.init.normal_(weight, std=0.1 if "lora_" in path else 0.7)
        models[name].save_pretrained(store / name, safe_serialization=file == "safetensors")
    return models


@pytest.fixture(scope="module")
def server(
    store: Path, models: dict[str, Any], glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    for number in range(COPIES):
        shutil.copytree(store / "queen", store / "copies" / str(number))
    module = f'{{"name": "the king", "path": "{store}/nested/king", "base_model_name": "glassllm"}}'
    flags = [
        *("--model", str(glassllm_dir), "--served-model-name", "alice", "other", "--seed", str(SEED)),
        *("--dtype", "float", "--host", "localhost", "--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-batched-tokens", "32", "--swap-space", "4", "--disable-log-requests"),
        *("--enable-lora", "--max-lora-rank", "64", "--lora-modules", f"hearts={store}/queen", module),
    ]
    options: dict[str, Any] = {"ADAPTER_CACHE": store, "PROMPT_CACHE_SIZE_MB": 1, "DEBUG_BATCH": True}
    with running_module([ADAPTER, *flags], tmp_path_factory.mktemp("server"), **options) as running:
        yield running


@pytest.fixture
def stub(server: Server) -> Iterator[Stub]:
    with server.stub() as made:
        yield made


def call(text: str, adapter: str | None, new: int = 24) -> pb.BatchedGenerationRequest:
    return adapter_request(text, new, adapter_id=adapter)


def streamed(stub: Stub, request: pb.BatchedGenerationRequest, count: int) -> list[Iterator[pb.GenerationResponse]]:
    """Streams whose adapters are resolved: their first messages have come."""
    streams = [stub.GenerateStream(as_stream_request(request), timeout=60) for _ in range(count)]
    for stream in streams:
        next(stream)
    return streams


def texts_of(stream: Iterator[pb.GenerationResponse]) -> list[str]:
    return [token.text for message in stream for token in message.tokens]


def test_requests_without_a_seed_get_the_same_seeds_in_every_run(stub: Stub) -> None:
    """Before all other tests, which would draw seeds."""
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text="a")] * 3)
    request.params.method, request.params.stopping.max_new_tokens = pb.SAMPLE, 1
    draws = random.Random(SEED)
    assert [each.seed for each in stub.Generate(request).responses] == [draws.getrandbits(32) for _ in range(3)]


def test_more_adapters_than_fit_into_the_cache_under_load(
    server: Server, stub: Stub, models: dict[str, Any], glassllm_dir: Path
) -> None:
    """All adapters and soft prompts at once, beside inputs without one; unary and streamed: what PEFT generates."""
    tokenizer = Tokenizer.from_file(str(glassllm_dir / "tokenizer.json"))
    names = {name: name for name in models} | {"hearts": "queen", "the king": "nested/king"}
    names |= {f"copies/{number}": "queen" for number in range(COPIES)}
    wanted = list(itertools.product(names, INPUTS))
    random.Random(1).shuffle(wanted)

    def ask(name: str, text: str) -> tuple[list[str], list[str]]:
        request = call(text, name or None)
        return output_tokens(stub, request), texts_of(stub.GenerateStream(as_stream_request(request), timeout=60))

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, *zip(*wanted, strict=True)))
    clear, vocabulary = 0, tokenizer.get_vocab()
    for (name, text), (unary, stream) in zip(wanted, answers, strict=True):
        assert unary == stream
        generated = [vocabulary[token] for token in unary]
        clear += check_greedy(models[names[name]], tokenizer.encode(text).ids, generated)
    assert clear > 0.8 * sum(len(unary) for unary, _ in answers)
    assert server.metric("tgi_prompt_load_duration_count") > len(names)
    assert server.metric("tgi_prompt_load_failure") == 0


def test_adapters_in_use_are_in_the_metrics(server: Server, stub: Stub) -> None:
    scrape = ""
    while 'running_lora_adapters="queen"' not in scrape:  # the stream may have ended before the scrape
        (stream,) = streamed(stub, call("The Queen", "queen", 200), 1)
        next(stream)
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
    running = streamed(stub, request, 8)
    shutil.rmtree(store / "changing")
    (store / "new").rename(store / "changing")
    assert first != output_tokens(stub, request) == output_tokens(stub, call("The Hatter", "mouse"))
    assert all(texts_of(stream) == first for stream in running)


def test_a_prompt_stays_valid_for_the_requests_that_have_resolved_it(stub: Stub, store: Path) -> None:
    """Its files are deleted and its cache entry is evicted while requests wait and run."""
    shutil.copytree(store / "soft/queen", store / "leaving")
    request = call("The Hatter", "leaving", 60)
    expected = output_tokens(stub, request)
    running = streamed(stub, request, 80)  # 64 run at once
    shutil.rmtree(store / "leaving")
    assert "does not exist" in failure(lambda: stub.Generate(request, timeout=20))[1]
    assert all(texts_of(stream) == expected for stream in running)


def test_what_the_server_says(server: Server) -> None:
    assert json.loads(server.get("/debug/batch")[1])["max_prefill_tokens"] == 32
    log = server.log.read_text()
    assert "ignored options: --max-lora-rank, --swap-space" in log
    assert "serving alice after" in log
    assert 'model="alice"' in server.get("/metrics")[1]
    assert not [line for line in log.splitlines() if " request: " in line and " WARNING " not in line]
