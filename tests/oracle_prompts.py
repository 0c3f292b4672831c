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
    "rust": "fn main() {\n    let words: Vec<&str> = text.split_whitespace().collect();\n    for",
    "javascript": "const squares = [1, 2, 3].map((x) => x ** 2);\nconsole.log(",
    "sql": "SELECT name, COUNT(*) AS orders FROM customers\nLEFT JOIN",
    "c": "#include <stdio.h>\n\n#define MAX(a, b) \\\n\t",
    "joiners": f"{FAMILY} {FAMILY} {FAMILY} {FAMILY} {FAMILY}",
    "emoji": f"🎉🥳🎂 Happy birthday! 🎉🥳🎂\n{THUMB}{FLAG}{WOMAN} {THUMB}{FLAG}{WOMAN} {THUMB}{FLAG}{WOMAN}",
    "chinese": "北京是中国的首都。上海是中国的",
    "japanese_korean": "日本の首都は東京です。韓国の首都は 서울입니다. 안녕하세요",
    "arabic": "عاصمة مصر هي القاهرة وعاصمة فرنسا هي",
    "hebrew": "בירת ישראל היא ירושלים. בירת צרפת היא",
    "accents": "Élève à l'école: où est passé le garçon? São Paulo, Ångström, naïve, Zażółć gęślą",
    "combining": "e\u0301 a\u0308 o\u0302 n\u0303 e\u0301 a\u0308 o\u0302 n\u0303 e\u0301 a\u0308",
    "numbers": "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    "leading_spaces": "   Once upon a time there was a",
    "trailing_spaces": "Name:   Alice   \nAge:   ",
    "newlines": "\n\n\nChapter 1\n\n\n",
    "tabs_and_returns": "a\tb\tc\r\n1\t2\t3\r\n4\t",
    "odd_characters": "zero\u200bwidth, no\u00a0break, \ufeffmark, \ufffd\ufffd, bell\x07, ½ ≠ ∞ 𝕬𝖇 ﷽",
    "special_inside": "<|endoftext|>A file<file_sep><filename>main.py\nimport",
    "chat_short": _chat("What is 2+2? Answer with only the number."),
    "chat_poem": _chat("Write a haiku about the sea 🌊, then translate it to Spanish."),
    "long": "".join(_cats()),
}

GLASSLLM = {
    "rabbit": "Alice was beginning to get very tired of sitting by her sister on the bank,",
    "one_token": "The",
    "one_letter": "Q",
    "queen": "“Off with her head!” the Queen shouted",
    "hatter": "The Hatter opened his eyes very wide on hearing this; but all he said was,",
    "bruno": "“I want to go home,” said Bruno. “It’s so very dark,",
    "professor": "The Professor looked at Sylvie, and",
    "poem": "’Twas brillig, and the slithy toves\n  Did gyre and gimble in the wabe:\n",
    "capitals": "ALICE'S ADVENTURES IN WONDERLAND",
    "numbers": "In 1865 there were 24 cats, 7 kings and 3,000 cards:",
    "leading_spaces": "   she went on, and",
    "trailing_space": "“Why,” said the Gryphon, “you ",
    "newlines": "\n\nCHAPTER IV.\n\n",
    "newline": "\n",
    "spaces": "     ",
    "accents": "Où est ma chatte? Æneas said, naïve e\u0301te\u0301",
    "unknown": "日本 🎉 and the 👍🏽 King",
    "punctuation": "--- [*_{(!?;:&)}_*] ---",
    "code": "if x == y:\n    print(x)\n",
    "no_spaces": "andthentheylookedatoneanotherinsilence",
    "dash": "Down, down, down—would the fall never",
    "repeated": "very very very very very very very very",
    "medium": "Tweedledum and Tweedledee\n  Agreed to have a battle;\n"
    "For Tweedledum said Tweedledee\n  Had spoiled his nice new rattle.\n",
    "context_full": "So she was considering in her own mind (as well as she could, for the hot day made her feel "
    "very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting "
    "up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her. There was nothing "
    "so very remarkable in that;",
}
