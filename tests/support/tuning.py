"""Soft prompts and LoRA adapters with random weights, saved by PEFT, and what PEFT then generates: expected values.

Float32, CPU, greedy, batch of one, without tgis. Computed by one child process (this file as a script) and
kept in the test cache under a key of everything that they depend on, this file included.
"""

import hashlib
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from compute_once import compute_once

MAX_NEW_TOKENS = 24
NEAR_TIE = 1e-3  # a difference of the best two logits that may fall either way
INPUTS = [
    "Once upon a time",
    "The Hatter",
    "“What a curious feeling!” said Alice; “I must be shutting up like a telescope.” And so",
    "I",
    "He said, “It is",
    "Bruno was silent, for",
]
Options = dict[str, Any]
PLANS: dict[str, dict[str, tuple[str, str, Options]]] = {  # by name: the kind, its file, and options of PEFT
    "glassllm": {
        "queen": ("PROMPT_TUNING", "safetensors", {"num_virtual_tokens": 8}),
        "nested/king": ("PROMPT_TUNING", "bin", {"num_virtual_tokens": 5}),
        "encoded": ("P_TUNING", "safetensors", {"num_virtual_tokens": 6, "encoder_hidden_size": 64}),
    },
    "glassllm-lora": {
        "queen": ("LORA", "safetensors", {"r": 8, "target_modules": "all-linear", "lora_alpha": 16}),
        "nested/king": ("LORA", "bin", {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
        "alice": ("LORA", "safetensors", {"r": 1, "target_modules": ["o_proj"], "lora_alpha": 2}),
        "patterns": (
            "LORA",
            "safetensors",
            {
                "r": 5,
                "target_modules": r".*layers\.\d+\.(mlp\.(up|down)_proj|self_attn\.k_proj)",
                "rank_pattern": {"up_proj": 2, "layers.0.self_attn.k_proj": 7},
                "alpha_pattern": {"mlp.down_proj": 20, "up_proj": 3},
            },
        ),
        "first": (
            "LORA",
            "safetensors",
            {"r": 16, "target_modules": ["q_proj", "o_proj", "down_proj"], "layers_to_transform": [0]},
        ),
        "hatter": ("LORA", "bin", {"r": 3}),
        "mouse": ("LORA", "safetensors", {"r": 8, "lora_alpha": 64}),
        "gate": ("LORA", "safetensors", {"r": 2, "target_modules": ["gate_proj", "up_proj"]}),
    },
}


class Continuation(msgspec.Struct, frozen=True):
    """What PEFT generates for one input and one prompt or adapter."""

    prompt: str  # or adapter; "" for none
    tokens: list[int]  # of the input
    generated: list[int]


@dataclass(frozen=True, slots=True)
class Tuned:
    """A store, and what PEFT generates with what is in it."""

    store: Path
    continuations: list[Continuation]  # of inputs, with each prompt and with none


def tuned(name: str, model: Path, cache: Path) -> Tuned:
    """The results of the plan of that name; made once, with the other plan."""
    directory = compute_once(cache / "oracle" / f"tuned-{_key(model)[:16]}", __file__, model) / name
    continuations = msgspec.json.decode((directory / "continuations.json").read_bytes(), type=list[Continuation])
    return Tuned(directory / "store", continuations)


def _key(model: Path) -> str:
    lines = [f"{package} {version(package)}" for package in ("torch", "transformers", "tokenizers", "peft")]
    for file in (Path(__file__), *sorted(model.glob("*.safetensors")), model / "tokenizer.json"):
        with file.open("rb") as opened:
            lines.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def make(plan: dict[str, tuple[str, str, Options]], model_dir: Path, store: Path) -> list[Continuation]:
    """Write every prompt or adapter to `store`, and let PEFT generate with each and with none."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    kinds = {"LORA": peft.LoraConfig, "P_TUNING": peft.PromptEncoderConfig, "PROMPT_TUNING": peft.PromptTuningConfig}
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    bare = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    models = {"": bare}
    for seed, (name, (kind, file, options)) in enumerate(plan.items()):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        models[name] = peft.get_peft_model(base, kinds[kind](task_type="CAUSAL_LM", **options)).eval()
        for path, weight in models[name].named_parameters():
            if "lora_" in path or "prompt_encoder.default.embedding" in path:
                torch.nn.init.normal_(weight, std=0.1 if "lora_" in path else 0.7)
        models[name].save_pretrained(store / name, safe_serialization=file == "safetensors")
    inputs = [tokenizer(text).input_ids for text in INPUTS]
    return [found for name, model in models.items() for ids in inputs for found in _continued(model, name, ids)]


def _continued(model: Any, prompt: str, ids: list[int]) -> list[Continuation]:
    """Nothing where rounding may decide."""
    import torch

    out = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    clear = (best[:, 0] - best[:, 1]).min() > NEAR_TIE
    return [Continuation(prompt, ids, out.sequences[0, -len(best) :].tolist())] if clear else []


if __name__ == "__main__":
    model, out = map(Path, sys.argv[1:])
    for name, plan in PLANS.items():
        continuations = make(plan, model, out / name / "store")
        assert len(continuations) > 0.8 * len(INPUTS) * (1 + len(plan)), "near ties: draw something else"
        (out / name / "continuations.json").write_bytes(msgspec.json.encode(continuations))
