"""Options that name files: TLS and tokens, the adapter store, and the cache directory."""

import os
import stat
from pathlib import Path

import pytest
from config_parsing import read, refusal

from benchmarks.certificates import make_pair
from tgis.environment import LIBRARY_ENVIRONMENT, prepare_environment
from tgis.errors import StartError
from tgis.prepare import load_credentials


def test_credentials_are_loaded_only_where_configured(tmp_path: Path) -> None:
    assert load_credentials(read()) == (None, None)
    authority = make_pair()
    pair = make_pair(authority)
    files = {"TLS_CERT": pair.cert, "TLS_KEY": pair.key, "TLS_CLIENT_CA_CERT": authority.cert, "AUTH_TOKEN": b"secret"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    certificates, tokens = load_credentials(read(**{f"{name}_PATH": str(tmp_path / name) for name in files}))
    assert certificates is not None
    assert certificates.expiry.keys() == {"server", "client_ca"}
    assert tokens is not None
    assert tokens.accepts("secret")


@pytest.mark.parametrize("names", [("CERT",), ("KEY",), ("CLIENT_CA_CERT",), ("KEY", "CLIENT_CA_CERT")])
def test_tls_needs_certificate_and_key(names: tuple[str, ...]) -> None:
    environ = {f"TLS_{name}_PATH": "x.pem" for name in names}
    assert refusal(**environ) == "TLS needs both TLS_CERT_PATH and TLS_KEY_PATH"


@pytest.mark.parametrize("name", ["PREFIX_STORE_PATH", "ADAPTER_CACHE"])
def test_the_adapter_store_may_become_a_directory(tmp_path: Path, name: str) -> None:
    assert read(**{name: str(tmp_path)}).warnings == ()
    for path in (__file__, f"{tmp_path}/{'x' * 300}"):
        assert read(**{name: path}).warnings == (f"{name}={path!r} is no directory yet",)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stands for this process's environment."""
    replaced: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", replaced)
    return replaced


def test_prepare_environment_creates_the_cache_directory(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "a" / "b"
    monkeypatch.chdir(tmp_path)
    prepare_environment(read(CACHE_DIR="a/b", HF_HUB_CACHE="/c"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "tmp")] == [0o700] * 2
    caches = {
        "TMPDIR": f"{cache}/tmp",
        "TRITON_CACHE_DIR": f"{cache}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }
    others = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **LIBRARY_ENVIRONMENT}
    environ.pop("PYTEST_CURRENT_TEST")
    assert environ == {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": "/c", **caches, **others}
    (cache / "tmp").rmdir()
    (cache / "tmp").touch()
    with pytest.raises(StartError, match=r"^CACHE_DIR: cannot make the directory of temporary files: File exists"):
        prepare_environment(read(CACHE_DIR="a/b"))


@pytest.mark.parametrize(
    ("name", "given", "left"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", " ", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", "backend:native"),
        *((name, "7", "7") for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", *LIBRARY_ENVIRONMENT)),
    ],
)
def test_prepare_environment_keeps_what_is_set(
    tmp_path: Path, environ: dict[str, str], name: str, given: str, left: str | None
) -> None:
    environ[name] = given
    prepare_environment(read(CACHE_DIR=str(tmp_path)))
    assert environ.get(name) == left


@pytest.mark.usefixtures("environ")
def test_a_cache_directory_of_others_or_of_nobody_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(StartError, match=f"^CACHE_DIR: every user can write to {shared}: name a directory of your own"):
        prepare_environment(read(CACHE_DIR=str(shared)))
    prepare_environment(read(CACHE_DIR=str(shared / "cache")))
    for impossible in ("/dev/null/cache", "/proc/self"):  # for root, too
        with pytest.raises(StartError, match=f"^CACHE_DIR: cannot make or write to {impossible}:"):
            prepare_environment(read(CACHE_DIR=impossible))
