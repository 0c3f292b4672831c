"""Bearer tokens: which calls are accepted, reloading of the file, and the caller's identity."""

import errno
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from harness import as_stream_request, unary_request, wait_until
from local_server import LocalServer, local_server

from benchmarks.certificates import make_pair
from tgis.errors import OptionError
from tgis.security.bearer import TokenFile
from tgis.security.identity import caller_identity
from tgis.utils.file_watch import CHECK_INTERVAL_SECONDS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("auth")
    (directory / "tokens").write_text("# for tests\nfirst-token\n\n  second-token  \n")
    options = {"AUTH_TOKEN_PATH": directory / "tokens", "MAX_BATCH_SIZE": 2}
    with local_server(directory, {"step_seconds": 0.002}, **options) as running:
        yield running


def text(server: LocalServer, authorization: str | None, prompt: str = "abc") -> str:
    metadata = [("authorization", authorization)] if authorization is not None else []
    with server.stub() as stub:
        return str(stub.Generate(unary_request(prompt, 3), metadata=metadata, timeout=10).responses[0].text)


def test_only_valid_tokens_are_accepted(server: LocalServer) -> None:
    assert text(server, "Bearer first-token") == text(server, "bearer second-token") == "abc"
    refused = (None, "", "first-token", "Bearer", "Bearer ", "Bearer first", "Bearer # for tests", "Basic first-token")
    counted = 'tgi_call_count_total{api="grpc",method="Generate",status="UNAUTHENTICATED"}'
    for authorization in refused:
        with pytest.raises(grpc.RpcError) as caught:
            text(server, authorization)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, authorization
    wait_until(lambda: server.metric(counted) == len(refused), "count of refused calls")
    assert server.metric("tgi_authentication_failure_total") == len(refused)
    assert "first-token" not in server.log.read_text()


def test_streams_and_reflection_need_a_token_and_health_does_not(server: LocalServer) -> None:
    with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        list(stub.GenerateStream(as_stream_request(unary_request("abc", 3)), timeout=10))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(server.target) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            list(reflection.ServerReflectionInfo(iter([question]), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_http_routes_need_a_token_and_probes_metrics_and_pages_none(server: LocalServer) -> None:
    before = server.metric("tgi_authentication_failure_total")
    paths = "/info", "/v1/models"
    for path in paths:
        status, body = server.get(path)
        assert (status, "a valid bearer token is required" in body) == (401, True)
        assert server.get(path, Authorization="Bearer first-token")[0] == 200
    assert server.metric("tgi_authentication_failure_total") - before == len(paths)
    for path in ("/", "/health", "/ping", "/metrics", "/ui", "/docs", "/openapi.json"):
        assert server.get(path)[0] == 200


def test_a_changed_file_is_reloaded_and_an_unusable_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_descriptors(*_: object, **_options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path, seconds = tmp_path / "tokens", itertools.count(0, 2 * CHECK_INTERVAL_SECONDS)
    path.write_text("old")
    tokens = TokenFile(path, lambda: next(seconds))
    assert tokens.accepts("old")
    caplog.set_level("INFO")
    path.write_text("newer\n")
    assert (tokens.accepts("newer"), tokens.accepts("old")) == (True, False)
    path.write_text("# nothing any more, by mistake\n")
    assert tokens.accepts("newer")
    path.write_text("newest")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", without_descriptors)
        assert [tokens.accepts("newer"), tokens.accepts("newer")] == [True, True]
    assert tokens.accepts("newest")
    assert sum("Too many open files" in text for text in caplog.messages) == 2
    assert caplog.messages.count(f"reloaded {path}") == 2


@pytest.mark.parametrize("content", [b"", b"# only this\n\n", b"\xff\xfe"])
def test_a_file_without_tokens_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(OptionError, match=r"AUTH_TOKEN_PATH .*tokens: "):
        TokenFile(tmp_path / "tokens")


def test_a_flood_with_one_token_does_not_keep_calls_with_another_in_the_queue(server: LocalServer) -> None:
    """Whichever protocol they use."""
    with server.stub() as stub:
        request, first = as_stream_request(unary_request("abc", 200)), [("authorization", "Bearer first-token")]
        flood = [stub.GenerateStream(request, metadata=first) for _ in range(100)]
        wait_until(lambda: server.metric("tgi_queue_size") >= 90, "queue")
        assert text(server, "Bearer second-token") == "abc"
        body = {"inputs": "abc", "parameters": {"max_new_tokens": 3}}
        assert server.post("/generate", body, Authorization="Bearer second-token")[0] == 200
        assert server.metric("tgi_queue_size") > 0, "the queue of the flood was not through"
        for call in flood:
            call.cancel()


@dataclass
class Context:
    """The parts of a gRPC context that prove who the caller is."""

    token: str = ""
    certificate: bytes = b""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.token}")] if self.token else []

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self.certificate]} if self.certificate else {}


def test_callers_without_credentials_have_the_same_identity() -> None:
    assert caller_identity(Context(), bearer_auth=True) == b""
    assert caller_identity(Context("anything"), bearer_auth=False) == b""


def test_tokens_and_certificates_make_identities() -> None:
    callers = [Context("a"), Context("b"), Context("", make_pair().cert), Context("a", make_pair().cert)]
    callers.append(Context("", b"what only OpenSSL\ncan read"))
    found = [caller_identity(caller, bearer_auth=True) for caller in callers]
    assert len(set(found)) == len(callers)
    assert b"" not in found
    assert found[-1] == caller_identity(Context("", b"what only OpenSSL can read\n"), bearer_auth=True)
    callers[2].certificate = make_pair().cert  # renewed, with the same names
    assert found == [caller_identity(caller, bearer_auth=True) for caller in callers]
