"""text-generation-launcher, as the serving templates of OpenShift AI start TGIS."""

import sys
from pathlib import Path
from typing import Any

import pytest
from harness import as_stream_request, running_command, unary_request

from demo.fake_model import make_fake_model

LAUNCHER = [sys.executable, "-P", "-c", "import sys; from tgis.__main__ import launcher; sys.exit(launcher())"]


@pytest.mark.parametrize("flags", [["--port=0", "--grpc-port=0"], []], ids=["gRPC", "Caikit"])
def test_a_template_starts_and_drains_without_end(flags: list[str], tmp_path: Path) -> None:
    model = make_fake_model(tmp_path / "models", step_seconds=0.001)
    command = [*LAUNCHER, f"--model-name={model}/", *flags]
    environ: Any = {
        "HF_HOME": tmp_path / "hf_home",
        "DEPLOYMENT_FRAMEWORK": "fake",
        "PREFIX_STORE_PATH": tmp_path / "later",
    }
    with running_command(command, tmp_path, **environ) as server, server.stub() as stub:
        assert (server.get("/health")[0], server.get("/metrics")[0]) == (200, 200)
        assert server.post("/generate", {"inputs": "a"})[0] == 404
        stream = stub.GenerateStream(as_stream_request(unary_request("abc", 1000)))
        first = next(stream)
        server.process.terminate()
        assert "".join(message.text for message in (first, *stream)) == ("abc" * 334)[:1000]
        assert server.process.wait(20) == 0
        assert "draining: 1 inputs in flight have 86400 s to finish" in server.log.read_text()
