"""Checkpoints that are quantized: each layer's weights are what the files of its format say."""

import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from batches import engine_options
from gguf_files import one_more, permuted, save_header, write_directory, write_gguf
from quantized_formats import (
    AUTO_ROUND,
    AWQ,
    BITSANDBYTES,
    CHANNELS,
    FORMATS,
    GPTQ,
    TOKENS,
    Quantize,
    awq,
    compressed_tensors,
    experts_in_codes,
    experts_in_mxfp4,
    gptq,
    in_bytes,
    layer_calls,
    load,
    quantized_copy,
)
from safetensors.torch import load_file, save_file
from slow_cases import slow_except
from tiny_models import make_config, make_model, make_model_from_config, make_wide_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tgis.engines.kernels.cpu.experts import PackedExperts
from tgis.engines.loading import loader
from tgis.engines.quantization.bitsandbytes import BitsAndBytesFormat
from tgis.engines.quantization.checkpoint import Format, LayerTensors, QuantizedLayer
from tgis.engines.quantization.compressed_tensors import CompressedTensorsFormat
from tgis.engines.quantization.fp8 import Fp8Format
from tgis.engines.quantization.gguf import read_gguf
from tgis.engines.quantization.gptq import GptqFormat, unpacked
from tgis.engines.quantization.weight import INT8, QuantizedWeight
from tgis.errors import StartError

IDS, ONE = torch.tensor([[5, 9, 13, 7, 40]]), torch.tensor([1])
EXPERTS = "model.layers.1.mlp.experts.down_proj_scales"


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
OLDER = {"compression_config": FORMATS["compressed-tensors"][0] | {"quant_method": "sparseml"}}
OF_TENSOR = in_bytes(None, None, "weight_scale")
# another file or key than quantization_config of config.json, or tensors; and the method
BESIDE: dict[str, tuple[str, dict[str, Any], Quantize, str]] = {
    "AutoAWQ": ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, awq, "awq"),
    "AutoGPTQ": ("quantize_config.json", {"bits": 8, "group_size": 16, "desc_act": False}, gptq(8, 16, 1), "gptq"),
    "TGIS": ("model.safetensors", {"gptq_bits": 4, "gptq_groupsize": 16}, gptq(4, 16, 1, act_order=True), "gptq"),
    "ModelOpt": ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, OF_TENSOR, "modelopt"),
    "ModelOpt, newer": ("config.json", {"quantization_config": MODELOPT}, OF_TENSOR, "modelopt"),
    "older compressed-tensors": ("config.json", OLDER, FORMATS["compressed-tensors"][1], "compressed-tensors"),
}


def check_logits(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :2]} if found.config.is_encoder_decoder else {})
    logits = expected.double()(**inputs).logits
    assert (found(**inputs).logits - logits).abs().max() < 1e-4 * logits.abs().max()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model", slow_except(["Llama"], ["Llama", "T5"]))
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_logits(model: str, name: str, tmp_path: Path) -> None:
    """43 inputs or outputs are no multiple of anything; words of gptq and awq cannot hold them."""
    config, quantize = FORMATS[name]
    config = config | {"dynamic": {"-:lm_head": {}, "v_proj": {"bits": config.get("bits", 16)}}}
    is_odd = model == "Llama" and not name.startswith(("awq", "gptq")) and "act-order" not in name
    path = make_model_from_config(make_config(model, **({"intermediate_size": 43} if is_odd else {})), tmp_path)
    expected = quantized_copy(path, quantize, config)
    check_logits(load(path), expected)


OTHERS = [(model, name, *[True] * 3) for model in ("T5", "OPT, 350m") for name in ("compressed-tensors", "fp8")]
FAST = [("Llama", "gptq", False), ("Llama", "compressed-tensors, int8", True), ("Llama", "fp8", False)]


@pytest.mark.parametrize(
    ("model", "name", "said", "tied", "coded"),
    slow_except(
        [(*case, True, True) for case in FAST],
        [*(("Llama", *case) for case in itertools.product(FORMATS, *[(False, True)] * 3)), *OTHERS],
    ),
)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_right_or_refused_by_a_tensors_name(
    model: str, name: str, said: bool, tied: bool, coded: bool, tmp_path: Path
) -> None:
    """Whether config.json says how layers are quantized, and embeddings are tied to the logits, and in codes."""
    config, quantize = FORMATS[name]
    path = make_model_from_config(make_config(model, vocab_size=96, tie_word_embeddings=tied), tmp_path)
    if coded and "config_groups" in config:
        config = json.loads(json.dumps(config).replace('["Linear"]', '["Linear", "Embedding"]'))
    kinds = (nn.Linear, nn.Embedding) if coded else nn.Linear
    expected = quantized_copy(path, {"embed_positions": None, "": quantize}, config if said else None, kinds)
    if said:
        check_logits(load(path), expected)
        return
    layers = {name.rpartition(".")[0] for name in load_file(path / "model.safetensors")}
    with pytest.raises(StartError) as refusal:
        load(path)
    assert any(layer in str(refusal.value) for layer in layers), refusal.value


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_logits_of_tied_embeddings_in_codes_do_not_round_activations(tmp_path: Path) -> None:
    """Those of the other layers are rounded to int8."""
    path = make_model_from_config(make_config("Llama", tie_word_embeddings=True), tmp_path)
    config = compressed_tensors("int-quantized", CHANNELS, input_activations=TOKENS)
    config = json.loads(json.dumps(config).replace('["Linear"]', '["Linear", "Embedding"]'))
    kinds = (nn.Linear, nn.Embedding)
    expected = quantized_copy(path, in_bytes(1, None, "weight_scale", e4m3=False), config, kinds)
    ((x, y),) = layer_calls(load(path), ["lm_head"], input_ids=IDS).values()
    torch.testing.assert_close(y, x @ expected.lm_head.weight.T, rtol=1e-5, atol=1e-5)


@torch.no_grad()  # type: ignore[untyped-decorator]
def test_what_the_index_does_not_list_is_not_read(tmp_path: Path) -> None:
    """Such as the weights in the layout of Mistral's own library, beside those of transformers."""
    config, quantize = FORMATS["fp8"]
    path, shard = make_model("Llama", tmp_path), "model-00001-of-00001.safetensors"
    expected = quantized_copy(path, quantize, config)
    index = {"weight_map": dict.fromkeys(load_file(path / "model.safetensors"), shard)}
    (path / "model.safetensors").rename(path / shard)
    (path / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
    other = {"layers.0.attention.wq.weight": torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}
    save_file(other, path / "consolidated.safetensors")
    check_logits(load(path), expected)


@pytest.mark.parametrize("name", BESIDE)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_what_says_so_elsewhere(name: str, tmp_path: Path) -> None:
    file, content, quantize, method = BESIDE[name]
    path = make_model("Llama", tmp_path)
    expected = quantized_copy(path, quantize, None)
    if file.endswith(".json"):
        kept = msgspec.json.decode((path / file).read_bytes()) if (path / file).exists() else {}
        (path / file).write_bytes(msgspec.json.encode(kept | content))
    else:
        tensors = load_file(path / file) | {key: torch.tensor([value]) for key, value in content.items()}
        save_file(tensors, path / file, {"format": "pt"})
    model = load(path, quantize=f"{method}_marlin" if method in ("awq", "gptq") else "none")
    check_logits(model, expected)
    assert model.quantized_as == method


@pytest.mark.parametrize("num_shards", [1, 2])
def test_memory_and_name(num_shards: int, tmp_path: Path) -> None:
    path = make_model("Llama", tmp_path)
    quantized_copy(path, gptq(4, 8, 1), GPTQ | {"group_size": 8})
    options = engine_options(path, 8, dtype="bfloat16", num_shards=num_shards)
    *_, quantization, found = loader.look_at_model(options, torch.device("cpu"))
    tensors = load_file(path / "model.safetensors")
    packed = {"qweight": 4, "qzeros": 4, "g_idx": 4, "scales": 8}
    each = {key: tensor.numel() * packed.get(key.rsplit(".")[-1], 2) for key, tensor in tensors.items()}
    assert found[1] == sum(each.values()) // num_shards + 2 * 48 * 32
    assert str(quantization) == "quantized as gptq, with auto activations"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_widened(dtype: str, tmp_path: Path) -> None:
    """As transformers does it, to the bit."""
    path = make_model_from_config(make_config("GptOss", hidden_size=64, intermediate_size=96), tmp_path)
    experts_in_mxfp4(path)
    expected = dict(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).named_parameters())
    model = load(path, dtype=dtype, cpu_isa="none")
    found = {name: weight for name, weight in model.named_parameters() if ".experts." in name}
    assert len(found) == 8
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
    tensors = load_file(path / "model.safetensors")
    for scales in (tensors[EXPERTS][:, :, :1].contiguous(), None):
        changed = {**tensors, EXPERTS: scales}
        kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(StartError, match=rf"down_proj_blocks is .* \[2, 64, 3, 16\], which {EXPERTS} do not fit$"):
            load(path)


@pytest.mark.parametrize(("change", "shape"), [((2, 1, 1), [256, 64]), ((1, 2, 1), [128, 128]), ((1, 1, 2), [256, 64])])
def test_experts_in_mxfp4_of_another_shape_are_refused(change: Any, shape: list[int], tmp_path: Path) -> None:
    path = make_model_from_config(make_config("GptOss", hidden_size=64, intermediate_size=64), tmp_path)
    experts_in_mxfp4(path)
    tensors, (experts, inputs, outputs) = load_file(path / "model.safetensors"), change
    for suffix in ("blocks", "scales"):
        name = f"model.layers.1.mlp.experts.down_proj_{suffix}"
        tensors[name] = tensors[name].repeat(experts, outputs, inputs, *[1] * (tensors[name].dim() - 3))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    error = f"down_proj have the shape {shape} in the files, [128, 64] in GptOssForCausalLM"
    with pytest.raises(StartError, match=re.escape(error)):
        load(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_kernels_multiply_by_the_codes_of_mxfp4(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of the widened weights."""
    path = make_model_from_config(make_wide_config("GptOss", hidden_size=64, intermediate_size=96), tmp_path)
    experts_in_mxfp4(path)
    *_, (sized, size) = loader.look_at_model(engine_options(path, dtype=dtype), torch.device("cpu"))
    logits = load(path, dtype=dtype)(IDS).logits
    monkeypatch.setattr(loader, "store_experts", lambda *_: {})
    *_, (_, widened) = loader.look_at_model(engine_options(path, dtype=dtype), torch.device("cpu"))
    assert torch.equal(load(path, dtype=dtype)(IDS).logits, logits)
    weights = [weight.numel() for weight in sized.parameters() if weight.dim() == 3]
    others = sum(weight.nbytes for weight in sized.parameters() if weight.dim() != 3)
    assert size == sum(weights) * 9 // 16 + max(others, 3 * max(weights))
    assert widened == sum(weights) * sized.dtype.itemsize + others


@pytest.mark.parametrize("name", ["gptq", "gptq_8_bits", "auto_round"])
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_files_of_auto_round(name: str, tmp_path: Path) -> None:
    """Made by auto-round 0.16: `git show 78c46fa3:tests/support/auto_round_files.py`."""
    files = Path(__file__).parent / "auto_round_files" / name
    shutil.copy(files / "config.json", tmp_path)
    tensors = load_file(files / "model.safetensors")
    expected = tensors.pop("expected")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert (load(tmp_path)(IDS).logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_columns_of_one_word_are_unpacked() -> None:
    """A transposed row of int32 counts as contiguous, whatever its strides are."""
    rows = torch.tensor([[0x76543210, 0x1BA98]], dtype=torch.int32)
    assert unpacked(rows.T, 4).tolist() == [[*range(8)], [8, 9, 10, 11, 1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("shape", "offset", "error"),
    [((2, 3), None, "m has [3, 2] codes, not [2, 3]"), ((3, 2), torch.inf, "m has a offset that is NaN or infinite")],
)
def test_codes_that_do_not_fit(shape: tuple[int, int], offset: float | None, error: str) -> None:
    offsets = None if offset is None else torch.zeros(3, 1).index_fill_(0, ONE, offset)
    weight = QuantizedWeight(torch.zeros(3, 2, dtype=torch.uint8), INT8, torch.ones(3, 1), offsets)
    with pytest.raises(StartError, match=f"^{re.escape(error)}$"):
        QuantizedLayer("m", shape, 6, lambda: weight).checked()


FP8, INT8_ROWS, SCALE = Fp8Format({}), BitsAndBytesFormat({}), torch.ones(1)
FLOATS, BYTES = torch.ones(2, 4).to(torch.float8_e4m3fn), torch.ones(2, 4, dtype=torch.int8)
NAN = torch.ones(2, 4).index_fill_(1, ONE, torch.nan).to(torch.float8_e4m3fn)
STATIC = TOKENS | {"strategy": "tensor", "dynamic": False}
INPUTS = CompressedTensorsFormat(compressed_tensors("int-quantized", CHANNELS, input_activations=STATIC))
WITHOUT_SCALE = {"weight": BYTES, "weight_scale": torch.ones(2, 1), "input_scale": torch.zeros(1)}


@pytest.mark.parametrize(
    ("layout", "tensors", "error"),
    [
        (FP8, {"weight": NAN, "weight_scale": SCALE}, "m has a weight that is NaN"),
        (FP8, {"weight": FLOATS, "weight_scale": SCALE.int()}, "m: weight_scale is int32 [1], not [1, 1] numbers"),
        (FP8, {"weight": FLOATS, "weight_scale": torch.ones(2)}, "m: weight_scale is float32 [2], not [1, 1] numb"),
        (FP8, {"weight": FLOATS[None], "weight_scale": SCALE}, "m: weight has the shape [1, 2, 4], which is no matrix"),
        (FP8, {"weight": FLOATS}, "'m has no weight_scale'"),
        (INT8_ROWS, {"weight": BYTES, "SCB": torch.ones(1, 2)}, "m: SCB is float32 [1, 2], not [2, 1] numbers"),
        (INT8_ROWS, {"weight": BYTES, "weight_format": torch.arange(2)}, "m: the weight is not stored in rows"),
        (
            GptqFormat(GPTQ),
            {"qweight": ONE.int()[:, None], "qzeros": ONE.int()},
            "m: qzeros is int32 [1], not a matrix",
        ),
        (INPUTS, WITHOUT_SCALE, "m: input_scale is 0.0"),
    ],
)
def test_tensors_that_do_not_fit(layout: Format, tensors: dict[str, Tensor], error: str) -> None:
    layer = LayerTensors("m")
    layer.update(tensors)
    with pytest.raises((StartError, KeyError), match=f"^{re.escape(error)}"):
        layout.read(layer)


LAYER = "model.layers.0.mlp.up_proj"
G_IDX = torch.arange(32, dtype=torch.int32) // 16
UNKNOWN = {"x.qweight": torch.ones(4, 48).int(), "x.qzeros": torch.ones(2, 6).int(), "x.scales": torch.ones(2, 48)}
CORRUPT: dict[str, tuple[dict[str, Tensor], str]] = {
    "order": ({"g_idx": G_IDX.where(G_IDX < 1, 2)}, "g_idx 0 to 2 of 32 inputs is not 16 inputs for each group"),
    "negative": ({"g_idx": -G_IDX}, "g_idx -1 to 0 of 32 inputs is not 16 inputs for each group"),
    "indices": ({"g_idx": G_IDX[1:]}, r"g_idx has the shape \[31\], not \[32\]"),
    "words": ({"qweight": torch.ones(4, 48, dtype=torch.int64)}, r"qweight is int64 \[4, 48\], not a matrix of int32"),
    "zeros": ({"qzeros": torch.ones(1, 6, dtype=torch.int32)}, r"qzeros are those of \[1, 48\], scales \[2, 48\]"),
    "groups": (
        {"scales": torch.ones(3, 48), "qzeros": torch.ones(3, 6, dtype=torch.int32)},
        r"has \[48, 3\] scales, not \[48, 2\]",
    ),
    "padded": (
        {
            "qweight": torch.ones(4, 56, dtype=torch.int32),
            "qzeros": torch.ones(2, 7, dtype=torch.int32),
            "scales": torch.ones(2, 56),
        },
        r"has the shape \[56, 32\] in the files, \[48, 32\] in LlamaForCausalLM",
    ),
    "place": (UNKNOWN, r"is quantized, but is no linear layer of LlamaForCausalLM \(of 1 such\)"),
    "infinite": ({"scales": torch.ones(2, 48).index_fill_(1, ONE, torch.inf)}, "has a scale that is NaN or infinite"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_files(name: str, tmp_path: Path) -> None:
    tensors, error = CORRUPT[name]
    path = make_model("Llama", tmp_path)
    quantized_copy(path, gptq(4, 16, 1), GPTQ)
    found = load_file(path / "model.safetensors") | {f"{LAYER}.{key}": tensor for key, tensor in tensors.items()}
    save_file(found, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=rf"(^|: ){LAYER}(:|\.weight|\.x)? {error}$"):
        load(path)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (GPTQ | {"bits": 3}, "gptq with 3 bits, checkpoint_format 'gptq' is not supported"),
        (GPTQ | {"bits": {"q_proj": 4}}, "gptq with {'q_proj': 4} bits, checkpoint_format 'gptq' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "gptq with 4 bits, checkpoint_format 'marlin' is not supported"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo 'NVFP4' of modelopt is not supported, only 'FP8'"),
        (GPTQ | {"dynamic": {"-:k_proj": {}, "+:q_proj": {"bits": 8}}}, "quantization_config.dynamic: other options "),
        (GPTQ | {"dynamic": {r".*q_proj": {"group_size": 8}}}, "quantization_config.dynamic: other options for '.*q_"),
        (AUTO_ROUND | {"extra_config": {"head": {"bits": 8}}}, "quantization_config.extra_config: other options for"),
        (AWQ | {"version": "gemv"}, "awq with 4 bits, version gemv is not supported"),
        (AUTO_ROUND | {"packing_format": "auto_round:mx_fp"}, "gptq with 4 bits, checkpoint_format 'mx_fp'"),
        (GPTQ | {"group_size": 0}, "quantization_config: group_size is 0, not -1 or at least 1"),
        (GPTQ | {"group_size": "16"}, "quantization_config: group_size is '16', not -1 or at least 1"),
        (BITSANDBYTES | {"load_in_4bit": True}, "quantization_config.bnb_4bit_quant_type 'fp4' is not supported: "),
        (
            BITSANDBYTES | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            "quantization_config.bnb_4bit_quant_type 'nf4' is not supported: serve a GPTQ, AWQ or GGUF checkpoint of ",
        ),
    ],
)
def test_unknown_layouts(config: dict[str, Any], error: str, tmp_path: Path) -> None:
    path = make_model("Llama", tmp_path)
    quantized_copy(path, gptq(4, 16, 1), config)
    with pytest.raises(StartError, match=f"^{re.escape(error)}"):
        load(path)


@pytest.mark.parametrize(
    "name", slow_except(["gptq", "gptq, act-order", "compressed-tensors", "fp8 by AutoFP8"], FORMATS)
)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_experts_in_codes(name: str, tmp_path: Path) -> None:
    """They are multiplied as codes where plain layers are; without kernels they are refused."""
    config, quantize = FORMATS[name]
    path = make_model_from_config(make_wide_config("Qwen3Moe", moe_intermediate_size=32), tmp_path)
    expected = experts_in_codes(path, quantize, config)
    model = load(path)
    check_logits(model, expected)
    assert sum(isinstance(module, PackedExperts) for module in model.modules()) == 2
    layer = r"model\.layers\.0\.mlp\.experts\.0\.\w+"
    needed = "the kernels for CPUs, one rank and the layout of Linear layers"
    with pytest.raises(StartError, match=f"^{layer}: experts quantized as {config['quant_method']} need {needed}$"):
        load(path, cpu_isa="none")


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "d_model": 256,
    "d_ff": 256,
    "d_kv": 64,
}


@pytest.mark.parametrize(
    ("model", "architecture", "kind"),
    [
        *(("Llama", "llama", kind) for kind in ("F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_K", "Q6_K")),
        ("Qwen2", "qwen2", "Q4_0"),
        ("Gemma2", "gemma2", "Q8_0"),
        ("Gemma3Text", "gemma3", "Q6_K"),
        ("T5", "t5", "Q4_K"),
        ("Qwen3Moe", "qwen3moe", "Q4_K"),
        ("Qwen3Moe", "qwen3moe", "Q8_0"),
    ],
)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_logits_of_gguf(model: str, architecture: str, kind: str, tmp_path: Path) -> None:
    config = make_config(model)
    config.update({name: size for name, size in WIDE.items() if hasattr(config, name)})
    config.tie_word_embeddings = model != "Llama"
    changes = {"Llama": permuted, "Gemma2": one_more, "Gemma3Text": one_more}
    changed = changes.get(model, lambda _, weight: weight)
    write_directory(tmp_path, config)
    expected = write_gguf(tmp_path / "model.gguf", config, architecture, kind, changed)
    checkpoint = read_gguf(tmp_path, config)
    for layer in (*checkpoint.layers, *checkpoint.embeddings) if model != "Qwen3Moe" else ():
        assert torch.equal(layer.checked().dequantized(), expected.get_parameter(f"{layer.name}.weight")), layer.name
    expected.set_experts_implementation("batched_mm")
    check_logits(load(tmp_path), expected)


def test_corrupted_gguf(tmp_path: Path) -> None:
    """Each of 40 files is refused in one line, or holds finite numbers."""
    config, path = make_config("Llama"), tmp_path / "model.gguf"
    config.update({name: size for name, size in WIDE.items() if hasattr(config, name)} | {"vocab_size": 8})
    write_gguf(path, config, "llama", "Q4_K", permuted)
    content, draw, errors = path.read_bytes(), random.Random(0), []
    for number in range(40):
        at, bits = draw.randrange(1500 if number % 2 else len(content) - 8), draw.randbytes(draw.randint(1, 8))
        path.write_bytes(content[:at] + bits + content[at + len(bits) :])
        try:
            save_header(path)
            checkpoint = read_gguf(tmp_path, config)
            for layer in draw.sample([*checkpoint.layers, *checkpoint.embeddings], 3):
                assert layer.checked().dequantized().isfinite().all()
        except StartError as error:
            errors.append(str(error))
    assert 10 < len(errors) < 30
    assert not any("\n" in error for error in errors)


def test_other_models_in_gguf(tmp_path: Path) -> None:
    config = make_config("Llama")
    config.vocab_size = 8
    write_gguf(tmp_path / "model.gguf", config, "llama", "F16")
    content = (tmp_path / "model.gguf").read_bytes()
    for old, new, message in (
        (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", "of models of type 'mamba' are not supported"),
        (b"output_norm", b"output_morm", "the tensor 'output_morm.weight', .* has no place in LlamaForCausalLM"),
    ):
        assert old in content
        (tmp_path / "model.gguf").write_bytes(content.replace(old, new))
        save_header(tmp_path / "model.gguf")
        with pytest.raises(StartError, match=message):
            read_gguf(tmp_path, config)
