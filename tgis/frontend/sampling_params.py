"""Parameters of a call, as the client sends them and with all defaults filled in. Pure functions of numbers and text.

`validation.py` checks them in between: `with_defaults`, the rules, `sampling_params` of each output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tgis.ipc.lookups import GrammarSpec
from tgis.ipc.request import LogprobOptions, SamplingParams

WATERMARK = 0.5, 2.0  # share of the vocabulary that it prefers, and what it adds to the logits of that share


@dataclass(frozen=True, slots=True)
class Constraints:
    """Where the rules for parameters differ between APIs; the defaults are TGIS's."""

    min_temperature: float = 0.05  # above 0
    max_stop_sequences: int = 6
    max_stop_sequence_bytes: int = 240
    max_top_n_tokens: int | None = None  # None: the server's
    min_room: int = 1  # tokens of the output that must fit behind the input, if it asks for so many


@dataclass(frozen=True, slots=True)
class RawParams:
    """Parameters as the client sends them: zero is unset, None is absent."""

    do_sample: bool = False
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 0.0
    typical_p: float = 0.0
    min_p: float = 0.0
    seed: int | None = None
    max_new_tokens: int = 0
    min_new_tokens: int = 0
    time_limit_millis: int = 0
    stop_sequences: tuple[str, ...] = ()
    include_stop_sequence: bool | None = None
    input_text: bool = False
    logprob_options: LogprobOptions = field(default_factory=LogprobOptions)
    token_ids: bool = False  # of the tokens that the options report
    repetition_penalty: float = 0.0
    length_penalty: tuple[int, float] | None = None  # start_index, decay_factor
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words: tuple[str, ...] = ()
    watermark: bool = False
    ignore_eos: bool = False
    truncate_input_tokens: int = 0
    grammar: GrammarSpec | None = None
    fill_context: bool = False  # without a number of tokens generate all that fits, whatever the server's default
    add_special_tokens: bool = True  # let the tokenizer add those that it adds, unless the server keeps it from that
    skip_special_tokens: bool | None = None  # in the output; None: as the server does
    constraints: Constraints = Constraints()

    def with_defaults(
        self, max_new_tokens: int, *, include_stop_sequence: bool = True, fill_context: bool = False
    ) -> "RawParams":
        """Fill in defaults; greedy decoding drops the sampling parameters unread.

        `fill_context`: where the request has no number of tokens, generate all that fits, up to `max_new_tokens`.
        """
        given = self.include_stop_sequence
        filled = replace(
            self,
            max_new_tokens=self.max_new_tokens or max_new_tokens,
            fill_context=fill_context and not self.max_new_tokens,
            include_stop_sequence=include_stop_sequence if given is None else given,
            repetition_penalty=self.repetition_penalty or 1.0,
        )
        if not self.do_sample:
            return replace(filled, temperature=0.0, top_k=0, top_p=1.0, typical_p=0.0, min_p=0.0, seed=None)
        temperature = 1.0 if self.temperature is None else self.temperature
        return replace(filled, temperature=temperature, top_p=self.top_p or 1.0)

    def sampling_params(
        self, default_seed: int, number: int = 0, bad_words: tuple[tuple[int, ...], ...] = ()
    ) -> SamplingParams:
        """How the tokens of output `number` of an input are sampled, once these are valid and have their defaults.

        Without a seed of the call the output has `default_seed`. `bad_words` are the tokens of each.
        """
        assert self.temperature is not None
        greedy = self.temperature == 0.0
        seed = default_seed if self.seed is None else (self.seed + number) % 2**64
        return SamplingParams(
            temperature=self.temperature,
            top_k=0 if greedy else self.top_k,
            top_p=1.0 if greedy else self.top_p,
            typical_p=1.0 if greedy or self.typical_p <= 0.0 else self.typical_p,
            repetition_penalty=self.repetition_penalty,
            length_penalty=self.length_penalty,
            seed=0 if greedy else seed,
            min_new_tokens=self.min_new_tokens,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=dict(self.logit_bias) or None,
            watermark=WATERMARK if self.watermark else None,
            ignore_eos=self.ignore_eos,
            min_p=0.0 if greedy else self.min_p,
            stop_token_ids=self.stop_token_ids,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=bad_words,
        )
