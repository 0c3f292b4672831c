"""Soft prompts and LoRA adapters trained with PEFT, and what PEFT then generates: expected values of tests.

Float32, CPU, greedy, batch of one, without tgis. Computed by one child process per model (this file as a script) and
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

    task_type: str  # of PEFT
    inputs: list[str]
    trainings: dict[str, Training]
    steps: int
    rate: float = 0.1


_STORY = [
    "Once upon a time",
    "The Hatter",
    "“What a curious feeling!” said Alice; “I must be shutting up like a telescope.” And so",
    "I",
    "He said, “It is",
    "Bruno was silent, for",
]
_NOTES = [
    "Fixed the login page that showed an error for users with long names",
    "we need to update the documentation of the billing service before friday",
    "Add a test",
    "The database migration failed twice last night, so I wrote a script that retries it",
]
_QUEEN = " the Queen of Hearts, and the Queen of Hearts, and the"
_KING = " no, no! said the King. no, no! said the King. no, no!"
_ALICE = "?” said Alice. “Why?” said Alice. “Why?” said Alice."

TUNING_PLANS = {
    "glassllm": TuningPlan(
        task_type="CAUSAL_LM",
        inputs=_STORY,
        trainings={
            "queen": Training("PROMPT_TUNING", 8, "safetensors", _QUEEN),
            "nested/king": Training("PROMPT_TUNING", 5, "bin", _KING),
            "encoded": Training("P_TUNING", 6, "safetensors", _ALICE),
        },
        steps=60,
    ),
    "titles": TuningPlan(
        task_type="SEQ_2_SEQ_LM",
        inputs=_NOTES,
        trainings={
            "report": Training("PROMPT_TUNING", 6, "safetensors", "Weekly report of the team"),
            "question": Training("P_TUNING", 3, "bin", "What should be done about this?"),
        },
        steps=12,
    ),
    "glassllm-lora": TuningPlan(
        task_type="CAUSAL_LM",
        inputs=_STORY,
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
    "titles-lora": TuningPlan(
        task_type="SEQ_2_SEQ_LM",
        inputs=_NOTES,
        trainings={
            "report": Training("LORA", 8, "safetensors", "Weekly report of the team", {"target_modules": "all-linear"}),
            "question": Training("LORA", 2, "bin", "What should be done about this?", {"lora_alpha": 16}),
        },
        steps=4,
        rate=0.01,
    ),
}


class Continuation(msgspec.Struct, frozen=True):
    """What PEFT generates for one input and one prompt or adapter."""

    prompt: str  # or adapter; "" for none
    tokens: list[int]  # of the input
    generated: list[int]
    gaps: list[float]  # between the two best logits of each step


class Trained(msgspec.Struct, frozen=True):
    """What the trainings resulted in."""

    losses: dict[str, tuple[float, float]]  # before and after, by id
    continuations: list[Continuation]  # of all inputs, with each prompt and with none


@dataclass(frozen=True, slots=True)
class Tuned:
    """A store with what was trained, and what PEFT generates with it."""

    store: Path
    trained: Trained


def tuned(name: str, model: Path, cache: Path) -> Tuned:
    """The results of the plan of that name for a model; trained once, with the other plan of that model."""
    family = name.removesuffix("-lora")
    directory = compute_once(cache / "oracle" / f"tuned-{family}-{_key(model)[:16]}", __file__, family, model) / name
    return Tuned(directory / "store", msgspec.json.decode((directory / "trained.json").read_bytes(), type=Trained))


def _key(model: Path) -> str:
    lines = [f"{package} {version(package)}" for package in ("torch", "transformers", "tokenizers", "peft")]
    for file in (Path(__file__), *sorted(model.glob("*.safetensors")), model / "tokenizer.json"):
        with file.open("rb") as opened:
            lines.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def train(plan: TuningPlan, model_dir: Path, store: Path) -> Trained:
    """Train every prompt or adapter into `store`, and let PEFT generate with each and with none."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    inputs = [tokenizer(text).input_ids for text in plan.inputs]
    family = AutoModelForSeq2SeqLM if plan.task_type == "SEQ_2_SEQ_LM" else AutoModelForCausalLM
    bare = family.from_pretrained(model_dir, dtype=torch.float32).eval()
    losses, found = {}, [_continued(bare, "", ids) for ids in inputs]
    for name, training in plan.trainings.items():
        torch.manual_seed(0)
        base = family.from_pretrained(model_dir, dtype=torch.float32)
        model = get_peft_model(base, _config(plan.task_type, training))
        losses[name] = _optimise(model, inputs[:3], tokenizer(training.text).input_ids, plan)
        model.eval().save_pretrained(store / name, safe_serialization=training.file == "safetensors")
        found += [_continued(model, name, ids) for ids in inputs]
    return Trained(losses, found)


def _config(task: str, training: Training) -> Any:
    from peft import LoraConfig, PromptEncoderConfig, PromptTuningConfig

    if training.kind == "P_TUNING":
        return PromptEncoderConfig(task_type=task, num_virtual_tokens=training.length, encoder_hidden_size=64)
    if training.kind == "LORA":
        return LoraConfig(task_type=task, r=training.length, **training.options)
    return PromptTuningConfig(task_type=task, num_virtual_tokens=training.length)


def _optimise(model: Any, inputs: list[list[int]], wanted: list[int], plan: TuningPlan) -> tuple[float, float]:
    """The loss before and after."""
    import torch

    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=plan.rate)
    losses = []
    for _ in range(plan.steps):
        loss = sum(_loss(model, ids, wanted, plan.task_type) for ids in inputs) / len(inputs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def _loss(model: Any, ids: list[int], wanted: list[int], task: str) -> Any:
    import torch

    if task == "SEQ_2_SEQ_LM":
        return model(input_ids=torch.tensor([ids]), labels=torch.tensor([wanted])).loss
    both = torch.tensor([ids + wanted])
    return model(input_ids=both, labels=both).loss


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
    logits = torch.cat(out.logits)
    given = {"input_ids": out.sequences}
    if model.config.is_encoder_decoder:
        given = {"input_ids": torch.tensor([ids]), "decoder_input_ids": out.sequences}
    with torch.no_grad():
        forward = model(**given).logits[0, -len(logits) - 1 : -1]
    torch.testing.assert_close(forward, logits, atol=1e-3, rtol=0)
    best = logits.topk(2).values
    return Continuation(prompt, ids, out.sequences[0, -len(logits) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train soft prompts or adapters, and let PEFT generate with them.")
    parser.add_argument("family", choices=("glassllm", "titles"))
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    for name in (arguments.family, f"{arguments.family}-lora"):
        trained = train(TUNING_PLANS[name], arguments.model, arguments.out / name / "store")
        (arguments.out / name / "trained.json").write_bytes(msgspec.json.encode(trained))


if __name__ == "__main__":
    main()
