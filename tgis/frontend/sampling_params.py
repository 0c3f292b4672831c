"""Parameters of a call, as the client sends them and with all defaults filled in. Pure functions of numbers and text.

`validation.py` checks them in between: `with_defaults`, the rules, `resolve`.
"""

import time
from dataclasses import dataclass, field, replace

import msgspec

from tgis.ipc.request import LogprobOptions, SamplingParams


@dataclass(frozen=True, slots=True)
class RawParams:
    """Parameters as the client sends them: zero is unset, None is absent."""

    do_sample: bool = False
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 0.0
    typical_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    time_limit_millis: int = 0
    stop_sequences: tuple[str, ...] = ()
    include_stop_sequence: bool | None = None
    input_text: bool = False
    logprob_options: LogprobOptions = field(default_factory=LogprobOptions)
    repetition_penalty: float = 0.0
    length_penalty: tuple[int, float] | None = None  # start_index, decay_factor
    truncate_input_tokens: int = 0
    guided: str = ""  # the face's name for the constraint on the output, if any

    def with_defaults(self, max_new_tokens: int) -> "RawParams":
        """Fill in defaults; greedy decoding drops the sampling parameters unread."""
        filled = replace(
            self,
            max_new_tokens=self.max_new_tokens or max_new_tokens,
            repetition_penalty=self.repetition_penalty or 1.0,
        )
        if not self.do_sample:
            return replace(filled, temperature=0.0, top_k=0, top_p=1.0, typical_p=0.0, seed=None)
        temperature = 1.0 if self.temperature is None else self.temperature
        return replace(filled, temperature=temperature, top_p=self.top_p or 1.0)

    def resolve(self, *, include_stop_sequence: bool, fill_context: bool) -> "ResolvedParams":
        """Turn validated parameters with defaults into what the inputs run with. The deadline starts now."""
        assert self.temperature is not None
        greedy = self.temperature == 0.0
        include = self.include_stop_sequence
        return ResolvedParams(
            given=self,
            sampling_params=SamplingParams(
                temperature=self.temperature,
                top_k=0 if greedy else self.top_k,
                top_p=1.0 if greedy else self.top_p,
                typical_p=1.0 if greedy or self.typical_p <= 0.0 else self.typical_p,
                repetition_penalty=self.repetition_penalty,
                length_penalty=self.length_penalty,
                seed=0 if greedy or self.seed is None else self.seed,
                min_new_tokens=self.min_new_tokens,
            ),
            fill_context=fill_context,
            deadline=time.monotonic() + self.time_limit_millis / 1000 if self.time_limit_millis else None,
            include_stop_sequence=include_stop_sequence if include is None else include,
        )


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """What every input of a call runs with."""

    given: RawParams  # with defaults
    sampling_params: SamplingParams
    fill_context: bool  # the request asked for no number: generate all that fits
    deadline: float | None
    include_stop_sequence: bool

    def seeded(self, default_seed: int) -> "ResolvedParams":
        """For one input: the given seed, which is that of all inputs of the call, else its own."""
        if self.sampling_params.greedy or self.given.seed is not None:
            return self
        return replace(self, sampling_params=msgspec.structs.replace(self.sampling_params, seed=default_seed))
