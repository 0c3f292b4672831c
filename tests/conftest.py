"""Fixtures that several test files need."""

import functools
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from chat_templates import PROCESS
from model_directories import write_model
from repository import REPOSITORY, TEST_CACHE
from tokenizer_families import Families, description, write
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from tgis.frontend.tokenizer import Tokenizer
from tgis.models.files import ModelFiles, find_model
from tgis.utils import logs, queued_stream

# As the server sets it: threads that spin for ever make tests ten times slower on a busy machine.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker per core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # Triton decides when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
# the servers of tests are on this machine
os.environ["no_proxy"] = ",".join(filter(None, [os.environ.get("no_proxy"), "localhost", "127.0.0.1", "::1"]))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in shells' background jobs; tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; servers would inherit it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# other workers make any test slow now and then
hypothesis.settings.register_profile("no-clock", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("no-clock")

pytest.register_assert_rewrite("sampling_oracle")

gc.disable()  # until everything is imported: nearly all that torch and transformers make stays


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _template_process() -> Iterator[None]:
    yield
    PROCESS.close()


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """Commands that run in this process set variables for their children and handlers of signals."""
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    if os.environ != environ:
        os.environ.clear()
        os.environ.update(environ)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def logging_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that configure the logging of this process."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(queued_stream, "STOP_SECONDS", 60.0)  # pytest's file for the output may be on a slow disk
    loggers = [logging.getLogger(name) for name in (None, "tgis", "__main__")]
    levels, handlers = [logger.level for logger in loggers], loggers[0].handlers
    loggers[0].handlers = []
    yield
    for stream in logs._streams:  # their threads would write into the output of a later test
        stream.stop()
    loggers[0].handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Survives between runs; others may read it, as the user of the image does."""
    TEST_CACHE.mkdir(exist_ok=True)  # before a server, which makes a private one
    return TEST_CACHE


def _demo_model(name: str) -> object:
    """Convert in a child process, which keeps its memory and warnings out of the tests."""

    @pytest.fixture(scope="session", name=f"{name}_dir")
    def directory(cache_dir: Path) -> Path:
        command = [sys.executable, "-m", "demo", name, "--out", str(cache_dir)]
        done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
        return Path(done.stdout.strip())

    return directory


smollm2_dir, glassllm_dir, detransliterator_dir, titles_dir = map(
    _demo_model, ("smollm2", "glassllm", "detransliterator", "titles")
)


@pytest.fixture(scope="session")
def families(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Families:
    """The library's tokenizer and ours, by family."""

    @functools.cache
    def load(family: str) -> tuple[Backend, Tokenizer]:
        text = description(family, cache_dir)
        return Backend.from_str(text), Tokenizer.load(write(tmp_path_factory.mktemp(family), text), workers=2)

    return load


@pytest.fixture
def slow_gpt2(tmp_path: Path) -> ModelFiles:
    """A GPT-2 tokenizer in its old format: vocab.json and merges.txt, three merges, no tokenizer.json."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    config = {"model_type": "gpt2", "vocab_size": len(pieces)}
    path = write_model(tmp_path / "slow", config=config, vocab=vocabulary, tokenizer_config=settings)
    (path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    return find_model(str(path), None, None)
