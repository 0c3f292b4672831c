"""Weights as the files of a format hold them, made of random codes, and what these stand for."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from batches import engine_options
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tgis.engines.loading import loader

Quantize = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # a weight -> its tensors, and what they stand for


def numbers(shape: Any, low: float, high: float) -> np.ndarray:
    return np.asarray(np.random.default_rng(0).uniform(low, high, shape), dtype=np.float32)


def words(rows: np.ndarray, bits: int) -> Tensor:
    """int32s that hold numbers of some bits, each row filled up with zeros, the first number lowest."""
    per_word = 32 // bits
    parts = np.pad(rows, ((0, 0), (0, -rows.shape[1] % per_word))).reshape(len(rows), -1, per_word)
    return torch.from_numpy((parts << np.arange(0, 32, bits)).sum(-1).astype(np.uint32).view(np.int32))


def packed(bits: int, group: int | None, *, symmetric: bool = True, act_order: bool = False) -> Quantize:
    """compressed-tensors' pack-quantized."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        rng, middle, size = np.random.default_rng(inputs), 1 << bits - 1, group or inputs
        order = rng.permutation(inputs) // size if act_order else np.arange(inputs) // size
        codes, zeros = rng.integers(0, 2 * middle, (2, outputs, inputs))
        scales, zeros = numbers((outputs, -(-inputs // size)), 1e-3, 2e-2) * 8 / middle, zeros[:, ::size]
        offsets = middle if symmetric else zeros[:, order]
        expected = scales[:, order].astype(float) * (codes - offsets)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
        return tensors, torch.from_numpy(expected)

    return quantize


def in_bytes(rows: int | None, columns: int | None, name: str, *, e4m3: bool = True) -> Quantize:
    """E4M3 or int8 with a number for each block of rows and columns; None: all of them. That of SCB is for 127."""
    values = np.array([e4m3_value(code) if e4m3 else (code + 128) % 256 - 128 for code in range(256)])

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        tall, wide = rows or outputs, columns or inputs
        codes = np.random.default_rng(inputs).integers(0, 256, (outputs, inputs), dtype=np.uint8)
        codes[codes % 128 == 127] = 0  # NaN
        scales = numbers((-(-outputs // tall), -(-inputs // wide)), 1e-3, 2e-2) / (50 if e4m3 else 10)
        expected = values[codes] * scales.repeat(tall, 0).repeat(wide, 1)[:outputs, :inputs]
        found = torch.from_numpy(codes).view(torch.float8_e4m3fn if e4m3 else torch.int8)
        scale = torch.from_numpy(scales)
        return {"weight": found, name: 127 * scale.flatten() if name == "SCB" else scale}, torch.from_numpy(expected)

    return quantize


def e4m3_value(code: int) -> float:
    if code % 128 == 127:
        return math.nan
    exponent, fraction = code >> 3 & 15, (code & 7) / 8
    value = 2.0 ** (exponent - 7) * (1 + fraction) if exponent else 2.0**-6 * fraction
    return -value if code > 127 else value


def rounded(x: Tensor, scale: float | None = None) -> Tensor:
    """int8 with the scale, or with one for each token: of its largest number by 127.5."""
    x, largest = x.double(), x.double().abs().amax(-1, keepdim=True)
    codes: Tensor = (x / scale if scale else x * 127.5 / largest).round().clamp(-128, 127)
    return codes * (scale or largest / 127.5)


def layer_calls(model: PreTrainedModel, names: Collection[str], **inputs: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The input and the output of these layers in a forward pass."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in names:
        keep = lambda _module, args, output, name=name: seen.update({name: (args[0], output)})  # noqa: E731
        model.get_submodule(name).register_forward_hook(keep)
    model(**inputs)
    assert seen.keys() == set(names)
    return seen


@torch.no_grad()  # type: ignore[untyped-decorator]
def check_layers(
    model: PreTrainedModel, expected: PreTrainedModel, ids: Tensor, inputs: Callable[[Tensor], Tensor]
) -> None:
    """Compare the output of each layer with its weight in `expected` times what `inputs` makes of its input."""
    layers = {name for name, module in expected.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    for name, (x, y) in layer_calls(model, layers, input_ids=ids).items():
        answer = inputs(x) @ expected.get_submodule(name).weight.double().T
        assert (y - answer).abs().max() < 1e-4 * answer.abs().max(), name


def compressed_tensors(layout: str, weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A quantization_config with one group."""
    group = {"targets": ["Linear"], "weights": weights, **others}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In groups of 16; the column of nibble i of an int32 is (0, 2, 4, 6, 1, 3, 5, 7)[i] of eight."""
    outputs, inputs = weight.shape
    codes = np.random.default_rng(outputs).integers(0, 16, (inputs, outputs))
    zeros = np.random.default_rng(inputs).integers(0, 16, (inputs // 16, outputs))
    scales = np.random.default_rng(1).uniform(1e-3, 2e-2, zeros.shape).astype(np.float16)
    groups = np.arange(inputs) // 16
    expected = (scales[groups].astype(float) * (codes - zeros[groups])).T.copy()

    def packed(numbers: np.ndarray) -> Tensor:
        return words(numbers.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape), 4)

    tensors = {"qweight": packed(codes), "qzeros": packed(zeros), "scales": torch.from_numpy(scales)}
    return tensors, torch.from_numpy(expected)


def gptq(
    bits: int, group: int | None, stored_less: int, *, act_order: bool = False, zero: int | None = None
) -> Quantize:
    """Random codes; of zeros with the highest bit clear, or one number that is stored for all."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outputs, inputs = weight.shape
        rng = np.random.default_rng(inputs)  # the same order of what is merged
        order = rng.permutation(inputs) if act_order else np.arange(inputs)
        groups = -(-inputs // (group or inputs))
        low, high = (0, 2 ** (bits - 1)) if zero is None else (zero, zero + 1)
        each = rng.integers(low, high, (groups, outputs * bits // 32, 32 // bits))
        tensors = {
            "qweight": rng.integers(0, 2**32, (inputs * bits // 32, outputs), dtype=np.uint32).view(np.int32),
            "qzeros": (each << np.arange(0, 32, bits)).sum(-1).astype(np.uint32).view(np.int32),
            "scales": rng.uniform(1e-3, 2e-2, (groups, outputs)).astype(np.float16) / 2 ** (bits - 4),
            "g_idx": order.astype(np.int32) // (group or inputs),
        }
        expected = torch.from_numpy(unpack(tensors, bits, stored_less))
        return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, expected

    return quantize


def unpack(tensors: Mapping[str, np.ndarray], bits: int, stored_less: int) -> np.ndarray:  # [out, in]
    """What `qweight`, `qzeros`, `scales` and `g_idx` of a layer stand for; zeros are stored less this number."""

    def fields(words: np.ndarray) -> np.ndarray:
        """Numbers of some bits of each int32, the lowest first: [..., words] -> [..., numbers]"""
        parts = words.view(np.uint32)[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)
        return np.asarray(parts & 2**bits - 1).reshape(*words.shape[:-1], -1)

    codes = fields(np.ascontiguousarray(tensors["qweight"].T)).astype(int)
    zeros, scales = (each[tensors["g_idx"]].T for each in (fields(tensors["qzeros"]).astype(int), tensors["scales"]))
    return np.asarray(scales.astype(float) * (codes - zeros - stored_less))


GROUPS: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
CHANNELS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS: dict[str, Any] = CHANNELS | {"strategy": "token", "dynamic": True}
E4M3: dict[str, Any] = CHANNELS | {"type": "float"}
BITSANDBYTES: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq": (AWQ, awq),
    "awq by auto-round": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    "gptq": (GPTQ | {"sym": True, "checkpoint_format": "gptq"}, gptq(4, 16, 1)),
    "gptq, act-order": (GPTQ | {"desc_act": True}, gptq(4, 16, 1, act_order=True)),
    "gptq, 8 bits, ragged": (GPTQ | {"bits": 8, "group_size": 32}, gptq(8, 32, 1, act_order=True)),
    "gptq, 8 bits, symmetric": (GPTQ | {"bits": 8, "group_size": -1}, gptq(8, None, 1, zero=127)),
    "gptq_v2": (GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}, gptq(4, None, 0)),
    "gptq that is v2": (GPTQ | {"sym": True}, gptq(4, 16, 0, zero=8)),
    "gptq by auto-round": (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, gptq(4, 16, 1)),
    "gptq_v2 by auto-round": (AUTO_ROUND | {"packing_format": "auto_round"}, gptq(4, 16, 0)),
    "compressed-tensors": (compressed_tensors("pack-quantized", GROUPS), packed(4, 16)),
    "compressed-tensors, channels": (
        compressed_tensors("pack-quantized", CHANNELS | {"num_bits": 4}),
        packed(4, None),
    ),
    "compressed-tensors, act-order": (
        compressed_tensors("pack-quantized", GROUPS | {"actorder": "group", "symmetric": False}),
        packed(4, 16, symmetric=False, act_order=True),
    ),
    "compressed-tensors, 8 bits": (
        compressed_tensors("pack-quantized", GROUPS | {"num_bits": 8, "symmetric": False}),
        packed(8, 16, symmetric=False),
    ),
    "compressed-tensors, int8": (
        compressed_tensors("int-quantized", CHANNELS),
        in_bytes(1, None, "weight_scale", e4m3=False),
    ),
    "compressed-tensors, E4M3": (
        compressed_tensors("float-quantized", E4M3, input_activations=E4M3 | {"strategy": "token", "dynamic": True}),
        in_bytes(1, None, "weight_scale"),
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [20, 24]},
        in_bytes(20, 24, "weight_scale_inv"),
    ),
    "fp8 by AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, in_bytes(None, None, "weight_scale")),
    "bitsandbytes, int8": (BITSANDBYTES, in_bytes(1, None, "SCB", e4m3=False)),
}


def with_input_scale(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """int8 by output, with a scale of its inputs."""
    tensors, expected = in_bytes(1, None, "weight_scale", e4m3=False)(weight)
    return tensors | {"input_scale": torch.tensor([0.03])}, expected


def say_quantized(path: Path, config: dict[str, Any]) -> None:
    """Write the quantization_config of a model."""
    file = path / "config.json"
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {"quantization_config": config}))


def quantized_copy(
    path: Path,
    quantize: Quantize | Mapping[str, Quantize | None],
    config: dict[str, Any] | None,
    kinds: type[nn.Module] | tuple[type[nn.Module], ...] = nn.Linear,
) -> PreTrainedModel:
    """Quantize the layers of these kinds in the files of a model in place; also what they stand for. The first pattern
    in a layer's name counts.
    """
    of_layers = quantize if isinstance(quantize, Mapping) else {"": quantize}
    kind = AutoModelForSeq2SeqLM if "T5" in (path / "config.json").read_text() else AutoModelForCausalLM
    expected = kind.from_pretrained(path, dtype=torch.float32).eval()
    tensors = load_file(path / "model.safetensors")
    for name, module in expected.named_modules():
        chosen = next((each for pattern, each in of_layers.items() if re.search(pattern, name)), None)
        if isinstance(module, kinds) and name != "lm_head" and chosen and f"{name}.weight" in tensors:
            found, numbers = chosen(tensors.pop(f"{name}.weight"))
            module.weight.data = numbers.float()
            tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in found.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if config is not None:
        say_quantized(path, config)
    return expected


def experts_in_codes(path: Path, quantize: Quantize, config: dict[str, Any]) -> PreTrainedModel:
    """Quantize the experts in the files of a model in place, each with other scales; also what they stand for."""
    tensors, coded = load_file(path / "model.safetensors"), dict[str, Tensor]()
    for index, name in enumerate([name for name in tensors if ".experts." in name]):
        codes, numbers = quantize(tensors[name])
        factor, layer = 2.0 ** -(index % 5), name.removesuffix(".weight")
        tensors[name] = numbers.float() * factor
        coded |= {f"{layer}.{key}": x * factor if "scale" in key or key == "SCB" else x for key, x in codes.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(path, experts_implementation="batched_mm").float().eval()
    plain = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(plain | {name: x.contiguous() for name, x in coded.items()}, path / "model.safetensors", {"format": "pt"})
    say_quantized(path, config)
    return expected


def experts_in_mxfp4(path: Path) -> None:
    """Give the experts of a model random codes, and exponents for each 32 of them."""
    tensors, draw = load_file(path / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        size = experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.from_numpy(draw.integers(0, 256, (*size, 16), dtype=np.uint8))
        tensors[f"{name}_scales"] = torch.from_numpy(draw.integers(121, 126, size, dtype=np.uint8))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    say_quantized(path, {"quant_method": "mxfp4"})


def load(path: Path, **others: Any) -> PreTrainedModel:
    return loader.load_model(engine_options(path, **others), torch.device("cpu"))
