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

# Latin script to N'Ko; most are lines of the package's own test data.
DETRANSLITERATOR = {
    "name": "musa dunbuya",
    "greeting": "i ni ce",
    "empty": "",
    "space": " ",
    "one_letter": "a",
    "capitals": "MUSA Dunbuya, I NI SƆGƆMA",
    "english": "The quick brown fox jumps over the lazy dog",
    "digits": "1960 san, 22 sɛtanburu kalo",
    "unknown": "日本 🎉 ß {x} @home",
    "quotes": "“ayi,” a kan, ‹ n tɛ taa ›",
    "newlines": "musa\n\ndunbuya\n",
    "spaces": "   i   ni   ce   ",
    "repeated": "la la la la la la la la la la",
    "no_spaces": "mandenkakanmandenkakanmandenkakan",
    "special_inside": "musa </s> <pad> dunbuya <src_eos>",
    "tones": "à fɔ́ kó àle lé màhìnàla dí, ņ bádá l’à mà, ņ dòn bádá ņ sɛ̀nbɛ́ à lá",
    "tones_short": "ò da gasontɔ́ àlú mà lè.",
    "tones_question": "à n’ibùràhimá, ò mɛn kà dafali kɛ́؟.",
    "tones_long": "sila yé lɔ̀ lá mɔ̀gɔ̀ lú lé mà mɛn nù yé mɔ᷅gɔ᷅ lú tɔ̀ɲɛ̀gɛ̀ lá , à n’àlù yé jànda kɛ́ lá dùgùkolo kàn "
    "tùɲa tànà lá, jàgànkàtà diminnɛn y’ò lú lè yé.",
    "verse_1": "1. ala tɔgɔ la, mahinala le hinala le.",
    "verse_2": "2. tando ala ye , jagaba lu magari le.",
    "verse_5": "5. an ɲ’ile le bato la , an ɲ’ile le matara la.",
    "verse_8": "8. alu kaliyamɛnɛntɔ ye kililila magɛn kan, banbaa lu y’a fɔ kan ko bi ye lon gɛlɛn di koi.",
    "verse_32": "32. ba an se d’o la, ņba sebaga ɲima lu le ( ņnu di ).",
    "verse_42": "8. o kɔ a k a madon , ka ban k a fanmajii.",
    "verse_69": "69. mɛn nu konin kɛnɛn laņnayabaa di ka ɲima lu kɛ , hinaņte di kaninmaya kɛ o lu tɛ.",
    "verse_82": "82. lugutu fana ( ce da ), a k a fɔ a mirindi ye tuma mɛn ko alu , alu ye na la koronɲa le di nin , "
    "mɔgɔ si ma kɔgɔn alu ɲɛ nin ma jagaba lu dɔ.",
    "verse_91": "91. san di fansan ka kɛ da lu di.",
    "verse_321": "321. ferawun kan o dɔ ko alu bada l’a la le ba k a tɛdɛ ņ ma diɲɛ alu ye؟، jaga alu na gananɲa ɲin "
    "ne dɔsada la dugu kɔnɔ , s’alu di dugu donko lu labɔ a kɔnɔ ( subagaya la )، konin alu di n a lɔn sɛn.",
    "verse_401": "401. a fɔ ko hɛn alu mɔɔ lu , n’alu kɛ da filanfilan dɔ ņ na namun nin dɔ , ņne tɛn alu ta bato fen "
    "nu bato la k ala to feu، ņ konin ye ala le bato la o mɛn y’alu somayɛlɛman na، ņ don lɔnɛn ne ko ņ ɲe kɛ "
    "laņnayabaa lu do di.",
}

TITLES = {
    "empty": "",
    "space": " ",
    "one_word": "Refactor",
    "one_letter": "x",
    "test": "Fix the failing unit test in the parser module",
    "endpoint": "User asked to add a new endpoint for health checks; assistant edited server.py and added tests.",
    "pytest": "Ran pytest, 3 failed: test_login, test_logout, test_refresh. Edited auth.py. Ran it again: all passed.",
    "reading": "Reading the documentation of the billing service and searching for the invoice template.",
    "rename": "Renamed the class Foo to Bar in all files.",
    "install": "Installed the package with pip and started the server.",
    "commit": 'git commit -m "typo"',
    "migration": "Wrote a migration that adds the column email to the table users.",
    "traceback": "Traceback (most recent call last):\n  File \"main.py\", line 3, in <module>\nKeyError: 'user_id'",
    "diff": "--- a/app.py\n+++ b/app.py\n@@ -1,3 +1,3 @@\n-DEBUG = True\n+DEBUG = False",
    "shell": "$ ls -la /var/log && grep -r ERROR . | head -20",
    "json": '{"tool": "edit", "path": "src/index.ts", "old": "let x", "new": "const x"}',
    "german": "Bitte die Übersetzung der Schaltflächen im Menü korrigieren",
    "french": "Corriger l’erreur d’arrondi dans le calcul de la TVA",
    "accents": "naïve e\u0301te\u0301 São Paulo façade Ångström",
    "chinese": "修复登录页面的错误",
    "emoji": "🎉 Release 2.0 is out 🚀 thanks to everybody 👩🏾‍🚀",
    "unknown": "ߡߎߛߊ߫ ߘߎ߲ߓߎߦߊ ﷽ 𝕬𝖇",
    "special_inside": "Remove </s> and <pad> and <extra_id_0> from the output",
    "spaces": "   fix    the    spaces   ",
    "newlines": "\n\n\nAdd a changelog\n\n\n",
    "capitals": "URGENT: PRODUCTION DATABASE IS DOWN, RESTORE FROM BACKUP",
    "question": "Why does the build take ten minutes since yesterday?",
    "numbers": "Bump version 1.2.3 to 1.3.0, 42 files changed, 1337 insertions(+), 7 deletions(-)",
    "repeated": "retry retry retry retry retry retry retry retry",
    "long": "Summarize what was done: the assistant read the source of the scheduler, noticed that a lock was held "
    "while the network was waited for, wrote a test that shows the deadlock, moved the call out of the locked section, "
    "ran the test a thousand times without a failure, updated the scheduler's documentation, and asked for review. "
    "The user then asked whether the same mistake exists elsewhere; the assistant searched for similar code, found two "
    "places, and changed both in the same way.",
}
