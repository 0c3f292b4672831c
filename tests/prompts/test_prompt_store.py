"""Soft prompts in the store: loading, errors, caching and reloading, and lookups of them."""

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import prompt_files
import pytest
import torch
from prompt_files import CONFIG, DECODER, ENCODER, KEY, SAFETENSORS, Files, matrix, peft, pt, tgis, write

from tgis.engine_core.lookups import LookupTable
from tgis.errors import AdapterError
from tgis.ipc.lookups import (
    Acquire,
    Acquired,
    AdapterProblem,
    AdapterRef,
    AdapterStoreOptions,
    GrammarKind,
    GrammarSpec,
)
from tgis.prompts import catalog as catalog_module
from tgis.prompts.soft_prompt import SoftPrompt
from tgis.prompts.store import AdapterCache, AdapterStore, StoreResult
from tgis.prompts.tensor_file import TargetModel

TARGET = TargetModel(prompt_files.WIDTH, prompt_files.MOST, torch.float32, torch.device("cpu"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    write(store / "good", tgis(matrix()))
    return store


@pytest.fixture
def store(root: Path) -> AdapterStore:
    return AdapterStore(str(root), prompt_files.CAPACITY, TARGET)


def embeddings(found: StoreResult) -> torch.Tensor:
    assert isinstance(found.adapter, SoftPrompt)
    assert found.adapter.decoder is not None
    return found.adapter.decoder


def test_the_layout_of_tgis(store: AdapterStore, root: Path) -> None:
    """Also parameters, views into larger tensors, nested ids of any script, an encoder's part that a decoder-only model
    ignores, and the format of torch before 1.6.
    """
    found = store.find("good")
    assert (found.loaded, found.adapter.length, torch.equal(embeddings(found), matrix())) == (True, 4, True)
    write(root / "old", {DECODER: pt(matrix(), old_format=True)})
    assert torch.equal(embeddings(store.find("old")), matrix())
    write(root / "säge-1/path_1", tgis(torch.nn.Parameter(matrix(16)[8:])) | {ENCODER: pt(matrix(3, 7))})
    prompt = embeddings(store.find("säge-1/path_1"))
    assert torch.equal(prompt, matrix(16)[8:])
    assert not prompt.requires_grad
    assert prompt.untyped_storage().nbytes() == prompt.nbytes
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        write(root / "other", tgis(matrix().to(dtype)))
        prompt = embeddings(store.find("other"))
        assert (prompt.dtype, torch.equal(prompt, matrix().to(dtype).float())) == (torch.float32, True)


def test_the_layout_of_peft_needs_no_config_and_takes_precedence(store: AdapterStore, root: Path) -> None:
    directory = root / "all"
    write(directory, tgis(matrix(seed=1)))
    write(directory, {prompt_files.BIN: pt({KEY: matrix(seed=2)})})
    assert torch.equal(embeddings(store.find("all")), matrix(seed=2))
    write(directory, peft({KEY: matrix(seed=3)}))
    assert torch.equal(embeddings(store.find("all")), matrix(seed=3))
    (directory / CONFIG).unlink()
    assert torch.equal(embeddings(store.find("all")), matrix(seed=3))


def refused(store: AdapterStore, name: str) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        store.find(name)
    return caught.value


@pytest.mark.parametrize("case", prompt_files.BROKEN)
def test_a_broken_prompt_has_a_clear_error_and_affects_no_other(store: AdapterStore, root: Path, case: str) -> None:
    files, text = prompt_files.BROKEN[case]
    good = store.find("good")
    write(root / "broken", files)
    for _ in range(2):  # failures are not cached
        error = refused(store, "broken")
        assert text in str(error)
        assert error.problem == AdapterProblem.BROKEN
        assert len(str(error)) < 200
        assert str(root) not in str(error)
    assert store.find("good") == StoreResult(good.adapter, loaded=False)
    assert not Path(prompt_files.EXECUTED).exists()


def test_only_regular_files_inside_the_store_are_opened(store: AdapterStore, root: Path, tmp_path: Path) -> None:
    write(tmp_path / "secret", tgis(matrix()))
    write(root / "link", {})
    (root / "link" / DECODER).symlink_to(tmp_path / "secret" / DECODER)
    write(root / "pipe", {})
    os.mkfifo(root / "pipe" / DECODER)
    write(root / "directory" / DECODER, {})
    texts = {"link": "leads out of the store", "pipe": "is not a regular file"}
    for name, text in (texts | {"directory": "cannot be read: Is a directory"}).items():
        assert str(refused(store, name)) == f"decoder.pt {text}"


def test_unsupported_adapter_types_are_named(store: AdapterStore, root: Path) -> None:
    for kind in ("ADALORA", "PREFIX_TUNING", "IA3", "X" * 99):
        write(root / "other", peft({KEY: matrix()}, peft_type=kind))
        error = refused(store, "other")
        assert (error.problem, str(error)) == (AdapterProblem.UNSUPPORTED, kind[:40])


BAD_IDS = ["", ".", "..", "../secret", "good/../good", "a.b", "a b", "a\nb", "a\x00b", "good\n", "/", "/etc", "🐫"]


def test_ids_cannot_lead_out_of_the_store(store: AdapterStore, root: Path, tmp_path: Path) -> None:
    """Not by an absolute path, a symlink, or a sibling whose name starts with the store's."""
    for name in ("secret", "store-2"):
        write(tmp_path / name, tgis(matrix()))
        (root / name).symlink_to(tmp_path / name)
    for name in (*BAD_IDS, "x" * 513, f"{tmp_path}/secret", f"{root}-2", "secret", "store-2"):
        assert refused(store, name).problem == AdapterProblem.BAD_ID, name


def test_links_inside_the_store_are_followed(root: Path, tmp_path: Path) -> None:
    """As in Kubernetes volumes; the store itself may be a symlink, and appear after the start."""
    (root / "alias").symlink_to(root / "good")
    write(root / "files", {})
    (root / "files" / DECODER).symlink_to(root / "good" / DECODER)
    store = AdapterStore(str(tmp_path / "mounted"), prompt_files.CAPACITY, TARGET)
    assert refused(store, "alias").problem == AdapterProblem.NOT_FOUND
    (tmp_path / "mounted").symlink_to(root)
    assert store.find("alias").adapter is store.find("good").adapter
    assert torch.equal(embeddings(store.find("files")), matrix())


def test_missing_adapters_are_not_found(store: AdapterStore, root: Path) -> None:
    write(root / "nested" / "deep", tgis(matrix()))
    write(root / "nested", {"README": b"hello"})
    for name in ("absent", "good/absent", "nested", "x" * 512, "x/" * 200):
        assert refused(store, name).problem == AdapterProblem.NOT_FOUND, name


def test_the_catalog_lists_what_may_be_an_adapter(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In up to four nested directories, none of them hidden; and modules, whatever their directories have."""
    for name in ("a/b/c/d/e", "a/b/c/d", "c-1", ".hidden/x"):
        write(root / name, {prompt_files.BIN: b""})
    write(root / "empty", {"README": b"hello"})
    (root / "alias").symlink_to(root / "a")
    options = AdapterStoreOptions(str(root), 1, 8, {"b.v1": str(tmp_path)})
    catalog = catalog_module.AdapterCatalog(options)
    assert catalog.ids() == ["a/b/c/d", "b.v1", "c-1", "good"]
    assert [name for name in ("a/b/c/d/e", "b.v1", "alias/b/c/d", "empty", "absent") if not catalog.has(name)] == [
        "empty",
        "absent",
    ]
    monkeypatch.setattr(catalog_module, "MAX_LISTED", 2)
    assert [catalog.ids(), catalog_module.AdapterCatalog(None).ids()] == [["b.v1", "c-1"], []]


def test_hits_return_the_same_object_and_any_change_is_noticed(store: AdapterStore, root: Path) -> None:
    first = store.find("good").adapter
    assert store.find("good") == StoreResult(first, loaded=False)
    assert store.find("good//").adapter is first
    write(root / "good", {"new": pt(matrix(seed=1))})
    (root / "good/new").replace(root / "good" / DECODER)
    second = store.find("good")
    assert (second.loaded, torch.equal(embeddings(second), matrix(seed=1))) == (True, True)
    write(root / "good", peft({KEY: matrix(6)}))
    third = store.find("good").adapter
    assert third.length == 6
    versions = {first.version, second.adapter.version, third.version}
    assert (len(versions), min(versions) > 2**32) == (3, True)
    (root / "good" / DECODER).unlink()
    assert store.find("good").loaded  # any change makes it reload
    (root / "good" / SAFETENSORS).unlink()
    assert refused(store, "good").problem == AdapterProblem.BROKEN


def test_an_adapter_larger_than_the_cache_is_rejected(root: Path) -> None:
    write(root / "wide", tgis(matrix(8, 512).half()))
    target = TargetModel(512, prompt_files.MOST, torch.float64, torch.device("cpu"))
    store = AdapterStore(str(root), 16 << 10, target)
    assert "takes 32768 bytes, the cache has 16384" in str(refused(store, "wide"))


def test_the_least_recently_used_adapters_are_evicted() -> None:
    cache = AdapterCache(4 * 512)
    for name, size in (("a", 1), ("b", 1), ("c", 2)):
        cache.put(name, (), SoftPrompt(1, torch.empty(size, 128)))  # of 512 bytes each
    assert cache.get("a", ()) is not None
    cache.put("d", (), SoftPrompt(1, torch.empty(2, 128)))
    assert [name for name in "abcd" if cache.get(name, ())] == ["a", "d"]


class SlowStore:
    """Keeps the ids that are looked up, and blocks until `may_end` is released."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.answers = queue.SimpleQueue[Acquired]()
        self.finds: list[Any] = []
        self.lookups = LookupTable(self.answers.put)
        self.lookups.finders[str] = ThreadPoolExecutor(4, "adapters"), self.find

    def find(self, prompt_id: Any) -> StoreResult:
        self.finds.append(prompt_id)
        self.begun.release()
        assert self.may_end.acquire(timeout=10)
        if prompt_id == "bug":
            raise ZeroDivisionError
        if prompt_id == "none":
            raise AdapterError("directory does not exist", AdapterProblem.NOT_FOUND)
        return StoreResult(SoftPrompt(7, matrix()), loaded=prompt_id == "slow")

    def taken(self, count: int) -> list[Acquired]:
        return [self.answers.get(timeout=10) for _ in range(count)]


def test_concurrent_lookups_of_one_id_load_once_and_block_no_other() -> None:
    store = SlowStore()
    for number in range(51):
        store.lookups.acquire(Acquire(number, "slow" if number < 50 else "other"))
    for _ in range(2):
        assert store.begun.acquire(timeout=10)
    assert sorted(store.finds) == ["other", "slow"]
    store.lookups.release([50])  # while it loads
    store.may_end.release(2)
    infos = store.taken(51)
    names = {number: "slow" if number < 50 else "other" for number in range(51)}
    expected = {number: (AdapterRef(name, 4, 0, number, 7), "") for number, name in names.items()}
    assert {info.lookup_id: (info.adapter, info.reason) for info in infos} == expected
    assert (sum(info.loaded for info in infos), sorted(store.finds)) == (1, ["other", "slow"])
    assert len({id(store.lookups.found(number).adapter) for number in range(50)}) == 1
    assert set(store.lookups._held) == set(range(50))


def test_a_lookup_that_was_dropped_before_it_began_is_begun_anew() -> None:
    store = SlowStore()
    store.lookups.finders[GrammarSpec] = store.lookups.finders[str]
    for number in range(5):
        store.lookups.acquire(Acquire(number, GrammarSpec(GrammarKind.REGEX, f"{number}")))
    assert all(store.begun.acquire(timeout=10) for _ in range(4))  # all threads are busy
    store.lookups.release([4])
    store.lookups.acquire(Acquire(5, GrammarSpec(GrammarKind.REGEX, "4")))
    store.may_end.release(5)
    assert {info.lookup_id for info in store.taken(5)} == {0, 1, 2, 3, 5}
    assert store.answers.empty()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", (AdapterProblem.NOT_FOUND, "directory does not exist")),
        ("bug", (AdapterProblem.BROKEN, "internal error: ZeroDivisionError")),
    ],
)
def test_every_lookup_is_answered(name: str, expected: tuple[AdapterProblem, str], caplog: Any) -> None:
    store = SlowStore()
    for number in (1, 2, 3):
        store.lookups.acquire(Acquire(number, name))
        store.may_end.release()
    assert {(info.lookup_id, info.problem, info.reason) for info in store.taken(3)} == {
        (n, *expected) for n in (1, 2, 3)
    }
    store.lookups.release([1, 2, 3])
    assert (store.lookups._held, store.lookups._known) == ({}, {})
    logged = [(record.message, bool(record.exc_info)) for record in caplog.records]
    assert logged == [("a lookup failed", True)] * (3 if name == "bug" else 0)


@pytest.fixture
def seq2seq(root: Path) -> AdapterStore:
    """The same store for an encoder-decoder."""
    return AdapterStore(str(root), prompt_files.CAPACITY, replace(TARGET, encoder_decoder=True))


def seq2seq_peft(rows: int, **config: Any) -> Files:
    return peft({KEY: matrix(rows)}, task_type="SEQ_2_SEQ_LM", **config)


@pytest.mark.parametrize(
    ("files", "encoder", "decoder", "length"),
    [
        (tgis(matrix(6)), None, matrix(6), 7),  # including the start token
        ({ENCODER: pt(matrix(6))}, matrix(6), None, 6),
        ({ENCODER: pt(matrix(6)), DECODER: pt(matrix(8))}, matrix(6), matrix(8), 15),
        (seq2seq_peft(6, num_virtual_tokens=3), matrix(6)[:3], None, 3),
        (seq2seq_peft(5, num_virtual_tokens=5, num_transformer_submodules=1), matrix(5), None, 5),
    ],
    ids=["decoder", "encoder", "both", "peft", "peft of one part"],
)
def test_soft_prompts_of_an_encoder_decoder(
    seq2seq: AdapterStore, root: Path, files: Files, encoder: Any, decoder: Any, length: int
) -> None:
    write(root / "prompt", files)
    prompt = seq2seq.find("prompt").adapter
    assert isinstance(prompt, SoftPrompt)
    for part, wanted in ((prompt.encoder, encoder), (prompt.decoder, decoder)):
        assert part is wanted is None or (part is not None and torch.equal(part, wanted))
    assert (prompt.length, prompt.decoder_length) == (length, 0 if decoder is None else len(decoder))
    assert prompt.size == 512 * sum(part is not None for part in (encoder, decoder))


SAYS_TASK = "adapter_config.json must say task_type SEQ_2_SEQ_LM, for this is an encoder-decoder model"
OTHER_COUNT = "adapter_model.safetensors has 4 virtual tokens, adapter_config.json says"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (tgis(matrix(5)), "decoder.pt has 5 virtual tokens, it must be an even number"),
        ({ENCODER: pt(matrix(3)), DECODER: pt(matrix(4))}, "encoder.pt has 3 virtual tokens, it must be an even"),
        ({ENCODER: pt(matrix(4)), DECODER: b""}, "decoder.pt is damaged"),
        ({ENCODER: pt(matrix(4, 8)), DECODER: pt(matrix(4))}, "encoder.pt has rows of 8 numbers"),
        (peft({KEY: matrix(4)}), SAYS_TASK),
        ({SAFETENSORS: peft({KEY: matrix(4)})[SAFETENSORS]}, SAYS_TASK),
        (seq2seq_peft(4, num_virtual_tokens=4), f"{OTHER_COUNT} 8"),
        (seq2seq_peft(4), f"{OTHER_COUNT} None"),
    ],
)
def test_soft_prompts_unusable_for_an_encoder_decoder(
    seq2seq: AdapterStore, root: Path, files: Files, text: str
) -> None:
    write(root / "prompt", files)
    assert text in str(refused(seq2seq, "prompt"))
