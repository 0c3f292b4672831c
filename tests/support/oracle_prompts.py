"""Prompts whose continuations the oracle computes, by model and by name; the names are test ids."""

import itertools
from collections.abc import Iterator

FAMILY, FLAG, THUMB, WOMAN = "👨‍👩‍👧‍👦", "🇵🇹", "👍🏽", "👩🏾‍🚀"


def _chat(message: str) -> str:
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def _cats() -> Iterator[str]:
    places, colours = "Paris Lisbon Oslo Quito", "red green blue white black brown pink"
    cats = itertools.product(places.split(), colours.split())
    for number, (place, colour) in enumerate(cats, 1):
        yield f"{number}. The {colour} cat sat on mat number {number * number}, in {place}.\n"


SMOLLM2 = {
    "english": "The capital of France is",
    "one_token": "The",
    "python": 'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "joiners": f"{FAMILY} {FAMILY} {FAMILY} {FAMILY} {FAMILY}",
    "emoji": f"🎉🥳🎂 Happy birthday! 🎉🥳🎂\n{THUMB}{FLAG}{WOMAN} {THUMB}{FLAG}{WOMAN} {THUMB}{FLAG}{WOMAN}",
    "chinese": "北京是中国的首都。上海是中国的",
    "arabic": "عاصمة مصر هي القاهرة وعاصمة فرنسا هي",
    "combining": "e\u0301 a\u0308 o\u0302 n\u0303 e\u0301 a\u0308 o\u0302 n\u0303 e\u0301 a\u0308",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    "leading_spaces": "   Once upon a time there was a",
    "newlines": "\n\n\nChapter 1\n\n\n",
    "odd_characters": "zero\u200bwidth, no\u00a0break, \ufeffmark, \ufffd\ufffd, bell\x07, ½ ≠ ∞ 𝕬𝖇 ﷽",
    "special_inside": "<|endoftext|>A file<file_sep><filename>main.py\nimport",
    "chat_short": _chat("What is 2+2? Answer with only the number."),
    "long": "".join(_cats()),
}

GLASSLLM = {
    "rabbit": "Alice was beginning to get very tired of sitting by her sister on the bank,",
    "one_token": "The",
    "queen": "“Off with her head!” the Queen shouted",
    "poem": "’Twas brillig, and the slithy toves\n  Did gyre and gimble in the wabe:\n",
    "numbers": "In 1865 there were 24 cats, 7 kings and 3,000 cards:",
    "leading_spaces": "   she went on, and",
    "trailing_space": "“Why,” said the Gryphon, “you ",
    "newlines": "\n\nCHAPTER IV.\n\n",
    "accents": "Où est ma chatte? Æneas said, naïve e\u0301te\u0301",
    "unknown": "日本 🎉 and the 👍🏽 King",
    "no_spaces": "andthentheylookedatoneanotherinsilence",
    "repeated": "very very very very very very very very",
    "context_full": "So she was considering in her own mind (as well as she could, for the hot day made her feel "
    "very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting "
    "up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing "
    "so very remarkable in that;",
}

# Latin script to N'Ko; most are lines of the package's own test data.
DETRANSLITERATOR = {
    "name": "musa dunbuya",
    "empty": "",
    "space": " ",
    "capitals": "MUSA Dunbuya, I NI SƆGƆMA",
    "digits": "1960 san, 22 sɛtanburu kalo",
    "unknown": "日本 🎉 ß {x} @home",
    "newlines": "musa\n\ndunbuya\n",
    "special_inside": "musa </s> <pad> dunbuya <src_eos>",
    "tones": "à fɔ́ kó àle lé màhìnàla dí, ņ bádá l’à mà, ņ dòn bádá ņ sɛ̀nbɛ́ à lá",
    "tones_question": "à n’ibùràhimá, ò mɛn kà dafali kɛ́؟.",
    "verse_8": "8. alu kaliyamɛnɛntɔ ye kililila magɛn kan, banbaa lu y’a fɔ kan ko bi ye lon gɛlɛn di koi.",
    "verse_42": "8. o kɔ a k a madon , ka ban k a fanmajii.",
    "verse_321": "321. ferawun kan o dɔ ko alu bada l’a la le ba k a tɛdɛ ņ ma diɲɛ alu ye؟، jaga alu na gananɲa ɲin "
    "ne dɔsada la dugu kɔnɔ , s’alu di dugu donko lu labɔ a kɔnɔ ( subagaya la )، konin alu di n a lɔn sɛn.",
}
