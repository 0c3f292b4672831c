"""Marks of formats in grammars: one that is a special token is matched as such, others as text."""

import json
import re
from collections.abc import Callable, Iterator

from tgis.api.openai.reasoning import ReasoningFormat, thought_state

_POSSIBLE_TOKEN = re.compile(r"(</?[|｜]?[\w▁]+[|｜]?>|\[/?[A-Z_]+\])")


class GrammarMarks:
    """Writes marks in Lark."""

    def __init__(self, special_token_id: Callable[[str], int | None]) -> None:
        self._special_token_id = special_token_id

    def lark(self, text: str) -> str:
        """A text of a format."""
        parts = ((part, self._special_token_id(part)) for part in _POSSIBLE_TOKEN.split(text) if part)
        return " ".join(json.dumps(part) if id_ is None else f"<[{id_}]>" for part, id_ in parts)

    def until(self, name: str, mark: str, *others: str, any_text: str = "/(?s:.*)/") -> Iterator[str]:
        """Two rules: a terminal of text without these marks, with the name in capitals, and the text with the mark."""
        marks = "|".join(re.escape(other.strip()).replace("/", r"\/") for other in (mark, *others) if other)
        yield f"{name.upper()}: {any_text} & ~/(?s:.*)({marks})(?s:.*)/"
        end, lazy = self.lark(mark), "[lazy]"
        if "<[" in end:  # such a rule must not be lazy, so the text takes all white space before the special token
            end, lazy = self.lark(mark.lstrip()), ""
        yield f"{name}_and_mark{lazy}: {name.upper()} {end}"

    def after_thought(self, form: ReasoningFormat, prompt: str, *, marks_answer: bool) -> str:
        """Rules that have a thought before the rule `answer`; empty if the prompt has the answer begin at once."""
        if (state := thought_state(form, prompt)) is False:
            return ""
        thought = f"thought_and_mark {self.lark(form.next_message)} GAP?"
        start = thought if state else f"({self.lark(form.begin)} {thought})?"
        answer = f"{self.lark(form.answer) if marks_answer else ''} answer"
        return "\n".join([*self.until("thought", form.end), r"GAP: /\s{1,4}/", f"start: {start} {answer}"])
