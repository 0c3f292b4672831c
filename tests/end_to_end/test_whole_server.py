"""The whole server under random sequences of what clients and operators do to it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from whole_server import LENGTHS, TEXTS, Arena, WholeServer, serving

from benchmarks.chaos.files import ADAPTER, AdapterFiles
from demo.fake_model import make_fake_model
from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub

SETTINGS = settings(
    deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate], print_blob=False
)  # a server is not the same twice: what has failed is not tried again


def run(arena: Arena, **limits: Any) -> None:
    with serving(arena):
        machine: Any = lambda: WholeServer(arena)  # noqa: E731
        run_state_machine_as_test(machine, settings=settings(SETTINGS, **limits))


@pytest.mark.parametrize("kind", [{"block_size": 4, "weight_limit": 500}])
def test_the_front_end(tmp_path: Path, kind: dict[str, int]) -> None:
    model = make_fake_model(tmp_path / "model", max_sequence_length=200, step_seconds=0.002, **kind)
    options = {"DEPLOYMENT_FRAMEWORK": "fake", "MAX_BATCH_SIZE": 4, "CACHE_DIR": tmp_path / "cache"}
    arena = Arena(tmp_path, model, options, None, lambda text, tokens, _: (text * tokens)[:tokens])
    run(arena, max_examples=8, stateful_step_count=15, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_model_with_adapters(tmp_path: Path, glassllm_dir: Path) -> None:
    adapters = AdapterFiles(tmp_path, glassllm_dir)
    options: dict[str, Any] = {"DEPLOYMENT_FRAMEWORK": "tgis_native", "DTYPE": "float32", "MAX_BATCH_SIZE": 4}
    options["ADAPTER_CACHE"] = adapters.store
    answers: dict[tuple[str, int, str], str] = {}
    arena = Arena(tmp_path, glassllm_dir, options, adapters, lambda *call: answers[call])
    with serving(arena):
        arena.start()
        with arena.connect() as channel:
            stub = GenerationServiceStub(channel)
            answers |= {
                (text, n, v): _answer(stub, arena, text, n, v)
                for text in TEXTS
                for n in LENGTHS
                for v in ("", "a", "b")
            }
        run(dataclasses.replace(arena), max_examples=40, stateful_step_count=40)


def _answer(stub: GenerationServiceStub, arena: Arena, text: str, tokens: int, version: str) -> str:
    """Of the idle server."""
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=tokens))
    request = pb.BatchedGenerationRequest(requests=[pb.GenerationRequest(text=text)], params=params)
    if version:
        assert arena.adapters is not None
        arena.adapters.use(version)
        request.adapter_id = ADAPTER
    answer: str = stub.Generate(request, timeout=60).responses[0].text
    return answer
