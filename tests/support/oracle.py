"""What transformers answers to the prompts: the expected values of the equality tests.

Float32, CPU, greedy, without tgis. A padded batch drafts the continuations; a forward pass of each prompt alone proves
that they are greedy, and gives all logprobs. Computed by one child process per model (this file as a script), and kept
in the test cache under a key of everything that the answers depend on, this file included.
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
    "titles": oracle_prompts.TITLES,
}
MAX_NEW_TOKENS = {"smollm2": 64, "glassllm": 32, "detransliterator": 48, "titles": 24}
NUM_CANDIDATES = 10
TOLERANCE = 2e-4  # of log-probabilities: oneDNN's packed float32 products alone are off by up to 1e-4
NEAR_TIE = 1e-3
DRAFT_PADDING = 128  # at most, in a batch of drafts


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

    def answers(self, prompts: dict[str, str], max_new_tokens: int) -> dict[str, Answer]:
        classes = {name: self._length_class(prompt) for name, prompt in prompts.items()}
        found = {}
        for same in set(classes.values()):
            batch = [name for name in prompts if classes[name] == same]
            drafts = self._drafts([prompts[name] for name in batch], max_new_tokens)
            for name, draft in zip(batch, drafts, strict=True):
                found[name] = self._answer(prompts[name], draft, max_new_tokens)
        return {name: found[name] for name in prompts}

    def _length_class(self, prompt: str) -> int:
        """Prompts of the same one are drafted together."""
        return len(self.tokenizer(prompt).input_ids) // DRAFT_PADDING

    def _drafts(self, prompts: list[str], max_new_tokens: int) -> list[list[int]]:
        """Continuations from one padded batch, which takes a fraction of the time; a batch of one then checks them."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        out = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        first = 1 if self.config.is_encoder_decoder else inputs.input_ids.shape[1]
        eos = self.model.generation_config.eos_token_id
        drafts: list[list[int]] = out[:, first:].tolist()
        return [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in drafts]

    def _answer(self, prompt: str, draft: list[int], max_new_tokens: int) -> Answer:
        import torch

        ids = self.tokenizer(prompt, return_tensors="pt").input_ids  # [1, T]
        places = getattr(self.config, "max_position_embeddings", None) or self.config.n_positions
        room = places - ids.shape[1]
        input_ids, new_ids = ids[0].tolist(), draft[:room]
        with torch.inference_mode():
            if self.config.is_encoder_decoder:
                decoder_ids = torch.tensor([[self.config.decoder_start_token_id, *new_ids[:-1]]])
                first, logits = 0, self.model(ids, decoder_input_ids=decoder_ids).logits[0]  # [new, V]
            else:
                first = len(input_ids) - 1
                logits = self.model(torch.tensor([input_ids + new_ids[:-1]])).logits[0]  # [T + new - 1, V]
        self._check_greedy(logits[first:], new_ids)
        return Answer(
            prompt=prompt,
            input_tokens=self._token_strings(input_ids),
            input_logprobs=self._oracle_tokens(logits[:first], input_ids[1 : first + 1]),
            generated=self._oracle_tokens(logits[first:], new_ids),
            texts=[self._text(new_ids[:n]) for n in range(len(new_ids) + 1)],
            stop_reason=self._stop_reason(new_ids[-1], room < max_new_tokens),
        )

    def _check_greedy(self, logits: Any, ids: list[int]) -> None:
        """Every token is the best one of its position; of two that nearly tie, either is. logits: [new, V]"""
        import torch

        behind = logits.amax(-1) - logits[torch.arange(len(ids)), ids]
        assert (behind < NEAR_TIE).all(), f"token {int(behind.argmax())} of the draft {ids} is not greedy"

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
    oracle = Oracle(arguments.model)
    found = oracle.answers(PROMPTS[arguments.name], MAX_NEW_TOKENS[arguments.name])
    arguments.out.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
