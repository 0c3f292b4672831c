"""Downloads from a fake hub into the cache, where the server finds the model."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_hub
import huggingface_hub
import pytest
from fake_hub import TOKEN, FakeHub
from huggingface_hub import HfApi

from tgis.errors import StartError
from tgis.models.files import CONFIG_EXTENSIONS, find_model
from tgis.models.hub import download

REPO = "org/name"
WEIGHTS = bytes(range(256)) * 100
FILES = {
    "config.json": b'{"model_type": "gpt2"}',
    "empty.txt": b"",
    "model.safetensors": WEIGHTS,
    "spiece.model": b"pieces",
    "onnx/model.safetensors": b"of another framework",
    "training_args.json": b"{}",
    "flax_model.msgpack": b"of another framework",
}
WANTED = ["config.json", "empty.txt", "model.safetensors", "spiece.model"]
TOKEN_HINT = "(private and gated models need a token in HF_TOKEN or --token)"
Download = Callable[..., Path]


@pytest.fixture(scope="module")
def stand_in() -> Iterator[FakeHub]:
    with fake_hub.running() as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: None)  # between the library's attempts
        yield running


@pytest.fixture
def hub(stand_in: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    """A hub with one model; no token is configured."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    vars(stand_in).update(vars(FakeHub(stand_in.endpoint)))
    stand_in.add(REPO, FILES)
    return stand_in


@pytest.fixture
def fetch(hub: FakeHub, tmp_path: Path) -> Download:
    def run(
        repo: str = REPO, revision: str | None = None, token: str | None = None, endpoint: str = hub.endpoint
    ) -> Path:
        api = HfApi(endpoint=endpoint, token=token)
        return download(api, repo, revision, (".safetensors", *CONFIG_EXTENSIONS), tmp_path / "hub")

    return run


def error_of(fetch: Download, **arguments: str) -> str:
    """The one line that says why a download fails."""
    with pytest.raises(StartError) as caught:
        fetch(**arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert TOKEN not in message
    assert len(message) < 400
    return message


def test_the_files_of_a_revision(hub: FakeHub, fetch: Download, tmp_path: Path) -> None:
    for revision in (None, "refs/pr/1", hub.add(REPO, FILES, "refs/pr/1")):
        path = fetch(revision=revision)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {name: FILES[name] for name in WANTED}
        assert find_model(REPO, revision, str(tmp_path / "hub")).path == path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repo": "org/other"}, "cannot download 'org/other' from {hub}: status 401: Repository not found (private "),
        ({"repo": "a\nb"}, r"cannot download 'a\nb' from {hub}: Repo id must "),
        ({"revision": "v2"}, "cannot download 'org/name' from {hub}: status 404: Invalid rev id: v2"),
        ({"endpoint": "http://localhost:1"}, "cannot download 'org/name' from http://localhost:1: "),
    ],
)
def test_what_the_hub_does_not_have(hub: FakeHub, fetch: Download, arguments: dict[str, str], message: str) -> None:
    assert error_of(fetch, **arguments).startswith(message.format(hub=hub.endpoint))


def test_private_and_gated_models_need_a_token(hub: FakeHub, fetch: Download) -> None:
    hub.add("org/private", FILES, private=True)
    hub.add("org/gated", FILES, gated=True)
    assert error_of(fetch, repo="org/gated", token="hf_other").endswith(TOKEN_HINT)
    for repo in ("org/private", "org/gated"):
        assert error_of(fetch, repo=repo).endswith(TOKEN_HINT)
        assert (fetch(repo=repo, token=TOKEN) / "model.safetensors").read_bytes() == WEIGHTS
    assert error_of(fetch, token="hf_wrong").endswith(f"Invalid credentials in Authorization header {TOKEN_HINT}")


def test_a_failing_hub(hub: FakeHub, fetch: Download) -> None:
    hub.fails = True
    assert error_of(fetch) == f"cannot download '{REPO}' from {hub.endpoint}: status 500: Internal Server Error"


def test_offline(hub: FakeHub, fetch: Download, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier download is used."""
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert error_of(fetch).endswith("unset the `HF_HUB_OFFLINE` environment variable.")
    path = fetch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch() == path
    assert fetch(endpoint="http://localhost:1") == path
