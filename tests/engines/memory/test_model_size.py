"""A model too big for the memory is refused before it is loaded; one that fits is not."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from batches import engine_options
from tiny_models import make_config
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tgis.engines.loading.loader import load_config, load_model, look_at_model
from tgis.engines.memory import available, model_size
from tgis.engines.memory.largest_step import step_bytes
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions
from tgis.utils.logs import format_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMOLLM2 = 134_515_008  # parameters; the embeddings are its head too
LINEARS = 134_479_872  # of them in linear layers, the head being one
OUTPUTS = 30 * (576 * 3 + 192 * 2 + 1536 * 2)  # of the others
HEAD = 49152 * 576
LOADED = {"bfloat16": 2 * SMOLLM2, "float32": 2 * SMOLLM2 + 4 * HEAD}  # bytes at least; weights stay as saved

Free = Callable[..., None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """Set the available memory."""

    def grant(cpu: int, cuda: int = 0) -> None:
        monkeypatch.setattr(available, "available_memory", lambda device: cuda if device.type == "cuda" else cpu)

    return grant


def check(options: EngineOptions, dtype: torch.dtype, device: torch.device) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(options), dtype=dtype)
    model_size.check_model_fits(model, options, device)


packs_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else its weights stay in mapped files


@pytest.mark.parametrize("dtype", ["bfloat16"] * packs_bfloat16 + ["float32"])
def test_what_fits_is_loaded_and_what_does_not_is_refused(
    smollm2_dir: Path, dtype: str, free: Free, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = engine_options(smollm2_dir, 8, dtype=dtype)
    free(cpu=LOADED[dtype])
    look_at_model(options, CPU)
    free(cpu=LOADED[dtype] - 1)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # no weight is read
    sizes = f"takes {format_bytes(LOADED[dtype])} of memory on cpu, and {format_bytes(LOADED[dtype] - 1)} are free"
    with pytest.raises(StartError, match=rf"^/.* is too big: loading its \d+ MiB of weights {sizes}; .* NUM_SHARD "):
        load_model(options, CPU)


@pytest.mark.parametrize(
    ("asked", "result"), [("int4", (LINEARS - HEAD) * 5 // 8), ("int8", LINEARS - HEAD + 4 * OUTPUTS)]
)
def test_quantizing_is_predicted_to_need_little_beside_the_result(smollm2_dir: Path, asked: str, result: int) -> None:
    *_, how, found = look_at_model(
        engine_options(smollm2_dir, 8, dtype="bfloat16", quantize=asked, quantize_logits=True), CPU
    )
    assert str(how) == f"quantized to {asked}, that of the logits to int8, with auto activations"
    others = 2 * (SMOLLM2 - LINEARS + HEAD)  # the embeddings stay as they are
    assert found[1] == result + HEAD + 4 * 49152 + others + 2 * HEAD + (16 << 20)


def test_weights_need_the_memory_of_their_ranks(smollm2_dir: Path, free: Free) -> None:
    options = engine_options(smollm2_dir, 8)
    free(cpu=0, cuda=2 * SMOLLM2)
    check(options, torch.bfloat16, CUDA)
    free(cpu=1 << 40, cuda=2 * SMOLLM2 - 1)
    with pytest.raises(StartError, match="on cuda:0"):
        check(options, torch.bfloat16, CUDA)
    check(msgspec.structs.replace(options, num_shards=2), torch.bfloat16, CUDA)
    free(cpu=2 * SMOLLM2 - 1)
    check(msgspec.structs.replace(options, num_shards=2, nnodes=2), torch.bfloat16, CPU)
    with pytest.raises(StartError, match="on cpu"):  # whose memory two ranks share
        check(msgspec.structs.replace(options, num_shards=2), torch.bfloat16, CPU)


EXPERTS = 10 * 2 * (2 * 48 + 32) * 4  # rows of the inputs and outputs of two for each token


@pytest.mark.parametrize(
    ("name", "width", "others"), [("Llama", 48, 0), ("Mixtral", 2 * 48, EXPERTS), ("T5", 48, 10 * 10 * 4 * 2 * 4)]
)
def test_a_step_is_estimated_from_shapes(name: str, width: int, others: int) -> None:
    """Of ten tokens in float32, with a vocabulary of 97."""
    with torch.device("meta"):
        model = (AutoModelForSeq2SeqLM if name == "T5" else AutoModelForCausalLM).from_config(make_config(name))
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 2
    fixed = (8 << 20) + 10 * width * 5 * 4 + others
    assert step_bytes(model, "cpu", 2, 10) == fixed + 2 * 97 * (36 + 60)
    assert step_bytes(model, "cpu", 2, 10, pairs=False) == fixed - others * (name == "T5") + 2 * 97 * (36 + 60)
    assert step_bytes(model, "cpu", 2, 10, logits=1000) == fixed + 1000 * 97 * 4
    assert step_bytes(model, "cpu", 10**5, 10) == fixed + 97 * 10**5 * 36 + (30 << 20)
    assert step_bytes(model, "cuda", 10**6, 10, logprobs=10**8) == fixed + 97 * 10**6 * 36 + (960 << 20)
    assert step_bytes(model, "cpu", 2, 10, logprobs=10**6) == 3 * 10**6 * 97 * 4
