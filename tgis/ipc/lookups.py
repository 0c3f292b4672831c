"""What a call names and the engine process looks up before the call is queued: an adapter, a grammar."""

import enum

import msgspec

MAX_GRAMMAR_DEPTH = 64  # nested JSON schemas
MAX_GRAMMAR_REPETITIONS = 10_000  # counts such as maxLength
FIRST_TOOL_LINE = 2  # line of tools[0] in a grammar of tools


class AdapterRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The adapter of a request: a soft prompt, which replaces the first `length` tokens, or LoRA, of length 0."""

    id: str  # name in the call
    length: int  # virtual tokens
    decoder_length: int  # how many of these go before the output of an encoder-decoder
    lookup_id: int  # lookup that found the adapter
    version: int  # a digest of its files: cached prefixes are valid for one version only
    rank: int = 0  # highest LoRA rank of any layer


class AdapterStoreOptions(msgspec.Struct, frozen=True):
    """Where soft prompts and LoRA adapters are, and how much memory they may take."""

    path: str | None  # directory; None: only LoRA modules
    cache_bytes: int
    max_soft_prompt_length: int  # virtual tokens
    lora_modules: dict[str, str] = {}  # directories of adapters that are not in the store, by id


class AdapterProblem(enum.StrEnum):
    """Why an adapter cannot be used."""

    BAD_ID = "bad_id"
    NOT_FOUND = "not_found"
    UNSUPPORTED = "unsupported"  # an adapter of another type, which is then the reason
    BROKEN = "broken"


class GrammarKind(enum.StrEnum):
    """How a grammar is given; also the name of the parameter."""

    JSON_OBJECT = "json_object"  # any; without a text
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"  # EBNF or Lark
    TOOLS = "tools"  # Lark that an API has made, with the schema of each tool in a line of its own


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A grammar as the client gives it."""

    kind: GrammarKind
    text: str = ""
    choices: tuple[str, ...] = ()
    exact: bool = True  # else JSON schemas are enforced as far as possible, and oneOf means anyOf
    inexact_lines: tuple[int, ...] = ()  # lines of a TOOLS grammar whose schema is not exact
    rough: bool = False  # schemas that are not exact without the keywords that describe texts and numbers
    after_thought: str = ""  # Lark with the rule `start`, which has a thought before `answer`, this grammar
    lark: str = ""  # the grammar as it is compiled; empty: the engine process converts it

    @property
    def is_exact(self) -> bool:
        """Whether every schema is enforced whole or refused."""
        return self.exact and not self.inexact_lines

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The second message to the engine process: the bytes that each token adds to an output; empty for special ones."""

    tokens: list[bytes]  # bytes by token id; empty without structured output
    first_tokens: dict[int, bytes] = {}  # tokens that add other bytes at the beginning of an output


class Acquire(msgspec.Struct, frozen=True, tag="acquire"):
    """Load an adapter or compile a grammar, and keep it until the lookup is cancelled."""

    lookup_id: int  # number of the same sequence as request ids
    target: str | GrammarSpec  # id of an adapter, or a grammar


class Acquired(msgspec.Struct, frozen=True, tag="acquired"):
    """The answer: what was named can be used, or why it cannot."""

    lookup_id: int
    reason: str = ""  # why it cannot be used; empty: it can
    problem: AdapterProblem | None = None  # the kind of reason, of an adapter
    adapter: AdapterRef | None = None  # None for a grammar
    loaded: bool = False  # files of the adapter were read for it
