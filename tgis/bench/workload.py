"""The workload: an endless sequence of prompts, determined by the seed.

Does not know when or how they are sent.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tgis.errors import OptionError

FIRST_WORD = "the"
_WORDS = """
able about above across act after again against age ago air all almost alone along also always among and
animal answer any appear area arm around art ask back bad base bear beat because become been before begin
behind best better between big bird black blue boat body book both bottom box boy bring brother build burn
busy but buy call came can car care carry case cat catch center chance change child choose circle city class
clean clear close cold color come common complete contain cook cool corn corner cost could count country
cover cross cry cut dance dark day dead deal dear decide deep did die differ dog done door double down draw
dream dress drink drive drop dry during each early earth ease east eat edge egg eight either else end energy
engine enough enter equal even evening event ever every exact eye face fact fall family far farm fast father
fear feed feel feet fell few field fight figure fill final find fine finger finish fire first fish fit five
flat floor flow flower fly follow food foot for force forest form forward found four free fresh friend from
front fruit full game garden gave general gentle get girl give glass go gold gone good got govern grand grass
great green grew ground group grow guess guide had hair half hand happen happy hard has hat have he head hear
heart heat heavy held help her here high hill his hit hold hole home hope horse hot hour house how huge human
"""
WORDS = tuple(_WORDS.split())
_SAMPLE = WORDS[::4]  # short enough for small models


class _Prompt(msgspec.Struct):
    text: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What words cost a server on average; the first word and special tokens are `base_tokens`."""

    base_tokens: int = 1
    tokens_per_word: float = 1.0

    def prompt(self, tokens: int, rng: random.Random) -> str:
        """Random words of about `tokens` tokens, special tokens included; exact where all words cost the same."""
        count = max(0, round((tokens - self.base_tokens) / self.tokens_per_word))
        return " ".join([FIRST_WORD, *rng.choices(WORDS, k=count)])


def calibration_texts() -> list[str]:
    """The texts whose token counts `calibrate` needs."""
    return [FIRST_WORD, " ".join([FIRST_WORD, *_SAMPLE])]


def calibrate(counts: Sequence[int]) -> Vocabulary:
    """The costs, from the token counts of `calibration_texts`."""
    base, more = counts
    return Vocabulary(base, max(more - base, 1) / len(_SAMPLE))


def random_prompts(vocabulary: Vocabulary, input_tokens: int, rng: random.Random) -> Iterator[str]:
    """Random prompts that share only their first word."""
    while True:
        yield vocabulary.prompt(input_tokens, rng)


def file_prompts(path: Path) -> Iterator[str]:
    """The prompts of a file, repeated."""
    return itertools.cycle(read_texts(path, "--prompts"))


def read_texts(path: Path, option: str) -> list[str]:
    """The texts in a file that an option names: its lines, or the "text" of each line of a .jsonl file."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        objects = path.suffix == ".jsonl"
        texts = [msgspec.json.decode(line, type=_Prompt).text for line in lines] if objects else lines
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise OptionError(f"{option} {path}: {error}") from error
    if not texts:
        raise OptionError(f"{option} {path}: no text in it")
    return texts
