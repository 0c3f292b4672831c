"""The lines that say what was started."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tgis.config import Config
from tgis.ipc.messages import EngineInfo
from tgis.startup_log import startup_lines

INFO = EngineInfo("tgis_native", "LlamaForCausalLM", "cpu", "bfloat16", 10, False, False, 64, 100, 100)


def lines(
    reason: str = "", api_port: int | None = 3000, proposed: int = 0, drafted: int = 0, **options: Any
) -> dict[str, str]:
    """The text of each line by its name."""
    config = Config(model_name="m", **options)
    info = msgspec.structs.replace(INFO, proposed_tokens=proposed, drafted_tokens=drafted)
    shown = startup_lines(config, info, reason, (2048, 1024), (8033, 3000, api_port))
    assert {line[9] for line in shown} == {" "}
    assert not [line for line in shown if line[10] == " "]  # aligned
    return {line.split()[0]: line[10:] for line in shown}


TLS: dict[str, Any] = {"tls_cert_path": Path("file"), "tls_key_path": Path("file")}
MUTUAL_TLS = TLS | {"tls_client_ca_cert_path": Path("file")}
DRAFTS = {"proposed": 15, "drafted": 3, "speculator_name": "s"}
GENERATE = "tgis generate --target localhost:8033"
RUNS, CPU, BATCH = "tgis_native runs LlamaForCausalLM", "cpu, bfloat16", "2048 tokens, 1024 new; batch of 64, "


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        (DRAFTS, "engine", f"{RUNS}; lookup of up to 15 tokens ahead, or 3 by s"),
        ({"reason": "not x: y"}, "engine", f"{RUNS}: not x: y"),
        ({"num_threads": 3, "num_shard": 2}, "device", f"{CPU}, 2 ranks; 3 threads on "),
        ({"max_concurrent_requests": 512}, "limits", f"{BATCH}448 may wait"),
        ({"max_concurrent_requests": 64}, "limits", f"{BATCH}none may wait"),
        ({}, "ports", "gRPC 8033 (no TLS, no tokens), health and metrics 3000, HTTP APIs 3000"),
        (MUTUAL_TLS | {"auth_token_path": Path("file")}, "ports", "gRPC 8033 (mutual TLS, bearer tokens), "),
        ({"api_port": None}, "ports", "gRPC 8033 (no TLS, no tokens), health and metrics 3000, HTTP APIs off"),
        ({}, "try", f'http://localhost:3000/ui in a browser, or {GENERATE} "Once upon a time"'),
        ({"bind_address": "fe::1", "api_port": None}, "try", "tgis generate --target [fe::1]:8033 "),
        (TLS, "try", f"https://localhost:3000/ui in a browser, or {GENERATE} --ca-cert CA "),
        (MUTUAL_TLS | {"api_port": None}, "try", f"{GENERATE} --ca-cert CA --tls-cert CERT --tls-key KEY "),
        ({"auth_token_path": Path("file"), "api_port": None}, "try", f"{GENERATE} --token-file TOKEN "),
    ],
)
def test_a_line(options: dict[str, Any], name: str, text: str) -> None:
    all_lines = lines(**options)
    assert list(all_lines) == ["versions", "engine", "device", "limits", "ports", "try"]
    found = all_lines[name]
    assert found.startswith(text) if text.endswith(" ") else found == text
