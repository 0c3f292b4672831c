"""The engine hf_optimum_ort: graphs generate what transformers generates in changing batches; bad files are named."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import onnx
import pytest
import torch
from batches import engine_options, limits
from onnx import TensorProto, helper
from step_failures import Failing, check, requests
from step_failures import run as run_with_setbacks
from tiny_models import generate_all

from tgis.engines.onnx import session
from tgis.engines.onnx.decoder import GraphFiles, find_graphs, ignores_padding
from tgis.engines.onnx.engine import OnnxSeq2SeqLM, describe_memory, load_engine
from tgis.engines.onnx.session import Session
from tgis.engines.padded.engine import PaddedEngine
from tgis.engines.padded.model import MAX_PREFILL_TOKENS
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.request import LogprobOptions, Request, SamplingParams
from tgis.models.onnx import export, optimum_export
from tgis.utils.file_lock import locked

MAKERS = [Path(str(module.__file__)) for module in (export, optimum_export)]


def exported(model: Path, cache: Path, *options: str) -> Path:
    """A demo model converted by `tgis convert-to-onnx`."""
    digest = hashlib.sha256()
    for file in (*MAKERS, export.REQUIREMENTS):
        digest.update(file.read_bytes())
    out = cache / "onnx" / "-".join([model.name, *(option.strip("-") for option in options), digest.hexdigest()[:12]])
    with locked(out.parent / f".{out.name}.lock"):  # other test processes wait for it
        if not out.exists():
            unfinished = out.parent / f".{out.name}.{os.getpid()}"
            command = [sys.executable, "-m", "tgis", "convert-to-onnx", *options, str(model), str(unfinished)]
            subprocess.run(command, check=True, env=os.environ | {"CACHE_DIR": str(cache)}, stdout=subprocess.DEVNULL)
            unfinished.replace(out)
    return out


def beside(source: Path, folder: Path, missing: str = ".onnx") -> Path:
    """A directory with links to all files of another, except those with this in their names."""
    folder.mkdir()
    for file in source.iterdir():
        if missing not in file.name:
            (folder / file.name).symlink_to(file)
    return folder


BOTH = pytest.mark.parametrize("exports", ["glassllm", "detransliterator"], indirect=True, scope="module")
DECODER = pytest.mark.parametrize("exports", ["glassllm"], indirect=True, scope="module")
ENCODER_DECODER = pytest.mark.parametrize("exports", ["detransliterator"], indirect=True, scope="module")


@dataclass
class Exports:
    """A demo model and its graphs."""

    name: str
    model: Path
    graphs: Path

    @cached_property
    def expected(self) -> list[list[int]]:
        """What transformers generates for each of `wanted()` alone."""
        engine = PaddedEngine(engine_options(self.model, 8))
        return [generate_all(engine, limits(10**6), [request], random.Random(0))[0] for request in wanted()]


@pytest.fixture(scope="module")
def exports(request: pytest.FixtureRequest, cache_dir: Path) -> Exports:
    model: Path = request.getfixturevalue(f"{request.param}_dir")
    return Exports(request.param, model, exported(model, cache_dir))


def load(directory: Path) -> PaddedEngine:
    engine = load_engine(engine_options(directory, 8))
    engine.warm_up()
    return engine


def wanted() -> list[Request]:
    draw = random.Random(3)
    prompts = [[draw.randrange(4, 800) for _ in range(draw.randint(1, 40))] for _ in range(12)]
    return [
        Request(n, prompt, draw.randint(1, 24), False, SamplingParams(), LogprobOptions(input_tokens=n % 3 == 0))
        for n, prompt in enumerate(prompts)
    ]


@BOTH
def test_changing_batches_generate_what_transformers_generates_alone(
    exports: Exports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in chunks shorter than the prompts."""
    monkeypatch.setitem(MAX_PREFILL_TOKENS, "cpu", 32)
    bounds = limits(10**6, max_batch_size=8, prefill_tokens=512)
    assert generate_all(load(exports.graphs), bounds, wanted(), random.Random(2)) == exports.expected


@DECODER
def test_the_old_layout_of_two_decoders_one_sequence_at_a_time(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where graphs see padding."""
    directory = changed(exports.graphs, tmp_path / "model", "model.onnx", build_in_past)
    (directory / "model.onnx").rename(directory / "decoder_model.onnx")
    (directory / "decoder_with_past_model.onnx").symlink_to(exports.graphs / "model.onnx")
    monkeypatch.setitem(MAX_PREFILL_TOKENS, "cpu", 8)
    monkeypatch.setattr("tgis.engines.onnx.engine.ignores_padding", lambda *_: False)
    engine = load(directory)
    assert engine.info.max_batch_size == 1
    assert "MAX_BATCH_SIZE is 1: the graphs see padding (see tgis convert-to-onnx)" in caplog.text
    found = generate_all(engine, limits(10**6, max_batch_size=1), wanted()[:3], random.Random(0))
    assert found == exports.expected[:3]
    engine.find_peak(runner := mock.Mock())  # all of a prompt is in one pass
    runner.padded_peak.assert_called_once_with(254, 256, chunked=False)


@BOTH
def test_graphs_may_be_in_a_subdirectory(exports: Exports, tmp_path: Path) -> None:
    directory = beside(exports.graphs, tmp_path / "model")
    (directory / "onnx").mkdir()
    for graph in exports.graphs.glob("*.onnx"):
        (directory / "onnx" / graph.name).symlink_to(graph)
    assert load(directory).info.model_class.endswith(" (ONNX)")


@ENCODER_DECODER
def test_the_generation_config_is_obeyed(exports: Exports, tmp_path: Path) -> None:
    common = [token for tokens in exports.expected[:3] for token in tokens]
    found = []
    for source, start in ((exports.model, PaddedEngine), (exports.graphs, load_engine)):
        name, rules = "generation_config.json", {"suppress_tokens": common, "forced_bos_token_id": 7}
        folder = beside(source, tmp_path / start.__name__, name)
        (folder / name).write_text(json.dumps(json.loads((source / name).read_text()) | rules))
        engine = start(engine_options(folder, 8))
        assert engine.info.forced_bos_token_id == 7
        found.append(generate_all(engine, limits(10**6, max_batch_size=8), wanted()[:3], random.Random(0)))
    assert found[0] == found[1] != exports.expected[:3]


@BOTH
def test_a_failed_pass_changes_no_result(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(exports.graphs)
    expected = {n: found for request in requests() for n, found in run_with_setbacks(engine, [request]).items()}
    failing = Failing(Session.run, OutOfMemory("none left"), {4, 5})
    monkeypatch.setattr(Session, "run", lambda self, *args: failing(self, *args))  # noqa: PLW0108 - to bind
    check(run_with_setbacks(engine, requests()), expected)
    assert failing.count > 4


@ENCODER_DECODER
def test_a_graph_that_sees_padding_is_detected(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(exports.graphs)._model
    assert isinstance(engine, OnnxSeq2SeqLM)
    assert ignores_padding(engine._decoder, engine._probe_outputs)
    monkeypatch.setattr(
        "tgis.engines.onnx.decoder.padding_mask",
        lambda lengths, columns: torch.ones(len(lengths), columns, dtype=torch.bool),
    )
    assert not ignores_padding(engine._decoder, engine._probe_outputs)
    blind = replace(engine._decoder.with_past.inputs["input_ids"])
    monkeypatch.setattr(engine._decoder.with_past, "inputs", {"input_ids": blind})
    assert not ignores_padding(engine._decoder, engine._probe_outputs)


@BOTH
def test_the_model_info(exports: Exports, caplog: pytest.LogCaptureFixture) -> None:
    ours = load_engine(engine_options(exports.graphs, 8, dtype="bfloat16")).info
    theirs = PaddedEngine(engine_options(exports.model, 8)).info
    assert ours.model_class == f"{theirs.model_class} (ONNX)"
    facts, others = (msgspec.structs.asdict(info) for info in (ours, theirs))
    different = {name for name in facts if facts[name] != others[name]}
    assert different == {"engine", "model_class", "arithmetic", "embedding_size", "lora_targets"}
    assert not ours.supports_adapters
    assert "DTYPE=bfloat16 has no effect: the graphs were exported in float32" in caplog.text


def test_out_of_memory_is_distinguished_from_bugs() -> None:
    graph = object.__new__(Session)
    graph._session = mock.Mock()
    for text in ("Failed to allocate memory for requested buffer of size 99", "std::bad_alloc", "CUDA: out of memory"):
        graph._session.run_with_iobinding.side_effect = Exception(text)
        with pytest.raises(OutOfMemory, match=r"^the device is out of memory in a pass of onnxruntime$"):
            graph._run(None)
    graph._session.run_with_iobinding.side_effect = Exception("bad shape")
    with pytest.raises(Exception, match="bad shape"):
        graph._run(None)


def test_types_have_their_names_and_numbers_in_onnx() -> None:
    for name, (dtype, number) in session._DTYPES.items():
        kind = TensorProto.DataType.Name(number).lower()
        assert (name, dtype) == (f"tensor({kind})", getattr(torch, kind))


def refusal(directory: Path, start: Callable[..., object] = load_engine) -> str:
    with pytest.raises(StartError) as caught:
        start(engine_options(directory, 8))
    return str(caught.value)


Change = Callable[[onnx.ModelProto], object]


def changed(source: Path, folder: Path, file: str, change: Change) -> Path:
    """A copy of a directory with one graph changed."""
    beside(source, folder, file)
    model = onnx.load(source / file)
    change(model)
    onnx.save(model, folder / file)
    return folder


def drop(items: Any, start: str) -> None:
    for item in [item for item in items if item.name.startswith(start)]:
        items.remove(item)


def add_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(onnx.helper.make_tensor_value_info("inputs_embeds", onnx.TensorProto.FLOAT, [1, 2]))


def forget_heads(model: onnx.ModelProto) -> None:
    (past,) = [node for node in model.graph.input if node.name == "past_key_values.0.key"]
    past.type.tensor_type.shape.dim[1].dim_param = "heads"


def build_in_past(model: onnx.ModelProto) -> None:
    """An empty one of one row, in place of the inputs."""
    for port in [port for port in model.graph.input if port.name.startswith("past_key_values.")]:
        _, heads, _, size = (axis.dim_value for axis in port.type.tensor_type.shape.dim)
        model.graph.input.remove(port)
        model.graph.initializer.append(helper.make_tensor(port.name, TensorProto.FLOAT, [1, heads, 0, size], []))


CHANGES: dict[str, tuple[Change, str]] = {
    "no present": (lambda model: drop(model.graph.output, "present.3.value"), " has no output present.3.value"),
    "no logits": (lambda model: drop(model.graph.output, "logits"), " has no output logits"),
    "another input": (add_input, " wants an input 'inputs_embeds', which this engine does not have"),
    "no heads": (forget_heads, ": past_key_values.0.key is (None, None, None, 32), not [rows, heads, columns, size]"),
    "no past": (build_in_past, " takes no past_key_values.*: it was exported without the past"),
}


ENCODER_CHANGES: dict[str, tuple[Change, str]] = {
    "another input": CHANGES["another input"],
    "no states": (lambda model: drop(model.graph.output, "last_"), " has no output last_hidden_state"),
}


@pytest.mark.parametrize(
    ("exports", "file", "edit", "said"),
    [
        *(("glassllm", "model.onnx", *change) for change in CHANGES.values()),
        *(("detransliterator", "encoder_model.onnx", *change) for change in ENCODER_CHANGES.values()),
    ],
    indirect=["exports"],
    scope="module",
)
def test_an_unsupported_graph_is_refused(exports: Exports, tmp_path: Path, file: str, edit: Change, said: str) -> None:
    directory = changed(exports.graphs, tmp_path / "model", file, edit)
    assert refusal(directory) == f"{directory}/{file}{said}"


@BOTH
def test_a_broken_file_is_named(exports: Exports, tmp_path: Path) -> None:
    for broken in exports.graphs.glob("*.onnx"):
        directory = beside(exports.graphs, tmp_path / broken.stem, broken.name)
        (directory / broken.name).write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
        assert refusal(directory).startswith(f"onnxruntime cannot load {directory / broken.name}: ")


def test_what_is_missing_is_named(glassllm_dir: Path, detransliterator_dir: Path, tmp_path: Path) -> None:
    causal, both = beside(glassllm_dir, tmp_path / "causal"), beside(detransliterator_dir, tmp_path / "both")
    first, others = "decoder_model.onnx", "decoder_with_past_model.onnx"
    last = f"decoder_model_merged.onnx nor {first} with {others}: tgis convert-to-onnx makes them"
    assert refusal(causal) == f"{causal} has no ONNX graphs, neither model.onnx nor {last}"
    (causal / first).touch()
    assert refusal(causal) == f"{causal} has no {others}, the other half of its decoder (see tgis convert-to-onnx)"
    (causal / first).rename(causal / others)
    assert refusal(causal) == f"{causal} has no {first}, the other half of its decoder (see tgis convert-to-onnx)"
    (causal / (merged := "decoder_model_merged.onnx")).touch()
    assert find_graphs(causal, encoder_decoder=False) == GraphFiles(causal / merged, causal / merged)
    needs = "which an encoder-decoder needs (see tgis convert-to-onnx)"
    (both / "model.onnx").touch()
    assert refusal(both) == refusal(both, describe_memory) == f"{both} has no encoder_model.onnx, {needs}"
    (both / "encoder_model.onnx").touch()
    (both / "model.onnx").unlink()
    assert refusal(both) == f"{both} has no ONNX graphs, neither {last}"
    for name in (first, others):
        (both / name).touch()
    files = GraphFiles(both / first, both / others, both / "encoder_model.onnx")
    assert find_graphs(both, encoder_decoder=True) == files


def test_without_onnxruntime_the_extra_is_named(glassllm_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    directory = beside(glassllm_dir, tmp_path / "model")
    (directory / "model.onnx").touch()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert refusal(directory) == "the engine hf_optimum_ort needs onnxruntime: pip install '.[onnx]' in a checkout"
