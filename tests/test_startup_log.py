"""The lines that say what was started."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tgis import __version__, startup_log
from tgis.config import Config
from tgis.ipc.messages import EngineInfo
from tgis.startup_log import startup_lines

INFO = EngineInfo("tgis_native", "LlamaForCausalLM", "cpu", "bfloat16", 10, False, False, 64, 100, 100)


def lines(reason: str = "", api_port: int | None = 3000, **options: Any) -> dict[str, str]:
    """The text of each line by its name."""
    of_engine = {name: options.pop(name) for name in {*options} & {*EngineInfo.__struct_fields__}}
    config = Config(model_name="m", **options)
    info = msgspec.structs.replace(INFO, **of_engine)
    shown = startup_lines(config, info, reason, (2048, 1024), (8033, 3000, api_port))
    assert {line[9] for line in shown} == {" "}
    assert not [line for line in shown if line[10] == " "]  # aligned
    return {line.split()[0]: line[10:] for line in shown}


TLS: dict[str, Any] = {"tls_cert_path": Path("file"), "tls_key_path": Path("file")}
MUTUAL_TLS = TLS | {"tls_client_ca_cert_path": Path("file")}
DRAFTS = {"proposed_tokens": 15, "drafted_tokens": 3, "speculator_name": "s"}
INT8: dict[str, Any] = {"quantize": "int8", "kv_cache_dtype": "int8", "num_shard": 4, "nnodes": 2, "num_threads": 3}
THREADS = f"3 threads on {len(os.sched_getaffinity(0))} CPUs"
GENERATE = "tgis generate --target localhost:8033"
RUNS, CPU, BATCH = "tgis_native runs LlamaForCausalLM", "cpu, bfloat16", "2048 tokens, 1024 new; batch of 64, "


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        (DRAFTS, "engine", f"{RUNS}; lookup of up to 15 tokens ahead, or 3 by s"),
        ({"proposed_tokens": 15}, "engine", f"{RUNS}; lookup of up to 15 tokens ahead"),
        ({"fingerprint": "fp_1"}, "versions", f"tgis {__version__}, torch {version('torch')}, transformers "),
        ({"reason": "not x: y"}, "engine", f"{RUNS}: not x: y"),
        ({"num_threads": 3, "num_shard": 2}, "device", f"{CPU}, 2 ranks; {THREADS}, quota 2.5"),
        (INT8, "device", f"{CPU}, weights in int8, KV cache in int8, 4 ranks on 2 nodes; {THREADS}, quota 2.5"),
        ({"max_concurrent_requests": 512}, "limits", f"{BATCH}448 may wait"),
        ({"max_concurrent_requests": 64}, "limits", f"{BATCH}none may wait"),
        ({}, "ports", "gRPC 8033 (no TLS, no tokens), health and metrics 3000, HTTP APIs 3000"),
        (MUTUAL_TLS | {"auth_token_path": Path("file")}, "ports", "gRPC 8033 (mutual TLS, bearer tokens), "),
        ({"api_port": None}, "ports", "gRPC 8033 (no TLS, no tokens), health and metrics 3000, HTTP APIs off"),
        ({}, "try", f'http://localhost:3000/ui in a browser, or {GENERATE} "Once upon a time"'),
        (
            {"bind_address": "10.1.2.3"},
            "try",
            "http://10.1.2.3:3000/ui in a browser, or tgis generate --target 10.1.2.3:8033 ",
        ),
        ({"bind_address": "fe::1", "api_port": None}, "try", "tgis generate --target [fe::1]:8033 "),
        (TLS, "try", f"https://localhost:3000/ui in a browser, or {GENERATE} --ca-cert CA "),
        (MUTUAL_TLS | {"api_port": None}, "try", f"{GENERATE} --ca-cert CA --tls-cert CERT --tls-key KEY "),
        ({"auth_token_path": Path("file"), "api_port": None}, "try", f"{GENERATE} --token-file TOKEN "),
    ],
)
def test_a_line(options: dict[str, Any], name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_log, "cpu_quota", lambda: 2.5)
    all_lines = lines(**options)
    assert list(all_lines) == ["versions", "engine", "device", "limits", "ports", "try"]
    found = all_lines[name]
    assert found.startswith(text) if text.endswith(" ") else found == text
