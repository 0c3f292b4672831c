"""Every command that calls a server, against a real one with mutual TLS and bearer tokens."""

import re
from collections.abc import Iterator

import pytest
from harness import Server, running_server

from benchmarks.certificates import make_pair
from demo.fake_model import make_fake_model
from tgis import __main__

COMMANDS = {
    "generate": ("x", "--max-new-tokens", "3"),
    "tokenize": ("x", "--json"),
    "model-info": (),
    "health": (),
    "bench": ("--requests", "2", "--output-tokens", "2", "--input-tokens", "4", "--quiet"),
}
MUTUAL_TLS = ("--ca-cert", "ca.crt", "--tls-cert", "client.crt", "--tls-key", "client.key")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    authority = make_pair()
    server, client = make_pair(authority), make_pair(authority)
    files = {"ca.crt": authority.cert, "server.crt": server.cert, "server.key": server.key}
    files |= {"client.crt": client.cert, "client.key": client.key, "tokens": b"first\nsecret\n", "token": b"secret\n"}
    for name, data in files.items():
        (directory / name).write_bytes(data)
    options = {"TLS_CERT_PATH": "server.crt", "TLS_KEY_PATH": "server.key", "TLS_CLIENT_CA_CERT_PATH": "ca.crt"}
    paths = {name: directory / file for name, file in (options | {"AUTH_TOKEN_PATH": "tokens"}).items()}
    model = make_fake_model(directory / "model")
    with running_server(directory, model, 120, DEPLOYMENT_FRAMEWORK="fake", HTTP_API_PORT=0, **paths) as running:
        yield running


@pytest.mark.parametrize("command", COMMANDS)
def test_a_certificate_and_a_token_let_every_command_in(
    server: Server, command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(server.log.parent)
    arguments = [command, *COMMANDS[command], "--target", server.target, *MUTUAL_TLS]
    assert __main__.run([*arguments, "--token-file", "token"]) == 0
    out, err = capfd.readouterr()
    assert (bool(out), err) == (True, "")
    if command != "health":  # probes need no token
        assert __main__.run(arguments) == 1
        assert f"{server.target}: UNAUTHENTICATED: " in capfd.readouterr().err
    assert not [line for line in server.log.read_text().splitlines() if not re.match(r"\d{4}-\d\d-\d\dT", line)]
