"""Engine `fake`: deterministic and without torch. It repeats its prompt over and over.

It serves tests of everything but models, and measurements of the front end alone. The duration of its steps, and the
tokens that break them, are configured in the model's config.json under the key "fake".
"""

import functools
import json
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from tgis.batcher.capacity import padded_tokens
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import Engine, StepResult
from tgis.errors import GrammarError, OutOfMemory, StartError
from tgis.ipc.messages import EngineInfo, EngineOptions, FailureKind
from tgis.ipc.request import LogprobOptions, TokenLogprobs


class StepModel(msgspec.Struct, frozen=True):
    """The kind of engine, the duration of its steps, and the errors in them."""

    padded: bool = False
    block_size: int = 0  # tokens of a KV block
    prefill_tokens: int = 1 << 20
    step_seconds: float = 0.0
    poison_token: int | None = None  # a sequence with this token fails, and no other
    crash_token: int | None = None  # a step with this token fails as a whole
    fatal_token: int | None = None  # a step with this token is the last one
    memory_tokens: int | None = None  # a step that leaves more tokens of context runs out of memory


class FakeEngine(Engine):
    """Token number n after the prompt is token n of the prompt, modulo its length, or the first that is allowed."""

    def __init__(self, options: EngineOptions) -> None:
        config = json.loads((Path(options.model_path) / "config.json").read_bytes())
        self._model = msgspec.convert(config.get("fake", {}), StepModel)
        self._num_computed_tokens: dict[int, int] = {}  # request id -> computed tokens
        self.info = EngineInfo(  # without memory limits, unless the model's config has some
            engine="fake",
            model_class="FakeEngine",
            device="none",
            dtype="none",
            vocab_size=int(config["vocab_size"]),
            encoder_decoder=False,
            padded=self._model.padded,
            max_batch_size=options.max_batch_size or 256,
            token_capacity=1 << 40,
            max_prefill_tokens=self._model.prefill_tokens,
            block_size=self._model.block_size,
            input_vocab_size=int(config["vocab_size"]),
        )

    def step(self, plan: StepPlan) -> StepResult:
        """Sleep for the duration of the step, then repeat the prompts."""
        model = self._model
        time.sleep(model.step_seconds)
        for seq, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            known = self._num_computed_tokens.get(seq.id, 0)
            assert model.block_size or seq.num_computed_tokens == known, "the batcher and the engine disagree"
            self._num_computed_tokens[seq.id] = seq.num_computed_tokens + count
        if any(model.crash_token in seq.tokens for seq in plan.seqs):
            raise RuntimeError("a row holds the token that breaks this step")
        if any(model.fatal_token in seq.tokens for seq in plan.seqs):
            raise StartError("a row holds the token that ends this engine")
        context = padded_tokens([*self._num_computed_tokens.values()], model.padded)
        if model.memory_tokens is not None and context > model.memory_tokens:
            raise OutOfMemory("more tokens of context than the model's config allows")
        failed = {
            seq.id: (FailureKind.ERROR, "a poisoned row") for seq in plan.seqs if model.poison_token in seq.tokens
        }
        tokens = []
        for seq in plan.sampled:
            try:
                tokens.append(self._next_tokens(seq))
            except GrammarError as error:
                tokens.append([])
                failed[seq.id] = FailureKind.GRAMMAR, str(error)
        details = [seq.request.output_details for seq in plan.sampled]
        logprobs = [self._logprobs(o, new) if o.wants_details else [] for o, new in zip(details, tokens, strict=True)]
        return StepResult(tokens, logprobs, self._prompt_logprobs(plan.sampled), failed)

    def release(self, seqs: Collection[Sequence]) -> None:
        for seq in seqs:
            self._num_computed_tokens.pop(seq.id, None)

    def _next_tokens(self, seq: Sequence) -> list[int]:
        token = seq.tokens[seq.num_generated_tokens % seq.prompt_length]
        if seq.grammar is None:
            return [token]
        allowed = seq.grammar.allowed_ids(seq.tokens[seq.prompt_length :])
        return [token] if token in allowed else allowed[:1]

    def _prompt_logprobs(self, seqs: list[Sequence]) -> dict[int, list[TokenLogprobs]]:
        return {
            seq.id: self._logprobs(seq.request.logprob_options, seq.tokens) for seq in seqs if seq.wants_prompt_logprobs
        }

    def _logprobs(self, options: LogprobOptions, tokens: list[int]) -> list[TokenLogprobs]:
        return [_make_logprobs(options, token, self.info.vocab_size) for token in tokens]


@functools.lru_cache(maxsize=4096)  # making 4,000 input tokens again would take two steps of 10 ms
def _make_logprobs(options: LogprobOptions, token: int, vocab_size: int) -> TokenLogprobs:
    logprob, step = (-0.5, 1) if options.logprobs else (0.0, 0)
    top = [((token + i) % vocab_size, logprob - i * step) for i in range(options.top_n_tokens)]
    return TokenLogprobs(logprob, int(options.ranks), top)
