"""The lines that say what was started."""

from pathlib import Path
from typing import Any

import pytest

from tgis.config import Config
from tgis.ipc.messages import EngineInfo
from tgis.startup_log import startup_lines

INFO = EngineInfo(
    engine="tgis_native",
    model_class="LlamaForCausalLM",
    device="cpu",
    dtype="bfloat16",
    vocab_size=10,
    encoder_decoder=False,
    padded=False,
    max_batch_size=64,
    token_capacity=100,
    max_prefill_tokens=100,
)


def lines(reason: str = "", api_port: int | None = 3000, **options: Any) -> dict[str, str]:
    """The text of each line by its name."""
    config = Config(model_name="m", **options)
    shown = startup_lines(config, INFO, reason, (2048, 1024), (8033, 3000, api_port))
    assert {line[9] for line in shown} == {" "}
    assert not [line for line in shown if line[10] == " "]  # aligned
    return {line.split()[0]: line[10:] for line in shown}


def test_five_lines() -> None:
    assert list(lines()) == ["versions", "engine", "device", "limits", "ports"]


@pytest.mark.parametrize(
    ("options", "reason", "why"),
    [
        ({}, "", "the first choice of auto"),
        ({}, "not hf_optimum_ort: m has no graphs", "not hf_optimum_ort: m has no graphs"),
        ({"deployment_framework": "tgis_native"}, "", "set by DEPLOYMENT_FRAMEWORK"),
        ({"flash_attention": True}, "", "FLASH_ATTENTION, PAGED_ATTENTION or NUM_SHARD needs it"),
    ],
)
def test_the_engine_has_its_reason(options: dict[str, Any], reason: str, why: str) -> None:
    assert lines(reason, **options)["engine"] == f"tgis_native runs LlamaForCausalLM: {why}"


def test_threads_and_ranks() -> None:
    assert lines(num_threads=3)["device"].startswith("cpu, bfloat16; 3 threads on ")
    assert lines(num_threads=3, num_shard=2)["device"].startswith("cpu, bfloat16, 2 ranks; 3 threads on ")


@pytest.mark.parametrize(("inputs", "waiting"), [(512, "448"), (64, "none"), (1, "none")])
def test_what_may_wait(inputs: int, waiting: str) -> None:
    assert lines(max_concurrent_requests=inputs)["limits"] == f"2048 tokens, 1024 new; batch of 64, {waiting} may wait"


@pytest.mark.parametrize(
    ("names", "access"),
    [
        ((), "no TLS, no tokens"),
        (("tls_cert_path", "tls_key_path"), "TLS, no tokens"),
        (("tls_cert_path", "tls_key_path", "tls_client_ca_cert_path", "auth_token_path"), "mutual TLS, bearer tokens"),
    ],
)
def test_ports(names: tuple[str, ...], access: str) -> None:
    options: dict[str, Any] = {name: Path("file") for name in names}
    assert lines(**options)["ports"] == f"gRPC 8033 ({access}), health and metrics 3000, HTTP APIs 3000"


def test_apis_on_a_port_of_their_own_or_off() -> None:
    assert lines(api_port=3001)["ports"].endswith("health and metrics 3000, HTTP APIs 3001")
    assert lines(api_port=None)["ports"].endswith("health and metrics 3000, HTTP APIs off")
