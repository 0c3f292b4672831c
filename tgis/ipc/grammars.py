"""Messages and values about grammars: what the output of a request must be, and the tokens that it is made of."""

import enum

import msgspec

FIRST_TOOL_LINE = 2  # in a grammar of tools: where that of tools[0] is


class GrammarKind(enum.StrEnum):
    """How a grammar is given; also the name of the parameter."""

    JSON_OBJECT = "json_object"  # any; without a text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"  # EBNF or Lark
    TOOLS = "tools"  # Lark that an API has made, with the schema of each tool in a line of its own


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A grammar as the client gives it."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)


class GrammarLimits(msgspec.Struct, frozen=True):
    """What a grammar may cost."""

    max_depth: int = 64  # of nested schemas or brackets
    max_repetitions: int = 10_000  # the largest count of anything repeated
    max_states: int = 20_000  # of one compiled grammar, about 2 KiB each
    cache_size: int = 64  # compiled grammars


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The second message to the engine process: the bytes that each token adds to an output; empty for special ones."""

    tokens: list[bytes]  # by id; none where structured output is not supported
    first_tokens: dict[int, bytes] = {}  # of those that add other bytes at the beginning of an output


class CompileGrammar(msgspec.Struct, frozen=True, tag="compile_grammar"):
    """Compile a grammar, and keep it until the lookup is cancelled."""

    lookup_id: int  # from the same sequence as request ids
    spec: GrammarSpec


class GrammarCompiled(msgspec.Struct, frozen=True, tag="grammar_compiled"):
    """The answer: the grammar can be used, or what is wrong with it."""

    lookup_id: int
    problem: str = ""
