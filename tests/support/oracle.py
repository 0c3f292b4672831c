"""What transformers answers to the prompts: the expected values of the equality tests.

Float32, CPU, greedy, without tgis; one more forward pass gives all logprobs. Computed by one child process per model
(this file as a script), and kept in the test cache under a key of everything that the answers depend on, this file
included.
"""

import argparse
import hashlib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import oracle_prompts
from compute_once import compute_once

PROMPTS = {
    "smollm2": oracle_prompts.SMOLLM2,
    "glassllm": oracle_prompts.GLASSLLM,
    "detransliterator": oracle_prompts.DETRANSLITERATOR,
}
MAX_NEW_TOKENS = {"smollm2": 24, "glassllm": 32, "detransliterator": 48}
NUM_CANDIDATES = 10
TOLERANCE = 2e-4  # of log-probabilities: oneDNN's packed float32 products alone are off by up to 1e-4
NEAR_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class OracleToken:
    """A token, and what the model predicted for its position."""

    token: str  # as it stands in the vocabulary
    logprob: float
    ranks: tuple[int, int]  # best and worst within the tolerance
    top: list[tuple[str, float]]  # token and logprob of the best NUM_CANDIDATES, best first
    top_two_gap: float  # between the two best logits


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its continuation, greedy."""

    prompt: str
    input_tokens: list[str]
    input_logprobs: list[OracleToken]  # of every input token but the first; none of an encoder's
    generated: list[OracleToken]
    texts: list[str]  # texts[n] is the output of the first n generated tokens
    stop_reason: str

    def near_tie_steps(self) -> set[int]:
        """Steps whose best two tokens are so close that another order of summation may swap them."""
        return {step for step, token in enumerate(self.generated) if token.top_two_gap < NEAR_TIE}


def answers(name: str, model: Path, cache: Path, recompute: bool = False) -> dict[str, Answer]:
    """What the demo model `name` in the directory `model` answers to its prompts, by their names."""
    file = cache / "oracle" / f"{name}-{_key(model)[:16]}.json"
    compute_once(file, __file__, name, model, recompute=recompute)
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Answer])


def _key(model: Path) -> str:
    """sha256 of the files and package versions that the answers depend on."""
    files = [Path(__file__), Path(oracle_prompts.__file__), *sorted(model.glob("*.safetensors"))]
    files += [model / f"{name}.json" for name in ("tokenizer", "tokenizer_config", "config", "generation_config")]
    lines = [f"{package} {version(package)}" for package in ("torch", "transformers", "tokenizers")]
    for file in files:
        with file.open("rb") as opened:
            lines.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Oracle:
    """A model and its tokenizer, as transformers loads them."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

        torch.set_num_threads(1)  # beside other processes two threads that wait for each other are slower than one
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.config = AutoConfig.from_pretrained(directory)
        family = AutoModelForSeq2SeqLM if self.config.is_encoder_decoder else AutoModelForCausalLM
        self.model: Any = family.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()

    def answer(self, prompt: str, max_new_tokens: int) -> Answer:
        import torch

        ids = self.tokenizer(prompt, return_tensors="pt").input_ids  # [1, T]
        room = self.config.max_position_embeddings - ids.shape[1]
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=min(room, max_new_tokens)
        )
        input_ids = ids[0].tolist()
        first = 1 if self.config.is_encoder_decoder else len(input_ids)
        new_ids = out[0, first:].tolist()
        with torch.inference_mode():  # logits of the places before the new tokens: [new, V] or [T + new - 1, V]
            extra = {"decoder_input_ids": out[:, :-1]} if self.config.is_encoder_decoder else {}
            logits = self.model(ids if extra else out[:, :-1], **extra).logits[0]
        return Answer(
            prompt=prompt,
            input_tokens=self._token_strings(input_ids),
            input_logprobs=self._oracle_tokens(logits[: first - 1], input_ids[1:first]),
            generated=self._oracle_tokens(logits[first - 1 :], new_ids),
            texts=[self._text(new_ids[:n]) for n in range(len(new_ids) + 1)],
            stop_reason=self._stop_reason(new_ids[-1], room < max_new_tokens),
        )

    def _stop_reason(self, last: int, reduced: bool) -> str:
        if last == self.model.generation_config.eos_token_id:
            return "EOS_TOKEN"
        return "TOKEN_LIMIT" if reduced else "MAX_TOKENS"

    def _token_strings(self, ids: list[int]) -> list[str]:
        names: list[str] = self.tokenizer.convert_ids_to_tokens(ids)
        return names

    def _oracle_tokens(self, logits: Any, ids: list[int]) -> list[OracleToken]:
        """logits: [N, V], which predict N ids."""
        logprobs = logits.double().log_softmax(-1)
        best = logprobs.topk(NUM_CANDIDATES)
        rows = zip(ids, logprobs, best.values.tolist(), best.indices.tolist(), strict=True)
        return [
            OracleToken(
                token=self._token_strings([token])[0],
                logprob=row[token].item(),
                ranks=(1 + int((row > row[token] + TOLERANCE).sum()), int((row > row[token] - TOLERANCE).sum())),
                top=list(zip(self._token_strings(candidates), top, strict=True)),
                top_two_gap=top[0] - top[1],
            )
            for token, row, top, candidates in rows
        ]

    def _text(self, ids: list[int]) -> str:
        """The text of a continuation: a leading space stays, an incomplete character at the end goes.

        The output of an encoder-decoder continues nothing.
        """
        if self.config.is_encoder_decoder:
            return self._decode(ids).rstrip("\ufffd")
        before = self.tokenizer("A", add_special_tokens=False).input_ids[:1]
        start, whole = self._decode(before), self._decode(before + ids)
        assert whole.startswith(start)
        return whole[len(start) :].rstrip("\ufffd")

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description="Compute the answers of a model to its prompts.")
    parser.add_argument("name", choices=PROMPTS)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    oracle, most = Oracle(arguments.model), MAX_NEW_TOKENS[arguments.name]
    found = {name: oracle.answer(prompt, most) for name, prompt in PROMPTS[arguments.name].items()}
    arguments.out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
