"""The sampling options of `tgis generate` and `tgis chat`, with the names of the fields of both APIs."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from tgis.utils.options import decimal, integer

Add: TypeAlias = Callable[..., argparse.Action]
UINT32 = integer(0, 2**32 - 1)
NUMBER = decimal(0, 1e9)
_PENALTY = decimal(-2, 2)
# What the options are called in requests.
FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "bad_words", "allowed_token_ids"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)


def add_sampling(add: Add) -> None:
    """Add the options that apply to sampled tokens only."""
    add("--temperature", type=NUMBER, metavar="X", help="1 = off, <1 sharpens, >1 flattens the distribution")
    add("--top-k", type=UINT32, metavar="N", help="sample from the N most likely tokens")
    add("--top-p", type=NUMBER, metavar="X", help="sample from the most likely tokens that sum to X; 1 = off")
    add("--min-p", type=NUMBER, metavar="X", help="sample from tokens at least X times as likely as the best; 0 = off")
    add("--seed", type=integer(0, 2**64 - 1), metavar="N", help="the same seed gives the same output")


def add_decoding(add: Add) -> None:
    """Add the options that also apply to greedy decoding."""
    repetition = "penalty on tokens already in the text; 1 = off, >1 discourages repetition"
    add("--repetition-penalty", type=NUMBER, metavar="X", help=repetition)
    frequency = "penalty on tokens for each time they are in the output; 0 = off, >0 discourages repetition"
    add("--frequency-penalty", type=_PENALTY, metavar="X", help=frequency)
    presence = "penalty on tokens already in the output; 0 = off, >0 discourages repetition"
    add("--presence-penalty", type=_PENALTY, metavar="X", help=presence)
    add("--bad-word", dest="bad_words", action="append", metavar="TEXT", help="banned word; may be repeated")
    allowed = "allowed token (default: all); may be repeated"
    add("--allow-token-id", dest="allowed_token_ids", action="append", type=UINT32, metavar="N", help=allowed)
