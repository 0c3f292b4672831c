"""Experts that stay in files until they are packed: as transformers loads them, in the memory of the result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batches import engine_options
from quantized_formats import FORMATS, experts_in_codes
from safetensors.torch import load_file, save_file
from slow_cases import slow_except
from tiny_models import EXPERTS, make_model_from_config, make_wide_config
from torch import Tensor

from tgis.engines.kernels.cpu.experts import PackedExperts
from tgis.engines.loading import loader, stored_experts
from tgis.errors import StartError

CPU, IDS = torch.device("cpu"), torch.arange(3, 40)[None]


@torch.no_grad()  # type: ignore[untyped-decorator]
def loaded(path: Path, **options: Any) -> tuple[Tensor, int]:
    """Logits, and how many layers have packed experts."""
    model = loader.load_model(engine_options(path, **options), CPU)
    return model(IDS).logits, sum(isinstance(module, PackedExperts) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "changes"),
    slow_except(
        [("Qwen3Moe", {"quantize": "int4"}), ("GptOss", {"dtype": "bfloat16"})],
        [(name, changes) for name in EXPERTS for changes in ({}, {"dtype": "bfloat16"}, {"quantize": "int8"})],
    ),
)
def test_bits_are_those_of_weights_that_transformers_loads(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model_from_config(EXPERTS[name], tmp_path)
    *_, (sized, _) = loader.look_at_model(engine_options(path, **changes), CPU)
    assert sized.stored_experts.keys() == {key for key, weight in sized.named_parameters() if weight.dim() == 3}
    logits, packed = loaded(path, **changes)
    monkeypatch.setattr(loader, "store_experts", lambda *_: {})
    expected, expected_packed = loaded(path, **changes)
    assert torch.equal(logits, expected)
    assert packed == expected_packed == 2 - (name == "Glm4Moe")


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_a_tensor_beside_experts_that_has_no_place_is_left_out(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, extra = make_model_from_config(EXPERTS[name], tmp_path), "model.layers.1.mlp.experts.scales"
    tensors = load_file(path / "model.safetensors") | {extra: torch.ones(8, 3)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert loaded(path)[1] == 2
    assert f"1 weights in the files have no place in {name}ForCausalLM: {extra}" in caplog.text


def test_an_expert_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = make_model_from_config(EXPERTS["Qwen3Moe"], tmp_path)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.experts.7.down_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(StartError, match=r"the weight .*experts\.down_proj has values that are NaN or infinite as "):
        loaded(path)


def test_codes_that_no_kernel_multiplies_are_widened_if_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, quantize = FORMATS["gptq, act-order"]
    path = make_model_from_config(make_wide_config("Qwen3Moe", moe_intermediate_size=32), tmp_path)
    experts_in_codes(path, quantize, config)
    largest = 4 * 2 * 64 * 64  # bytes of gate_up_proj: 2 experts of 2 * 32 outputs
    monkeypatch.setattr(stored_experts, "available_memory", lambda _: largest)
    assert loaded(path)[1] == 2
    assert caplog.text.count("is widened to torch.float32: no kernel multiplies by its codes") == 4
    monkeypatch.setattr(stored_experts, "available_memory", lambda _: largest - 1)
    with pytest.raises(StartError, match=r"gate_up_proj, whose codes .* of memory, and .* are free$"):
        loaded(path)


@pytest.mark.parametrize(
    ("saved", "dtype", "quantize", "bits"),
    [("float32", "float32", "none", 16), ("bfloat16", "float32", "none", 16), ("float32", "bfloat16", "int4", 5)],
)
def test_a_check_counts_experts_as_they_are_packed(
    saved: str, dtype: str, quantize: str, bits: int, tmp_path: Path
) -> None:
    """Those in files of 16 bits stay in 16 bits beside activations in float32."""
    path = make_model_from_config(EXPERTS["Qwen3Moe"], tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', f'"dtype": "{saved}"'))
    tensors = {name: weight.bfloat16() for name, weight in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    options = engine_options(path, dtype=dtype, quantize=quantize)
    *_, (sized, said) = loader.look_at_model(options, CPU)
    sizes = {name: weight.numel() for name, weight in sized.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts
    unpacked = 3 * max(weight.numel() for weight in sized.parameters() if weight.dim() == 3)
    least, most = (max(unpacked, size) for size in (others * bits // 8, (others + 20 * 64 * 64) * 4))
    assert least <= said - experts * bits // 8 <= most
