"""Soft prompts in the store: loading, errors, caching and reloading, and lookups of them."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import tuning
from hypothesis import given
from hypothesis import strategies as st
from prompt_files import (
    BIN,
    BROKEN,
    CAPACITY,
    CONFIG,
    DECODER,
    ENCODER,
    EXECUTED,
    KEY,
    MOST,
    SAFETENSORS,
    WIDTH,
    Files,
    matrix,
    peft,
    pt,
    tgis,
    write,
)

from tgis.engine_core.lookups import LookupTable
from tgis.errors import AdapterError
from tgis.ipc.lookups import Acquire, Acquired, AdapterProblem
from tgis.prompts.soft_prompt import SoftPrompt
from tgis.prompts.store import AdapterCache, AdapterStore, StoreResult
from tgis.prompts.tensor_file import TargetModel

TARGET = TargetModel(WIDTH, MOST, torch.float32, torch.device("cpu"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = tmp_path / "store"
    write(store / "good", tgis(matrix()))
    return store


@pytest.fixture
def store(root: Path) -> AdapterStore:
    return AdapterStore(str(root), CAPACITY, TARGET)


def embeddings(found: StoreResult) -> torch.Tensor:
    assert isinstance(found.adapter, SoftPrompt)
    assert found.adapter.decoder is not None
    return found.adapter.decoder


def test_the_layout_of_tgis(store: AdapterStore) -> None:
    found = store.find("good")
    assert found.loaded
    assert torch.equal(embeddings(found), matrix())
    assert found.adapter.length == 4


def test_unusual_files_of_tgis_can_be_read(store: AdapterStore, root: Path) -> None:
    """Parameters, views into larger tensors, nested ids, an encoder's part that a decoder-only model ignores, and the
    format of torch before 1.6.
    """
    write(root / "old", {DECODER: pt(matrix(), old_format=True)})
    assert torch.equal(embeddings(store.find("old")), matrix())
    write(root / "nested" / "path_1", tgis(torch.nn.Parameter(matrix(16)[8:])))
    write(root / "nested" / "path_1", {ENCODER: pt(matrix(3, 7))})
    prompt = embeddings(store.find("nested/path_1"))
    assert torch.equal(prompt, matrix(16)[8:])
    assert not prompt.requires_grad
    assert prompt.untyped_storage().nbytes() == prompt.nbytes


@pytest.mark.parametrize("name", ["säge-1", "a/b/c", "_", "0"])
def test_ids_may_use_letters_of_any_script(store: AdapterStore, root: Path, name: str) -> None:
    write(root / name, tgis(matrix()))
    assert store.find(name).adapter.length == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_are_converted_to_the_models_type(store: AdapterStore, root: Path, dtype: torch.dtype) -> None:
    write(root / "other", tgis(matrix().to(dtype)))
    prompt = embeddings(store.find("other"))
    assert prompt.dtype == torch.float32
    assert torch.equal(prompt, matrix().to(dtype).float())


def test_files_saved_by_peft_can_be_read(glassllm_dir: Path, cache_dir: Path) -> None:
    trained = tuning.tuned("glassllm", glassllm_dir, cache_dir)
    target = TargetModel(128, 64, torch.float32, torch.device("cpu"))
    store = AdapterStore(str(trained.store), 1 << 20, target)
    for name, lesson in tuning.TUNING_PLANS["glassllm"].trainings.items():
        assert (trained.store / name / f"adapter_model.{lesson.file}").exists()
        assert store.find(name).adapter.length == lesson.length


def test_the_layout_of_peft_needs_no_config_and_takes_precedence(store: AdapterStore, root: Path) -> None:
    directory = root / "all"
    write(directory, tgis(matrix(seed=1)))
    write(directory, {BIN: pt({KEY: matrix(seed=2)})})
    assert torch.equal(embeddings(store.find("all")), matrix(seed=2))
    write(directory, peft({KEY: matrix(seed=3)}))
    assert torch.equal(embeddings(store.find("all")), matrix(seed=3))
    (directory / CONFIG).unlink()
    assert torch.equal(embeddings(store.find("all")), matrix(seed=3))


def refused(store: AdapterStore, name: str) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        store.find(name)
    return caught.value


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_prompt_has_a_clear_error_and_affects_no_other(store: AdapterStore, root: Path, case: str) -> None:
    files, text = BROKEN[case]
    good = store.find("good")
    write(root / "broken", files)
    for _ in range(2):  # failures are not cached
        error = refused(store, "broken")
        assert text in str(error)
        assert error.problem == AdapterProblem.BROKEN
        assert len(str(error)) < 200
        assert str(root) not in str(error)
    assert store.find("good") == StoreResult(good.adapter, loaded=False)
    assert not Path(EXECUTED).exists()


def test_only_regular_files_inside_the_store_are_opened(store: AdapterStore, root: Path, tmp_path: Path) -> None:
    write(tmp_path / "secret", tgis(matrix()))
    write(root / "link", {})
    (root / "link" / DECODER).symlink_to(tmp_path / "secret" / DECODER)
    write(root / "pipe", {})
    os.mkfifo(root / "pipe" / DECODER)
    write(root / "directory" / DECODER, {})
    assert str(refused(store, "link")) == "decoder.pt leads out of the store"
    assert str(refused(store, "pipe")) == "decoder.pt is not a regular file"
    assert str(refused(store, "directory")) == "decoder.pt cannot be read: Is a directory"


@pytest.mark.parametrize("kind", ["ADALORA", "PREFIX_TUNING", "IA3"])
def test_unsupported_adapter_types_are_named(store: AdapterStore, root: Path, kind: str) -> None:
    write(root / "other", peft({KEY: matrix()}, peft_type=kind))
    error = refused(store, "other")
    assert (error.problem, str(error)) == (AdapterProblem.UNSUPPORTED, kind)


BAD_IDS = ["", ".", "..", "../secret", "good/../good", "a.b", "a b", "a\nb", "a\x00b", "good\n", "/", "x" * 513, "🐫"]


@pytest.mark.parametrize("name", [*BAD_IDS, "/etc"])
def test_invalid_ids(store: AdapterStore, name: str) -> None:
    assert refused(store, name).problem == AdapterProblem.BAD_ID


def test_ids_cannot_lead_out_of_the_store(store: AdapterStore, root: Path, tmp_path: Path) -> None:
    """Not by an absolute path, a symlink, or a sibling whose name starts with the store's."""
    for name in ("secret", "store-2"):
        write(tmp_path / name, tgis(matrix()))
        (root / name).symlink_to(tmp_path / name)
    for name in (f"{tmp_path}/secret", f"{root}-2", "secret", "store-2"):
        assert refused(store, name).problem == AdapterProblem.BAD_ID


def test_links_inside_the_store_are_followed(root: Path, tmp_path: Path) -> None:
    """As in Kubernetes volumes; the store itself may be a symlink."""
    (root / "alias").symlink_to(root / "good")
    (tmp_path / "mounted").symlink_to(root)
    store = AdapterStore(str(tmp_path / "mounted"), CAPACITY, TARGET)
    assert store.find("alias").adapter is store.find("good").adapter


@pytest.mark.parametrize("name", ["absent", "good/absent", "nested", "x" * 512, "x/" * 200])
def test_missing_adapters_are_not_found(store: AdapterStore, root: Path, name: str) -> None:
    write(root / "nested" / "deep", tgis(matrix()))
    write(root / "nested", {"README": b"hello"})
    assert refused(store, name).problem == AdapterProblem.NOT_FOUND


def test_hits_return_the_same_object_and_any_change_is_noticed(store: AdapterStore, root: Path) -> None:
    first = store.find("good").adapter
    assert store.find("good") == StoreResult(first, loaded=False)
    assert store.find("good//").adapter is first
    replace(root / "good", DECODER, pt(matrix(seed=1)))
    second = store.find("good")
    assert second.loaded
    assert torch.equal(embeddings(second), matrix(seed=1))
    write(root / "good", peft({KEY: matrix(6)}))
    third = store.find("good").adapter
    assert third.length == 6
    assert len({first.version, second.adapter.version, third.version}) == 3
    (root / "good" / DECODER).unlink()
    assert store.find("good").loaded  # any change makes it reload
    (root / "good" / SAFETENSORS).unlink()
    assert refused(store, "good").problem == AdapterProblem.BROKEN


def replace(directory: Path, name: str, data: bytes) -> None:
    """Replace a file atomically."""
    write(directory, {"new": data})
    (directory / "new").replace(directory / name)


def test_an_adapter_larger_than_the_cache_is_rejected(root: Path) -> None:
    write(root / "wide", tgis(matrix(8, 512).half()))
    target = TargetModel(512, MOST, torch.float64, torch.device("cpu"))
    store = AdapterStore(str(root), 16 << 10, target)
    assert "takes 32768 bytes, the cache has 16384" in str(refused(store, "wide"))


def prompt_of(blocks: int) -> SoftPrompt:
    """A soft prompt that takes 512 bytes times `blocks`."""
    return SoftPrompt(1, torch.empty(blocks, 128))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 10), st.booleans()), max_size=60))
def test_the_cache_behaves_like_a_simple_one(actions: list[tuple[str, int, bool]]) -> None:
    cache = AdapterCache(20 * 512)
    kept: list[tuple[str, int]] = []  # least recently used first
    for name, size, put in actions:
        old = [entry for entry in kept if entry[0] == name]
        if put and not old:
            cache.put(name, (), prompt_of(size))
            while sum(each for _, each in kept) + size > 20:
                kept.pop(0)
            kept.append((name, size))
        else:
            found = cache.get(name, ())
            assert (found.size if found else None) == (512 * old[0][1] if old else None)
            kept = [entry for entry in kept if entry[0] != name] + old
    for name in "abcdef":
        assert (cache.get(name, ()) is not None) == (name in dict(kept))


class SlowStore:
    """Records its lookups and blocks each until `may_end` is released."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.finds: list[str] = []
        self.loaded = False

    def find(self, prompt_id: str) -> StoreResult:
        self.finds.append(prompt_id)
        self.begun.release()
        self.may_end.acquire(timeout=10)
        if prompt_id == "bug":
            raise ZeroDivisionError
        if prompt_id == "none":
            raise AdapterError("directory does not exist", AdapterProblem.NOT_FOUND)
        loaded, self.loaded = not self.loaded, True
        return StoreResult(SoftPrompt(1, matrix()), loaded)


Answers = queue.SimpleQueue[Acquired]


def table(find: Callable[[str], StoreResult], answers: Answers) -> LookupTable:
    lookups = LookupTable(answers.put)
    lookups.finders[str] = ThreadPoolExecutor(4, "adapters"), find
    return lookups


def taken(answers: Answers, count: int) -> list[Acquired]:
    return [answers.get(timeout=10) for _ in range(count)]


def test_concurrent_lookups_of_one_id_load_once_and_block_no_other() -> None:
    store, answers = SlowStore(), Answers()
    lookups = table(store.find, answers)
    for number in range(50):
        lookups.acquire(Acquire(number, "slow"))
    lookups.acquire(Acquire(50, "other"))
    assert store.begun.acquire(timeout=10)
    assert store.begun.acquire(timeout=10)
    assert sorted(store.finds) == ["other", "slow"]
    for _ in range(2):
        store.may_end.release()
    infos = taken(answers, 51)
    assert {info.lookup_id for info in infos} == set(range(51))
    assert all(info.adapter and info.adapter.length == 4 and not info.reason for info in infos)
    assert sum(info.loaded for info in infos) == 1
    assert sorted(store.finds) == ["other", "slow"]
    assert len({id(lookups.found(number).adapter) for number in range(50)}) == 1


def test_a_lookup_released_while_it_loads_holds_nothing() -> None:
    store, answers = SlowStore(), Answers()
    lookups = table(store.find, answers)
    lookups.acquire(Acquire(7, "slow"))
    assert store.begun.acquire(timeout=10)
    lookups.release([7])
    store.may_end.release()
    taken(answers, 1)
    assert lookups._held == {}


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("none", AdapterProblem.NOT_FOUND, "directory does not exist"),
        ("bug", AdapterProblem.BROKEN, "internal error: ZeroDivisionError"),
    ],
)
def test_every_lookup_is_answered(name: str, problem: AdapterProblem, reason: str) -> None:
    store, answers = SlowStore(), Answers()
    lookups = table(store.find, answers)
    for number in (1, 2, 3):
        lookups.acquire(Acquire(number, name))
        store.may_end.release()
    infos = taken(answers, 3)
    assert {info.lookup_id for info in infos} == {1, 2, 3}
    assert {(info.problem, info.reason) for info in infos} == {(problem, reason)}
    lookups.release([1, 2, 3])
    assert (lookups._held, lookups._known) == ({}, {})


@pytest.fixture
def seq2seq(root: Path) -> AdapterStore:
    """The same store for an encoder-decoder."""
    target = TargetModel(WIDTH, MOST, torch.float32, torch.device("cpu"), encoder_decoder=True)
    return AdapterStore(str(root), CAPACITY, target)


@pytest.mark.parametrize(
    ("files", "encoder", "decoder", "length"),
    [
        (tgis(matrix(6)), None, matrix(6), 7),  # including the start token
        ({ENCODER: pt(matrix(6))}, matrix(6), None, 6),
        ({ENCODER: pt(matrix(6)), DECODER: pt(matrix(8))}, matrix(6), matrix(8), 15),
        (peft({KEY: matrix(6)}, num_virtual_tokens=3, task_type="SEQ_2_SEQ_LM"), matrix(6)[:3], None, 3),
        (
            peft({KEY: matrix(5)}, num_virtual_tokens=5, num_transformer_submodules=1, task_type="SEQ_2_SEQ_LM"),
            matrix(5),
            None,
            5,
        ),
    ],
    ids=["decoder", "encoder", "both", "peft", "peft of one part"],
)
def test_soft_prompts_of_an_encoder_decoder(
    seq2seq: AdapterStore,
    root: Path,
    files: Files,
    encoder: torch.Tensor | None,
    decoder: torch.Tensor | None,
    length: int,
) -> None:
    write(root / "prompt", files)
    prompt = seq2seq.find("prompt").adapter
    assert isinstance(prompt, SoftPrompt)
    for part, wanted in ((prompt.encoder, encoder), (prompt.decoder, decoder)):
        assert (part is None) == (wanted is None)
        assert part is None or wanted is None or torch.equal(part, wanted)
    assert prompt.length == length
    assert prompt.decoder_length == (0 if decoder is None else len(decoder))
    assert prompt.size == 512 * sum(part is not None for part in (encoder, decoder))


SAYS_TASK = "adapter_config.json must say task_type SEQ_2_SEQ_LM, for this is an encoder-decoder model"


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (tgis(matrix(5)), "decoder.pt has 5 virtual tokens, it must be an even number"),
        ({ENCODER: pt(matrix(3)), DECODER: pt(matrix(4))}, "encoder.pt has 3 virtual tokens, it must be an even"),
        ({ENCODER: pt(matrix(4)), DECODER: b""}, "decoder.pt is damaged"),
        ({ENCODER: pt(matrix(4, 8)), DECODER: pt(matrix(4))}, "encoder.pt has rows of 8 numbers"),
        (peft({KEY: matrix(4)}), SAYS_TASK),
        ({SAFETENSORS: peft({KEY: matrix(4)})[SAFETENSORS]}, SAYS_TASK),
        (
            peft({KEY: matrix(4)}, num_virtual_tokens=4, task_type="SEQ_2_SEQ_LM"),
            "adapter_model.safetensors has 4 virtual tokens, adapter_config.json says 8",
        ),
        (
            peft({KEY: matrix(4)}, task_type="SEQ_2_SEQ_LM"),
            "adapter_model.safetensors has 4 virtual tokens, adapter_config.json says None",
        ),
    ],
)
def test_soft_prompts_unusable_for_an_encoder_decoder(
    seq2seq: AdapterStore, root: Path, files: Files, text: str
) -> None:
    write(root / "prompt", files)
    assert text in str(refused(seq2seq, "prompt"))
