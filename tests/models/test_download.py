"""Downloads from a fake hub; the cache written by huggingface_hub is the oracle."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_hub
import huggingface_hub
import pytest
from fake_hub import TOKEN, FakeHub
from huggingface_hub import HfApi, snapshot_download

from tgis.errors import StartError
from tgis.models import hub as lookup
from tgis.models.files import CONFIG_EXTENSIONS, find_model
from tgis.models.hub import Listing, download

REPO = "org/name"
WEIGHTS = bytes(range(256)) * 12_000  # 3 MB, more than one chunk
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
Bring = Callable[..., Path]


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
    fresh = FakeHub(stand_in.endpoint, stand_in.storage)
    vars(stand_in).update(vars(fresh))
    stand_in.add(REPO, FILES)
    return stand_in


@pytest.fixture
def bring(hub: FakeHub, tmp_path: Path) -> Bring:
    """Look up and download, as `tgis download-weights` does."""

    def run(revision: str | None = None, token: str | None = None, cache: Path = tmp_path / "hub") -> Path:
        api = client(hub, token)
        listing = lookup.fetch_listing(api, REPO, revision)
        files = lookup.select_files(listing, (".safetensors", *CONFIG_EXTENSIONS))
        return download(api, listing, files, revision, cache)

    return run


def client(hub: FakeHub, token: str | None = None) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def tree(cache: Path) -> dict[str, bytes | str]:
    """REPO in a cache: targets of symlinks and contents of files."""
    folder = cache / "models--org--name"
    found: dict[str, bytes | str] = {}
    for kind in ("blobs", "refs", "snapshots"):
        for path in (folder / kind).rglob("*"):
            if path.is_symlink():
                found[str(path.relative_to(folder))] = os.readlink(path)
            elif path.is_file():
                found[str(path.relative_to(folder))] = path.read_bytes()
    return found


class TestWhole:
    @pytest.mark.parametrize("revision", [None, "main", "refs/pr/1", "v1.0", "commit"])
    def test_the_cache_equals_that_of_the_library(
        self, hub: FakeHub, bring: Bring, tmp_path: Path, revision: str | None
    ) -> None:
        commit = hub.add(REPO, FILES, "refs/pr/1")
        assert hub.add(REPO, FILES, "v1.0") == commit
        revision = commit if revision == "commit" else revision
        path = bring(revision)
        snapshot_download(
            REPO, revision=revision, endpoint=hub.endpoint, cache_dir=tmp_path / "oracle", allow_patterns=WANTED
        )
        assert tree(tmp_path / "hub") == tree(tmp_path / "oracle")
        assert path == tmp_path / "hub" / "models--org--name" / "snapshots" / commit
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {name: FILES[name] for name in WANTED}
        assert find_model(REPO, revision, str(tmp_path / "hub")).path == path
        found = snapshot_download(
            REPO, revision=revision, cache_dir=tmp_path / "hub", allow_patterns=WANTED, local_files_only=True
        )
        assert Path(found) == path

    def test_a_new_revision_downloads_only_new_files(self, hub: FakeHub, bring: Bring, tmp_path: Path) -> None:
        old = bring()
        hub.requests.clear()
        hub.add(REPO, FILES | {"config.json": b'{"model_type": "llama"}'})
        new = bring()
        assert hub.downloads() == [("config.json", 0)]
        assert find_model(REPO, None, str(tmp_path / "hub")).config == {"model_type": "llama"}
        assert find_model(REPO, old.name, str(tmp_path / "hub")).config == {"model_type": "gpt2"}
        assert new != old

    def test_a_complete_cache_may_be_read_only(self, hub: FakeHub, bring: Bring, tmp_path: Path) -> None:
        path = bring()
        before = {file: file.lstat().st_mtime_ns for file in tmp_path.rglob("*")}
        assert bring() == path
        assert {file: file.lstat().st_mtime_ns for file in tmp_path.rglob("*")} == before

    def test_unsafe_names_are_skipped(self, hub: FakeHub, bring: Bring, tmp_path: Path) -> None:
        names = ["../a.json", "..", "/etc/b.json", "c\0.json", "d\n.json", "", "sub/../e.json"]
        hub.add(REPO, dict.fromkeys(names, b"{}") | {"config.json": b"{}"})
        assert [file.name for file in bring().iterdir()] == ["config.json"]


class TestFailed:
    def test_a_connection_that_keeps_breaking(self, hub: FakeHub, bring: Bring, tmp_path: Path) -> None:
        """The next run downloads this file from its begin, and no other."""
        hub.truncations["model.safetensors"] = [2_000_000] + [0] * 10
        with pytest.raises(StartError, match=f"^cannot reach {hub.endpoint}: peer closed connection"):
            bring()
        assert not list((tmp_path / "hub").rglob("model.safetensors"))
        with pytest.raises(StartError, match="is not in the cache"):
            find_model(REPO, None, str(tmp_path / "hub"))
        hub.truncations.clear()
        hub.requests.clear()
        assert (bring() / "model.safetensors").read_bytes() == WEIGHTS
        assert hub.downloads() == [("model.safetensors", 0)]

    @pytest.mark.parametrize(
        ("file", "status", "message"),
        [("model.safetensors", 500, "^{hub} answers 500$"), ("config.json", 404, "^org/name: {hub} answers 404")],
    )
    def test_a_hub_with_an_error(self, hub: FakeHub, bring: Bring, file: str, status: int, message: str) -> None:
        hub.statuses[file] = [status] * 20
        with pytest.raises(StartError, match=message.format(hub=hub.endpoint)):
            bring()

    def test_a_file_that_is_shorter_than_listed(self, hub: FakeHub, bring: Bring) -> None:
        hub.overrides["model.safetensors"] = WEIGHTS[:1000]
        with pytest.raises(StartError, match=r"^cannot download org/name: .* be of size 3072000 but has size 1000"):
            bring()

    def test_an_old_revision_is_served_until_the_new_one_is_complete(
        self, hub: FakeHub, bring: Bring, tmp_path: Path
    ) -> None:
        old = bring()
        hub.add(REPO, FILES | {"model.safetensors": WEIGHTS + b"!", "config.json": b'{"new": 1}'})
        hub.overrides["model.safetensors"] = WEIGHTS
        with pytest.raises(StartError, match="should be of size 3072001"):
            bring()
        assert find_model(REPO, None, str(tmp_path / "hub")).path == old

    def test_a_disk_with_too_little_space(
        self, hub: FakeHub, bring: Bring, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3_000_000))
        with pytest.raises(
            StartError,
            match=r"^org/name needs 2.93 MiB, and the file system of \S+models--org--name has 2.86 MiB free$",
        ):
            bring()
        assert hub.downloads() == []

    def test_a_cache_that_is_not_a_directory(self, bring: Bring, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StartError, match=f"^cannot write {tmp_path}/file/.*: Not a directory"):
            bring(cache=tmp_path / "file")

    @pytest.mark.parametrize("revision", ["../../x", "/etc/x"])
    def test_an_unsafe_revision(self, hub: FakeHub, bring: Bring, tmp_path: Path, revision: str) -> None:
        hub.add(REPO, FILES, revision)
        with pytest.raises(StartError, match="is no name of a revision"):
            bring(revision)
        assert not list(tmp_path.rglob("x"))


class TestLookUp:
    def fails(self, hub: FakeHub, repo: str = REPO, revision: str | None = None, token: str | None = None) -> str:
        with pytest.raises(StartError) as caught:
            lookup.fetch_listing(client(hub, token), repo, revision)
        message = str(caught.value)
        assert "\n" not in message
        assert (token or TOKEN) not in message
        return message

    def test_no_such_model(self, hub: FakeHub) -> None:
        for token in (None, TOKEN):
            message = self.fails(hub, "org/other", token=token)
            assert message.startswith(f"{hub.endpoint} has no model org/other, or a private one")

    def test_a_private_model(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.add("org/private", FILES, private=True)
        assert "needs a token in HF_TOKEN or --token" in self.fails(hub, "org/private")
        assert lookup.fetch_listing(client(hub, TOKEN), "org/private", None).files
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert lookup.fetch_listing(client(hub), "org/private", None).files

    def test_an_invalid_token(self, hub: FakeHub) -> None:
        assert self.fails(hub, token="hf_wrong").endswith("answers 401: Invalid credentials in Authorization header")

    def test_no_such_revision(self, hub: FakeHub) -> None:
        assert self.fails(hub, revision="v2") == f"{REPO} has no revision 'v2'"

    @pytest.mark.parametrize("name", ["", "a/b/c", "a b", "-a/b", "a" * 200, "..", "a\nb", "http://x/y"])
    def test_an_invalid_name(self, hub: FakeHub, name: str) -> None:
        assert "is no name of a model on the hub" in self.fails(hub, name)
        assert hub.requests == []

    def test_offline(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(lookup.HubUnreachable, match=r"^HF_HUB_OFFLINE is set: nothing is downloaded$"):
            lookup.fetch_listing(client(hub), REPO, None)
        assert hub.requests == []

    def test_no_hub(self, hub: FakeHub) -> None:
        with pytest.raises(lookup.HubUnreachable, match=r"^cannot reach http://localhost:1: .*Connection refused"):
            lookup.fetch_listing(HfApi(endpoint="http://localhost:1"), REPO, None)

    def test_a_hub_with_an_error(self, hub: FakeHub) -> None:
        hub.statuses["api"] = [500]
        with pytest.raises(lookup.HubUnreachable, match=f"^{hub.endpoint} answers 500$"):
            lookup.fetch_listing(client(hub), REPO, None)

    @pytest.mark.parametrize(
        "answer",
        [
            b"<html>log in to this network</html>",
            b"[]",
            b"{}",
            b'{"id": "a", "sha": "../..", "siblings": []}',
            b'{"id": "a", "sha": "%s", "siblings": 3}' % (b"a" * 40),
        ],
    )
    def test_a_nonsensical_response(self, hub: FakeHub, answer: bytes) -> None:
        hub.overrides["api"] = answer
        assert self.fails(hub).startswith(f"{hub.endpoint} does not answer as a hub does: ")

    def test_a_gated_model_is_listed_but_not_downloaded(self, hub: FakeHub, bring: Bring, tmp_path: Path) -> None:
        hub.repos.clear()
        hub.add(REPO, FILES, gated=True)
        with pytest.raises(StartError, match=f"^access to {REPO} is granted by its owners") as caught:
            bring()
        assert "\n" not in str(caught.value)
        assert (bring(token=TOKEN) / "model.safetensors").read_bytes() == WEIGHTS

    def test_select_files(self) -> None:
        names = ["a.safetensors", "training_args.bin", "args.json", "a.bin", "vocab.txt", "source.spm", "a.h5"]
        listing = Listing(REPO, "0" * 40, tuple(names))
        assert lookup.select_files(listing, (".bin", ".json")) == ("a.bin",)
        assert lookup.select_files(listing, CONFIG_EXTENSIONS) == ("vocab.txt", "source.spm")
