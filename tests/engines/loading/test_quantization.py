"""QUANTIZE on models: each layer is what the definition says of its own weight, whatever merges it, and a start is
refused where it cannot be.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from batches import engine_options
from quantized_cases import CASES
from quantized_formats import FORMATS, layer_calls, quantized_copy, say_quantized
from safetensors.torch import load_file, save_file
from tiny_models import make_config, make_model, make_model_from_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tgis.engines.kernels.cpu.linear import PackedLinear
from tgis.engines.loading import loader
from tgis.engines.lora.layers import LoraLayers
from tgis.engines.memory import model_size
from tgis.engines.quantization import weight as weight_module
from tgis.engines.quantization.weight import INT4, ActivationCodes, QuantizedWeight, concatenate, quantize
from tgis.errors import StartError

IDS = torch.tensor([[5, 9, 13, 7, 40]])
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

INSTEAD = "use QUANTIZE=int8 or int4, or convert them with tgis quantize"


def inputs_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :2]} if model.config.is_encoder_decoder else {})


def plain(path: Path, name: str) -> PreTrainedModel:
    return (AutoModelForSeq2SeqLM if name == "T5" else AutoModelForCausalLM).from_pretrained(path).eval()


@pytest.mark.parametrize(
    ("name", "sizes"), [("Llama", {}), ("Llama", {"intermediate_size": 43}), ("GPT2", {}), ("T5", {})]
)
@pytest.mark.parametrize(("asked", "logits"), [("int8", True), ("int4", False)])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_layers_of_a_model(name: str, sizes: dict[str, int], asked: str, logits: bool, tmp_path: Path) -> None:
    path = make_model_from_config(make_config(name, **sizes), tmp_path)
    own = plain(path, name)
    head = own.get_output_embeddings()
    with mock.patch.object(weight_module, "_CHUNK", 100):  # weights are quantized in several
        model = loader.load_model(engine_options(path, quantize=asked, quantize_logits=logits), CPU)
    weights = {
        layer: ((module.weight if isinstance(module, nn.Linear) else module.weight.T), module.bias)
        for layer, module in own.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    }
    assert LoraLayers(model, None, 1).targets == LoraLayers(own, None, 1).targets
    for layer, (x, y) in layer_calls(model, weights, **inputs_of(model)).items():
        weight, bias = weights[layer]
        is_head = own.get_submodule(layer) is head
        if is_head and not logits:
            expected = nn.functional.linear(x.double(), weight.double())
        else:
            codes = quantize(weight, 8 if is_head else int(asked[-1]), ActivationCodes())
            numbers = codes.fake_quantized(x), codes.dequantized().double()
            expected = nn.functional.linear(*numbers, None if bias is None else bias.double())
        assert (y - expected).abs().max() < 1e-4 * expected.abs().max(), layer


@pytest.mark.parametrize("name", ["Llama", "T5", "Marian", "M2M100"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_what_stays_has_the_dtype_that_it_is_loaded_with(name: str, tmp_path: Path) -> None:
    """The files are in float32, and so are M2M100's positions until they are converted."""
    path = make_model(name, tmp_path)
    family = AutoModelForCausalLM if name == "Llama" else AutoModelForSeq2SeqLM
    own = family.from_pretrained(path, dtype=torch.bfloat16)
    model = loader.load_model(engine_options(path, quantize="int8", dtype="bfloat16"), CPU)
    expected = {**dict(own.named_parameters()), **dict(own.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    common = expected.keys() & found.keys()
    assert len(common) > 1
    assert {key: found[key].dtype for key in common} == {key: expected[key].dtype for key in common}
    model(**inputs_of(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_logits_with_plain_activations(dtype: str, tmp_path: Path) -> None:
    path = make_model("Llama", tmp_path)
    own = plain(path, "Llama")
    for layer, module in own.named_modules():
        if isinstance(module, nn.Linear) and layer != "lm_head":
            module.weight.copy_(quantize(module.weight, 4).dequantized())
    model = loader.load_model(engine_options(path, dtype=dtype, quantize="int4", quantize_activations="none"), CPU)
    assert {parameter.dtype for parameter in model.parameters()} == {model.dtype} == {getattr(torch, dtype)}
    expected = own.double()(IDS).logits
    tolerance = {"bfloat16": 0.05, "float16": 0.01}[dtype]
    assert (model(IDS).logits - expected).norm() < tolerance * expected.norm()
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) > 0


@pytest.mark.parametrize(
    ("asked", "config", "error"),
    [
        ("gptq", {}, "QUANTIZE=gptq, but the weights are not quantized: " + INSTEAD),
        ("awq_marlin", {}, "QUANTIZE=awq_marlin, but the weights are not quantized: " + INSTEAD),
        ("none", {}, "QUANTIZE_LOGITS and QUANTIZE_ACTIVATIONS=int8 need QUANTIZE=int8 or int4: weights are plain"),
        ("fp8", {}, "QUANTIZE=fp8, but the weights are not quantized: " + INSTEAD),
        ("int8", {"quant_method": "gptq", "bits": 4}, "QUANTIZE=int8, but the weights are quantized by 'gptq'"),
        ("gptq_marlin", {"quant_method": "awq"}, "QUANTIZE=gptq_marlin, but the weights are quantized by 'awq'"),
    ],
)
def test_refusals(asked: str, config: dict[str, Any], error: str, tmp_path: Path) -> None:
    path = make_model("Llama", tmp_path)
    if config:
        say_quantized(path, config)
    for wrong in ({"quantize_logits": True}, {"quantize_activations": "int8"}):
        with pytest.raises(StartError) as refusal:
            loader.load_model(engine_options(path, quantize=asked, **dict[str, Any](wrong)), CPU)
        assert str(refusal.value) == error


def test_corrupt_weights_are_refused(tmp_path: Path) -> None:
    path = make_model("Llama", tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.inf
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=f"the weight {name} has values that are NaN or infinite"):
        loader.load_model(engine_options(path, quantize="int4"), CPU)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", ["int8", "gptq, act-order", "bitsandbytes, int8"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_a_start_on_a_gpu_without_kernels(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed as for a GPU, on the CPU, whose kernels are right by the tests above and of checkpoints."""
    from tgis.engines.kernels.cuda.quantized import DeviceGemms

    path = make_model("Llama", tmp_path)
    if name in FORMATS:
        config, codes = FORMATS[name]
        quantized_copy(path, codes, config)
    options = engine_options(path, quantize="none" if name in FORMATS else name)
    monkeypatch.setattr(model_size, "rank_memory", lambda *_: 1 << 40)
    assert loader.look_at_model(options, CUDA)[3] is not None
    expected = loader.load_model(options, CPU)(IDS).logits
    monkeypatch.setattr(loader, "GemmSelector", lambda _, how: DeviceGemms(how, CPU))
    model = loader.load_model(options, CPU)
    assert all(type(module.gemm).__name__ == "TritonGemm" for module in model.modules() if hasattr(module, "gemm"))
    assert (model(IDS).logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), None)])
def test_auto_is_float16_on_a_gpu_without_bfloat16(
    capability: tuple[int, int], dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    options = engine_options(make_model("Llama", tmp_path), dtype=None)
    assert loader.default_dtype(options, loader.load_config(options), CUDA) == (dtype or torch.bfloat16)


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_numbers(name: str) -> None:
    weight = CASES[name].weight
    whole, rows = weight.dequantized(), torch.tensor([3, 60, 4, 4])
    assert torch.equal(weight.part(rows, 0).dequantized(), whole[rows])
    step, inputs = weight.alignment, weight.codes.shape[1]
    for first, last in ((0, inputs // 2), (inputs // step // 2 * step, inputs)):
        columns = torch.arange(first, last)
        if weight.order is None:
            assert torch.equal(weight.part(columns, 1).dequantized(), whole[:, columns])
        if step > 1:
            with pytest.raises(StartError, match=rf"^the inputs from {first + 1} on begin within a group of {step}$"):
                weight.part(columns + 1, 1)


ORDER, PLAIN = torch.tensor([2, 0, 1, 3]), QuantizedWeight(torch.zeros(3, 4).byte(), INT4, torch.ones(3, 2), None, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"order": ORDER.flip(0)},
        {"order": None},
        {"table": INT4.clone()},
        {"scale": torch.ones(3, 2).bfloat16()},
        {"offset": torch.ones(3, 2)},
        {"codes": torch.zeros(3, 3).byte()},
        {"group_size": 3},
        {"activations": ActivationCodes()},
    ],
)
def test_only_weights_of_one_kind_are_concatenated(other: dict[str, Any]) -> None:
    weight = replace(PLAIN, order=ORDER)
    together = concatenate([weight, replace(weight, order=ORDER.clone())])
    assert together is not None
    assert len(together.codes) == 6
    assert concatenate([weight, replace(weight, **other)]) is None


@pytest.mark.parametrize(
    ("name", "is_kept"), [("Llama", True), ("GPT2", True), ("Mixtral", True), ("Gemma3Text", False)]
)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_weights_loaded_as_saved_give_the_logits_of_float32(name: str, is_kept: bool, tmp_path: Path) -> None:
    """Those of the same weights in float32 files. Gemma 3 has a constant that 16 bits would round."""
    dtype = torch.float16 if name == "GPT2" else torch.bfloat16
    AutoModelForCausalLM.from_config(make_config(name)).to(dtype).save_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32).save_pretrained(tmp_path / "widened")
    saved, widened = (engine_options(tmp_path / files, dtype="float32") for files in ("saved", "widened"))
    assert (loader.look_at_model(saved, CPU)[3] is not None) == is_kept
    for options in (
        widened,
        msgspec.structs.replace(saved, cpu_isa="none"),
        msgspec.structs.replace(saved, num_shards=2),
    ):
        assert loader.look_at_model(options, CPU)[3] is None
    logits, expected = (loader.load_model(options, CPU)(IDS).logits for options in (saved, widened))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)
