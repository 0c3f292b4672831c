"""The parameters of a call, from an API to the engine: an API makes them, `validation.py` checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from tgis.ipc.lookups import GrammarSpec
from tgis.ipc.request import LogprobOptions, SamplingParams, UInt


@dataclass(frozen=True, slots=True)
class Constraints:
    """Where the rules for parameters differ between APIs; the defaults are TGIS's."""

    min_temperature: float = 0.05  # 0, which is greedy, is always allowed
    max_stop_sequences: int = 6
    max_stop_sequence_bytes: int = 240
    max_stop_bytes: int = 1 << 16  # all stop sequences together
    max_top_n_tokens: int | None = None  # None: the server's
    min_room: int = 1  # new tokens that must fit behind the input, if so many are asked for; 0: lower those that do not


# The OpenAI API, whose clients also come through routers.
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
OPENAI_CONSTRAINTS = Constraints(
    min_temperature=0.0,
    max_stop_sequences=128,
    max_stop_sequence_bytes=1024,
    max_stop_bytes=1 << 14,  # each token is compared with all of them
    max_top_n_tokens=MAX_TOP_LOGPROBS,
    min_room=0,
)


class Params(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The parameters of a call. Those in `sampling` and `logprob_options` go to the engine as they are.

    `seed` and `bad_words` are what the client sends; each output has its own seed, and the words as tokens. A parameter
    that decides the answer is recorded, too: `_RECORDED` in records.py.
    """

    sampling: SamplingParams = SamplingParams()
    logprob_options: LogprobOptions = LogprobOptions()
    seed: int | None = None
    bad_words: Sequence[str] = ()
    max_new_tokens: UInt = 0  # 0: the server's default
    fill_context: bool = False  # without max_new_tokens, generate all that fits
    time_limit_millis: UInt = 0
    stop_sequences: Sequence[str] = ()
    include_stop_sequence: bool | None = None  # None: the server's default
    grammar: GrammarSpec | None = None
    truncate_input_tokens: UInt = 0
    add_special_tokens: bool = True  # unless the server turns them off
    skip_special_tokens: bool | None = None  # None: the server's default
    input_text: bool = False
    token_ids: bool = False  # report the ids of tokens
    record: bool = False  # return the record of each answer
    prediction: str | Sequence[int] = ""  # text or tokens that the output probably repeats
    constraints: Constraints = Constraints()

    @classmethod
    def of(cls, fields: Mapping[str, Any], **more: Any) -> Self:
        """Parameters from the fields of a request that have their names; `more` come first, None is unset.

        Without a temperature, tokens are sampled at 1.
        """
        given = {"temperature": 1.0} | {name: value for name, value in {**fields, **more}.items() if value is not None}
        params = {name: given.pop(name) for name in cls.__struct_fields__ if name in given}
        sampling = {name: given[name] for name in SamplingParams.__struct_fields__ if name in given}
        return cls(**params, sampling=SamplingParams(**sampling))

    def sampling_params(
        self, default_seed: int, number: int = 0, bad_words: tuple[tuple[int, ...], ...] = ()
    ) -> SamplingParams:
        """The sampling parameters of output `number` of an input; `bad_words` are tokens.

        Outputs of a call without a seed have `default_seed`.
        """
        seed = default_seed if self.seed is None else (self.seed + number) % 2**64
        return msgspec.structs.replace(self.sampling, seed=0 if self.sampling.greedy else seed, bad_words=bad_words)
