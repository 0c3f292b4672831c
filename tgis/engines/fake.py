"""Engine `fake`: deterministic and without torch. It says its prompt again, round and round.

For tests of everything but models, and for the load that the front end alone can bear. How long its steps take,
and which token breaks them, can be said in the model's config.json under the key "fake".
"""

import json
import time
from collections.abc import Sequence as Rows
from pathlib import Path

import msgspec

from tgis.batcher.memory_model import padded_tokens
from tgis.batcher.sequence import Sequence, StepPlan
from tgis.engines.base import StepResult
from tgis.errors import OutOfMemory, StartError
from tgis.ipc.messages import EngineInfo, EngineOptions
from tgis.ipc.request import LogprobOptions, TokenLogprobs


class StepModel(msgspec.Struct, frozen=True):
    """What sort of engine it is, how long a step takes, and what goes wrong in it."""

    padded: bool = False
    block_size: int = 0  # tokens of a KV block
    weight_limit: int = 1 << 40  # tokens of context
    largest: int = 1 << 40  # tokens of the largest single request
    prefill_tokens: int = 1 << 20
    tokens_per_step: int = 1  # of each sequence; more only with KV blocks
    step_seconds: float = 0.0
    row_seconds: float = 0.0  # per row that decodes
    context_seconds: float = 0.0  # per token of context of rows that decode, padding included
    prefill_token_seconds: float = 0.0  # padding included
    poison_token: int | None = None  # a row that holds it fails, and nobody else
    crash_token: int | None = None  # a step with a row that holds it fails as a whole
    fatal_token: int | None = None  # a step with a row that holds it is the last one
    memory_tokens: int | None = None  # a step that leaves more tokens of context than this runs out of memory

    def seconds(self, plan: StepPlan) -> float:
        """How long a step takes."""
        decoding = [len(row.tokens) for row in plan.seqs if row.decoding]
        return (
            self.step_seconds
            + self.row_seconds * len(decoding)
            + self.context_seconds * padded_tokens(decoding, self.padded)
            + self.prefill_token_seconds * padded_tokens(plan.num_prefill_tokens, self.padded)
        )


class FakeEngine:
    """Token number n after the prompt is token n of the prompt, modulo its length."""

    def __init__(self, options: EngineOptions) -> None:
        config = json.loads((Path(options.model_path) / "config.json").read_bytes())
        self._model = msgspec.convert(config.get("fake", {}), StepModel)
        self._options = options
        self._vocab_size = int(config["vocab_size"])
        self._num_computed_tokens: dict[int, int] = {}  # request id -> computed tokens
        self._kv_slots: dict[int, int] = {}  # of KV blocks -> the token there

    @property
    def info(self) -> EngineInfo:
        """What the model's config says it is; without memory limits, unless it has some."""
        return EngineInfo(
            model_class="FakeEngine",
            device="none",
            dtype="none",
            vocab_size=self._vocab_size,
            encoder_decoder=False,
            padded=self._model.padded,
            max_batch_size=self._options.max_batch_size or 256,
            token_capacity=self._model.weight_limit,
            max_prefill_tokens=self._model.prefill_tokens,
            block_size=self._model.block_size,
            max_request_tokens=self._model.largest,
        )

    def warm_up(self) -> None:
        """Nothing is cold."""

    def step(self, plan: StepPlan) -> StepResult:
        """Wait as long as such a step takes, then repeat the prompts."""
        model = self._model
        time.sleep(model.seconds(plan))
        for row, count in zip(plan.seqs, plan.num_scheduled_tokens, strict=True):
            assert model.block_size or row.num_computed_tokens == self._num_computed_tokens.get(row.id, 0), (
                "the batcher and the engine disagree"
            )
            self._num_computed_tokens[row.id] = row.num_computed_tokens + count
            if model.block_size:
                self._write_kv(row, count)
        if any(model.crash_token in row.tokens for row in plan.seqs):
            raise RuntimeError("a row holds the token that breaks this step")
        if any(model.fatal_token in row.tokens for row in plan.seqs):
            raise StartError("a row holds the token that ends this engine")
        if (
            model.memory_tokens is not None
            and padded_tokens([*self._num_computed_tokens.values()], model.padded) > model.memory_tokens
        ):
            raise OutOfMemory("more tokens of context than the model's config allows")
        tokens = [self._next_tokens(row) for row in plan.sampled]
        return StepResult(
            tokens,
            logprobs=[
                self._token_logprobs(row.request.logprob_options, new_tokens)
                for row, new_tokens in zip(plan.sampled, tokens, strict=True)
            ],
            prompt_logprobs=self._prompt_logprobs(plan.sampled),
            failed={row.id: "a poisoned row" for row in plan.seqs if model.poison_token in row.tokens},
        )

    def release(self, rows: Rows[Sequence]) -> None:
        """Forget how far they were."""
        for row in rows:
            self._num_computed_tokens.pop(row.id, None)

    def close(self) -> None:
        """Nothing to give back."""

    def _next_tokens(self, row: Sequence) -> list[int]:
        first = row.num_generated_tokens
        return [row.tokens[n % row.prompt_length] for n in range(first, first + self._model.tokens_per_step)]

    def _write_kv(self, row: Sequence, count: int) -> None:
        """Write tokens to the row's blocks; all that it has there must be its own."""
        size, end = self._model.block_size, row.num_computed_tokens + count
        slots = [row.block_table[place // size] * size + place % size for place in range(end)]
        self._kv_slots.update(
            zip(slots[row.num_computed_tokens :], row.tokens[row.num_computed_tokens : end], strict=True)
        )
        assert [self._kv_slots[slot] for slot in slots] == row.tokens[:end], "a block holds another row's tokens"

    def _prompt_logprobs(self, rows: list[Sequence]) -> dict[int, list[TokenLogprobs]]:
        return {
            row.id: [self._make_logprobs(row.request.logprob_options, token) for token in row.tokens]
            for row in rows
            if row.request.logprob_options.input_tokens and not row.num_generated_tokens
        }

    def _token_logprobs(self, details: LogprobOptions, tokens: list[int]) -> list[TokenLogprobs]:
        wanted = details.generated_tokens and (details.logprobs or details.ranks or details.top_n_tokens)
        return [self._make_logprobs(details, token) for token in tokens] if wanted else []

    def _make_logprobs(self, details: LogprobOptions, token: int) -> TokenLogprobs:
        logprob = -0.5 if details.logprobs else 0.0
        top = [
            ((token + i) % self._vocab_size, logprob - i if details.logprobs else 0.0)
            for i in range(details.top_n_tokens)
        ]
        return TokenLogprobs(logprob, int(details.ranks), top)
