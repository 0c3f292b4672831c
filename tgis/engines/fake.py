"""Engine `fake`: deterministic and without torch. It says its prompt again, round and round.

For tests of everything but models, and for the load that the front end alone can bear. How long its steps take,
and which token breaks them, can be said in the model's config.json under the key "fake".
"""

import json
import time
from collections.abc import Sequence as Rows
from pathlib import Path

import msgspec

from tgis.batcher.sequence import Plan, Sequence
from tgis.engines.base import StepResult
from tgis.messages import Details, EngineInfo, EngineOptions, TokenFacts


class StepModel(msgspec.Struct, frozen=True):
    """How long a step takes, and what goes wrong in it."""

    step_seconds: float = 0.0
    row_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    poison_token: int | None = None  # a row that holds it fails, and nobody else
    crash_token: int | None = None  # a step with a row that holds it fails as a whole


class FakeEngine:
    """Token number n after the prompt is token n of the prompt, modulo its length."""

    def __init__(self, options: EngineOptions) -> None:
        config = json.loads((Path(options.model_path) / "config.json").read_bytes())
        self._steps = msgspec.convert(config.get("fake", {}), StepModel)
        self._options = options
        self._vocab_size = int(config["vocab_size"])

    @property
    def info(self) -> EngineInfo:
        """A model without memory limits."""
        return EngineInfo(
            model_class="FakeEngine",
            device="none",
            dtype="none",
            vocab_size=self._vocab_size,
            encoder_decoder=False,
            padded=False,
            max_batch_size=self._options.max_batch_size or 256,
            weight_limit=1 << 40,
            prefill_tokens=1 << 20,
        )

    def warm_up(self) -> None:
        """Nothing is cold."""

    def step(self, plan: Plan) -> StepResult:
        """Wait as long as such a step takes, then repeat the prompts."""
        model = self._steps
        computed = sum(row.pending for row in plan.rows) if plan.prefill else 0
        time.sleep(model.step_seconds + model.row_seconds * len(plan.rows) + model.prefill_token_seconds * computed)
        if any(model.crash_token in row.tokens for row in plan.rows):
            raise RuntimeError("a row holds the token that breaks this step")
        tokens = [row.tokens[row.generated % row.prompt_length] for row in plan.rows]
        return StepResult(
            tokens,
            facts=[self._facts(row.request.details, t) for row, t in zip(plan.rows, tokens, strict=True)],
            inputs=self._inputs(plan) if plan.prefill else {},
            failed={row.id: "a poisoned row" for row in plan.rows if model.poison_token in row.tokens},
        )

    def release(self, rows: Rows[Sequence]) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    def _inputs(self, plan: Plan) -> dict[int, list[TokenFacts]]:
        return {
            row.id: [self._fact(row.request.details, token) for token in row.tokens]
            for row in plan.rows
            if row.request.details.inputs
        }

    def _facts(self, details: Details, token: int) -> TokenFacts | None:
        wanted = details.generated and (details.logprobs or details.ranks or details.top_n)
        return self._fact(details, token) if wanted else None

    def _fact(self, details: Details, token: int) -> TokenFacts:
        logprob = -0.5 if details.logprobs else 0.0
        top = [((token + i) % self._vocab_size, logprob - i if details.logprobs else 0.0) for i in range(details.top_n)]
        return TokenFacts(logprob, int(details.ranks), top)
