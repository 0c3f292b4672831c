"""Soft prompts and LoRA adapters trained with PEFT, and what PEFT then generates: expected values of tests.

Float32, CPU, greedy, batch of one, without tgis. Computed by one child process (this file as a script) and
kept in the test cache under a key of everything that they depend on, this file included.
"""

import argparse
import hashlib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from compute_once import compute_once

MAX_NEW_TOKENS = 24
NEAR_TIE = 1e-3  # a difference of the best two logits that may fall either way


@dataclass(frozen=True, slots=True)
class Training:
    """A prompt or adapter, and the text that it is trained to produce."""

    kind: str
    length: int  # virtual tokens, or rank
    file: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """What is trained for a model, by prompt or adapter id."""

    trainings: dict[str, Training]
    steps: int
    rate: float = 0.1


INPUTS = [
    "Once upon a time",
    "The Hatter",
    "“What a curious feeling!” said Alice; “I must be shutting up like a telescope.” And so",
    "I",
    "He said, “It is",
    "Bruno was silent, for",
]
_QUEEN = " the Queen of Hearts, and the Queen of Hearts, and the"
_KING = " no, no! said the King. no, no! said the King. no, no!"
_ALICE = "?” said Alice. “Why?” said Alice. “Why?” said Alice."

TUNING_PLANS = {
    "glassllm": TuningPlan(
        trainings={
            "queen": Training("PROMPT_TUNING", 8, "safetensors", _QUEEN),
            "nested/king": Training("PROMPT_TUNING", 5, "bin", _KING),
            "encoded": Training("P_TUNING", 6, "safetensors", _ALICE),
        },
        steps=60,
    ),
    "glassllm-lora": TuningPlan(
        trainings={
            "queen": Training("LORA", 8, "safetensors", _QUEEN, {"target_modules": "all-linear", "lora_alpha": 16}),
            "nested/king": Training(
                "LORA", 4, "bin", _KING, {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}
            ),
            "alice": Training("LORA", 1, "safetensors", _ALICE, {"target_modules": ["o_proj"], "lora_alpha": 2}),
            "patterns": Training(
                "LORA",
                5,
                "safetensors",
                " Sylvie and Bruno, and Sylvie and Bruno, and",
                {
                    "target_modules": r".*layers\.\d+\.(mlp\.(up|down)_proj|self_attn\.k_proj)",
                    "rank_pattern": {"up_proj": 2, "layers.0.self_attn.k_proj": 7},
                    "alpha_pattern": {"mlp.down_proj": 20, "up_proj": 3},
                },
            ),
            "first": Training(
                "LORA",
                16,
                "safetensors",
                " it was a dream, it was a dream, it was",
                {
                    "target_modules": ["q_proj", "o_proj", "down_proj"],
                    "layers_to_transform": [0],
                    "init_lora_weights": "gaussian",
                },
            ),
            "hatter": Training("LORA", 3, "bin", " tea, said the Hatter, and tea, said the Hatter", {}),
            "mouse": Training(
                "LORA", 8, "safetensors", " a long tale, said the Mouse, a long tale", {"lora_alpha": 64}
            ),
            "gate": Training("LORA", 2, "safetensors", "!!!!!!!!!!!!!!!", {"target_modules": ["gate_proj", "up_proj"]}),
        },
        steps=15,
        rate=0.02,
    ),
}


class Continuation(msgspec.Struct, frozen=True):
    """What PEFT generates for one input and one prompt or adapter."""

    prompt: str  # or adapter; "" for none
    tokens: list[int]  # of the input
    generated: list[int]


@dataclass(frozen=True, slots=True)
class Tuned:
    """A store with what was trained, and what PEFT generates with it."""

    store: Path
    continuations: list[Continuation]  # of all inputs, with each prompt and with none


def tuned(name: str, model: Path, cache: Path) -> Tuned:
    """The results of the plan of that name; trained once, with the other plan."""
    directory = compute_once(cache / "oracle" / f"tuned-{_key(model)[:16]}", __file__, model) / name
    continuations = msgspec.json.decode((directory / "continuations.json").read_bytes(), type=list[Continuation])
    return Tuned(directory / "store", continuations)


def _key(model: Path) -> str:
    lines = [f"{package} {version(package)}" for package in ("torch", "transformers", "tokenizers", "peft")]
    for file in (Path(__file__), *sorted(model.glob("*.safetensors")), model / "tokenizer.json"):
        with file.open("rb") as opened:
            lines.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def train(plan: TuningPlan, model_dir: Path, store: Path) -> list[Continuation]:
    """Train every prompt or adapter into `store`, and let PEFT generate with each and with none."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = [tokenizer(text).input_ids for text in INPUTS]
    bare = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    found = [_continued(bare, "", ids) for ids in inputs]
    for name, training in plan.trainings.items():
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = get_peft_model(base, _config(training))
        _optimise(model, inputs[:3], tokenizer(training.text).input_ids, plan)
        model.eval().save_pretrained(store / name, safe_serialization=training.file == "safetensors")
        found += [_continued(model, name, ids) for ids in inputs]
    return found


def _config(training: Training) -> Any:
    from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig

    task = "CAUSAL_LM"
    if training.kind == "P_TUNING":
        return PromptEncoderConfig(task_type=task, num_virtual_tokens=training.length, encoder_hidden_size=64)
    if training.kind == "LORA":
        return LoraConfig(task_type=task, r=training.length, **training.options)
    return PromptTuningConfig(task_type=task, num_virtual_tokens=training.length)


def _optimise(model: Any, inputs: list[list[int]], wanted: list[int], plan: TuningPlan) -> None:
    import torch

    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=plan.rate)
    both = [torch.tensor([ids + wanted]) for ids in inputs]
    for _ in range(plan.steps):
        optimiser.zero_grad()
        (sum(model(input_ids=ids, labels=ids).loss for ids in both) / len(both)).backward()
        optimiser.step()


def _continued(model: Any, prompt: str, ids: list[int]) -> Continuation:
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
    assert (best[:, 0] - best[:, 1]).min() > NEAR_TIE, "train something else: another CPU may choose other tokens"
    return Continuation(prompt, ids, out.sequences[0, -len(best) :].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train soft prompts or adapters, and let PEFT generate with them.")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    for name, plan in TUNING_PLANS.items():
        continuations = train(plan, arguments.model, arguments.out / name / "store")
        (arguments.out / name / "continuations.json").write_bytes(msgspec.json.encode(continuations))


if __name__ == "__main__":
    main()
