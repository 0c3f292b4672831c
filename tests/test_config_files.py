"""Options that name files: TLS and tokens, the adapter store, and the cache directory."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from config_parsing import read, refusal

from benchmarks.certificates import make_pair
from tgis.environment import prepare_environment
from tgis.errors import StartError
from tgis.prepare import load_credentials


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Paths of PEM files: ca, cert, key."""
    directory = tmp_path_factory.mktemp("pem")
    authority = make_pair()
    leaf = make_pair(authority)
    for name, data in {"ca": authority.cert, "cert": leaf.cert, "key": leaf.key}.items():
        (directory / name).write_bytes(data)
    return lambda name: str(directory / name)


def test_credentials_are_loaded_only_where_configured(pem: Callable[[str], str], tmp_path: Path) -> None:
    assert load_credentials(read()) == (None, None)
    (tmp_path / "tokens").write_text("secret")
    names = {"TLS_CERT_PATH": "cert", "TLS_KEY_PATH": "key", "TLS_CLIENT_CA_CERT_PATH": "ca"}
    environ = {name: pem(file) for name, file in names.items()}
    certificates, tokens = load_credentials(read(**environ, AUTH_TOKEN_PATH=str(tmp_path / "tokens")))
    assert certificates is not None
    assert tokens is not None
    assert tokens.accepts("secret")


@pytest.mark.parametrize("names", [("CERT",), ("KEY",), ("CLIENT_CA_CERT",), ("KEY", "CLIENT_CA_CERT")])
def test_tls_needs_certificate_and_key(names: tuple[str, ...]) -> None:
    environ = {f"TLS_{name}_PATH": "x.pem" for name in names}
    assert refusal(**environ) == "TLS needs both TLS_CERT_PATH and TLS_KEY_PATH"


@pytest.mark.parametrize("name", ["PREFIX_STORE_PATH", "ADAPTER_CACHE"])
def test_the_adapter_store_must_be_a_directory(tmp_path: Path, name: str) -> None:
    assert read(**{name: str(tmp_path)}).prefix_store_path == tmp_path
    for path in (f"{tmp_path}/absent", __file__, f"{tmp_path}/{'x' * 300}"):
        assert refusal(**{name: path}).startswith(f"{name}={path[:20]!r}"[:-1])
        assert refusal(**{name: path}).endswith(" must be a directory")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stands for this process's environment."""
    replaced: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", replaced)
    return replaced


def test_prepare_environment_creates_the_cache_directory(tmp_path: Path, environ: dict[str, str]) -> None:
    cache = tmp_path / "a" / "b"
    prepare_environment(read(CACHE_DIR=str(cache), HF_HUB_CACHE="/c"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert (environ["HF_HUB_OFFLINE"], environ["HF_HUB_CACHE"]) == ("1", "/c")
    assert environ["TRITON_CACHE_DIR"].startswith(str(cache))
    assert environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_compilers_run_in_directories_of_their_own(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare_environment(read(CACHE_DIR="relative"))
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(environ[name]).parent == tmp_path / "relative"


@pytest.mark.parametrize(("given", "left"), [(" ", None), ("backend:native", "backend:native")])
def test_prepare_environment_keeps_a_configured_allocator(
    tmp_path: Path, environ: dict[str, str], given: str, left: str | None
) -> None:
    environ["PYTORCH_CUDA_ALLOC_CONF"] = given
    prepare_environment(read(CACHE_DIR=str(tmp_path)))
    assert environ.get("PYTORCH_CUDA_ALLOC_CONF") == left


@pytest.mark.usefixtures("environ")
def test_a_cache_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StartError, match=f"^CACHE_DIR: every user can write to {shared}: name a directory of your own"):
        prepare_environment(read(CACHE_DIR=str(shared)))
    prepare_environment(read(CACHE_DIR=str(shared / "cache")))


@pytest.mark.usefixtures("environ")
def test_an_impossible_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="CACHE_DIR: cannot make"):
        prepare_environment(read(CACHE_DIR=str(tmp_path / "file" / "cache")))
    with pytest.raises(StartError, match=r"^CACHE_DIR: cannot make or write to /proc/self:"):  # nor can root
        prepare_environment(read(CACHE_DIR="/proc/self"))
