"""`make test-cluster`: two nodes of two ranks, in network namespaces where these are allowed, and what may go wrong."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
import transformers
from cluster import Network, cluster, gone, namespaces, running_cluster
from harness import as_stream_request, failure, running_server, unary_request, wait_until

from tgis.pb import generation_pb2 as pb

if "CLUSTER_TESTS" not in os.environ:
    pytest.skip("make test-cluster runs them", allow_module_level=True)

RANKS = {"NUM_SHARD": 4}
LONG = as_stream_request(unary_request("The weather", 120, min_new_tokens=120))


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    if os.environ["CLUSTER_TESTS"] != "namespaces":
        yield Network()
        return
    with namespaces() as network:
        yield network


@pytest.fixture(scope="session")
def model(glassllm_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of glassllm, and random weights with heads for four ranks."""
    path = tmp_path_factory.mktemp("model")
    shutil.copytree(glassllm_dir, path, dirs_exist_ok=True)
    settings = json.loads((path / "config.json").read_text()) | {"num_attention_heads": 8, "num_key_value_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**settings | {"head_dim": 16, "intermediate_size": 344})
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def requests() -> Iterator[pb.BatchedGenerationRequest]:
    for seed, text in enumerate(("The weather", "Once upon a time there was", "I")):
        yield unary_request(text, 30, min_new_tokens=30)
        drawn = unary_request(text, 30, min_new_tokens=30)
        drawn.params.method = pb.SAMPLE
        drawn.params.sampling.CopyFrom(pb.SamplingParameters(temperature=0.8, seed=seed))
        yield drawn


@pytest.mark.timeout(900)
def test_two_nodes_answer_like_one_rank_and_start_again(model: Path, network: Network, tmp_path: Path) -> None:
    with running_server(tmp_path, model, DTYPE="float32") as server, server.stub() as stub:
        wanted = [stub.Generate(request).responses[0].text for request in requests()]
    with cluster(tmp_path, model, network, **RANKS) as servers:
        for _ in range(10):
            servers.nodes.clear()
            servers.start(0)
            servers.start(1)
            servers.wait_until_ready()
            with servers.stub() as stub:
                calls = [stub.Generate.future(request) for request in requests()]
                assert [call.result().responses[0].text for call in calls] == wanted
                stream = stub.GenerateStream(LONG)
                next(stream), next(stream)
                pids = [pid for node in servers.nodes for pid in node.pids()]
                for node in reversed(servers.nodes):  # node 1 hears of it first, and serves on
                    node.process.send_signal(signal.SIGTERM)
                assert list(stream)[-1].generated_token_count == 120
            assert servers.exit_codes(20) == [0, 0]
            assert gone(pids)


@pytest.mark.parametrize(
    ("node", "process", "reason"),
    [
        (0, 0, ""),  # the front end, which cannot say why
        (0, 1, "the engine process"),
        (0, 2, "rank 1 of the engine on node 0 was ended by signal 9"),
        (1, 0, "of the engine on node 1"),  # the end of its connection, or a reset if something was unread
        (1, 1, "rank 2 of the engine on node 1"),
        (1, 2, "rank 3 of the engine on node 1"),
    ],
)
def test_a_process_that_is_killed_ends_all(
    node: int, process: int, reason: str, model: Path, network: Network, tmp_path: Path
) -> None:
    with running_cluster(tmp_path, model, network, **RANKS) as servers, servers.stub() as stub:
        pids = [pid for server in servers.nodes for pid in server.pids()]
        assert len(pids) == 6
        victim = servers.nodes[node].pids()[process]
        stream = stub.GenerateStream(LONG)
        next(stream), next(stream)
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        code, details = failure(lambda: list(stream))
        told = time.monotonic() - killed
        codes = servers.exit_codes(10)
        wait_until(lambda: gone(pids), "end of all processes")
        ended = time.monotonic() - killed
        print(f"told after {told:.2f} s, ended after {ended:.2f} s: {details}")
        assert code is grpc.StatusCode.UNAVAILABLE
        assert reason in details
        assert reason in servers.nodes[0].reason
        assert (
            process != 1 or node == 0 or "rank 2: the engine process was ended by signal 9" in servers.nodes[1].reason
        )
        assert 0 not in codes
        assert told < 0.5
        assert ended < 2


def test_a_cut_link_ends_all(model: Path, network: Network, tmp_path: Path) -> None:
    if not network.prefixes[1]:
        pytest.skip("needs network namespaces")
    options = {"CLUSTER_TIMEOUT_SECONDS": 4} | RANKS
    try:
        for busy in (True, False):
            with running_cluster(tmp_path / str(busy), model, network, **options) as servers, servers.stub() as stub:
                stream = stub.GenerateStream(LONG)
                next(stream)
                if not busy:
                    list(stream)
                cut = time.monotonic()
                network.set_link("down")
                if busy:
                    code, details = failure(lambda: list(stream))  # noqa: B023
                    assert code is grpc.StatusCode.UNAVAILABLE
                    assert "of the engine on node 1 is gone" in details
                assert servers.exit_codes(10) == [1, 1]
                print(f"ended after {time.monotonic() - cut:.2f} s: {servers.nodes[1].reason}")
                assert time.monotonic() - cut < 4 + 2
                assert "of the engine on node 1 is gone" in servers.nodes[0].reason
                assert "rank 0 of the engine on node 0" in servers.nodes[1].reason
            network.set_link("up")
    finally:
        network.set_link("up")


def test_a_stopped_rank_turns_health_off(model: Path, network: Network, tmp_path: Path) -> None:
    with running_cluster(tmp_path, model, network, **RANKS) as servers, servers.stub() as stub:
        rank = servers.nodes[1].pids()[2]
        os.kill(rank, signal.SIGSTOP)
        for node, name in zip(servers.nodes, ("rank 3 of the engine", "rank 3: no heartbeat"), strict=True):
            wait_until(lambda health=node.health: health()[0] == 503, "health 503")  # type: ignore[misc]
            assert name in node.health()[1]
        os.kill(rank, signal.SIGCONT)
        servers.wait_until_ready()
        assert len(list(stub.GenerateStream(LONG))) == 121
