"""Options as dataclass fields, set by flags or environment variables; `tgis.config` declares them.

Every value is parsed from text, wherever it comes from. Each error is an OptionError that names the flag or variable,
the value and the bound.
"""

import argparse
import dataclasses
import difflib
import functools
import ipaddress
import json
import os
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec

from tgis.errors import OptionError

T = TypeVar("T")
D = TypeVar("D")
Words: TypeAlias = str | list[str] | None  # what follows a flag

_METADATA_KEY = "option"  # in the metadata of a field


@dataclass(frozen=True, slots=True)
class ValueType(Generic[T]):
    """How text becomes a value; `parse` raises ValueError with the text that follows the value in the error."""

    metavar: str
    parse: Callable[[str], T]
    bare_value: str | None = None  # the value of a flag given without one
    many: bool = False  # a flag takes several words

    def __call__(self, text: str) -> T:
        """Parse as argparse's `type`: errors are ArgumentTypeErrors."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} {error}") from None


@dataclass(frozen=True, slots=True)
class Option:
    """A flag and the environment variable of the same name."""

    value_type: ValueType[Any]
    name: str = ""  # of the field: lower case with underscores
    group: str = ""
    help_text: str = ""
    aliases: tuple[str, ...] = ()  # other flags and variables for it; those that are set must agree
    vllm_names: tuple[str, ...] = ()  # other flags for it, which are no variables; no_* and disable_* negate it
    short: str | None = None
    nearest_values: Mapping[str, str] = dataclasses.field(default_factory=dict)  # for values of TGIS
    shown_default: str | None = None  # the default, as shown in the help
    required: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of variables, and of flags; the preferred one first."""
        return (self.name, *self.aliases) if self.name else self.aliases

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of flags."""
        return (*self.names, *self.vllm_names)


def option(group: str, value_type: ValueType[T], help_text: str, default: D | Callable[[], T], **more: Any) -> T | D:
    """A field with a default, which the help shows unless `more` has `shown_default`, or a function that returns it.

    `more` are further fields of its Option.
    """
    shown = {"shown_default": format_value(default)} | more
    metadata = {_METADATA_KEY: Option(value_type, group=group, help_text=help_text, **shown)}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def format_value(value: object) -> str:
    """Format a value as a user would write it."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def declared_options(table: type) -> tuple[Option, ...]:
    """The options among the fields of dataclass `table`, in order."""
    opts = [(field.name, field.metadata.get(_METADATA_KEY)) for field in dataclasses.fields(table)]
    return tuple(dataclasses.replace(opt, name=name) for name, opt in opts if opt is not None)


def _text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError("must be true or false")
    return values[text.lower()]


def _directory(text: str) -> Path:
    if not os.path.isdir(_text(text)):
        raise ValueError("is not a directory")
    return Path(text)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address("127.0.0.1" if text == "localhost" else text))
    except ValueError:
        raise ValueError("must be an IP address or localhost") from None


def _endpoint(text: str) -> str:
    url = urlsplit(text if "//" in text else f"//{text}")
    with suppress(ValueError):  # of a port that is no number
        if url.scheme in ("", "http", "https") and url.hostname and url.port:
            return text
    raise ValueError("must be HOST:PORT, or that after http:// or https://")


class _NamedPath(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    path: Annotated[str, msgspec.Meta(min_length=1)]


def _named_paths(text: str) -> dict[str, str]:
    rest, entries = _text(" ".join(text.split())), []
    try:
        while rest := rest.strip():
            if rest[0] in "[{":
                value, end = json.JSONDecoder().raw_decode(rest)
                entries += value if isinstance(value, list) else [value]
                rest = rest[end:]
            else:
                word, _, rest = rest.partition(" ")
                entries.append(dict(zip(("name", "path"), word.split("=", 1), strict=False)))
        named = msgspec.convert(entries, list[_NamedPath])
    except (ValueError, RecursionError):
        raise ValueError("must be name=path ... or JSON objects with a name and a path") from None
    if len({each.name for each in named}) < len(named):
        raise ValueError("has the same name twice")
    return {each.name: each.path for each in named}


@dataclass(frozen=True, slots=True)
class Secret:
    """A text that is shown nowhere."""

    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return "(not shown)"


TEXT = ValueType("TEXT", _text)
SECRET = ValueType("TEXT", Secret)
WORDS = ValueType("WORD", lambda text: tuple(_text(text).replace(",", " ").split()), many=True)
FIRST_WORD = ValueType("NAME", lambda text: _text(text).split()[0], many=True)
NAMED_PATHS = ValueType("NAME=PATH", _named_paths, many=True)  # or JSON, as vLLM takes LoRA modules
ANY = ValueType("TEXT", _text, bare_value="true", many=True)  # a flag with or without values
MODEL_OR_NONE = ValueType("TEXT", lambda text: None if text.lower() in ("false", "0", "none") else _text(text))
PATH = ValueType("PATH", lambda text: Path(_text(text)))
DIRECTORY = ValueType("PATH", _directory)
ADDRESS = ValueType("IP", _address)
ENDPOINT = ValueType("URL", _endpoint)
BOOLEAN = ValueType("BOOL", _boolean, bare_value="true")


def _number(kind: Callable[[str], T], text: str) -> T | None:
    """A number as it is written here: Python also takes other digits, and underscores."""
    with suppress(ValueError):
        return kind(text) if text.isascii() and "_" not in text else None
    return None


def integer(low: int, high: int = 2**31 - 1) -> ValueType[int]:
    """An integer from `low` to `high`, inclusive."""

    def parse(text: str) -> int:
        value = _number(int, text)
        if value is None or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return ValueType("N", parse)


def with_unit(value_type: ValueType[T]) -> ValueType[T]:
    """A type that also takes 4k and 4K, as vLLM does: thousands, and multiples of 1024."""

    def parse(text: str) -> T:
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text, re.ASCII):
            text = str(int(Fraction(found[1]) * {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]]))
        return value_type.parse(text)

    return dataclasses.replace(value_type, parse=parse)


def decimal(low: float, high: float, *, exclude_low: bool = False) -> ValueType[float]:
    """A finite number from `low` to `high`, inclusive; `exclude_low` excludes `low` itself."""

    def parse(text: str) -> float:
        value = _number(float, text)
        if value is None or not low <= value <= high or (exclude_low and value == low):
            bounds = f"above {low:g}, at most {high:g}" if exclude_low else f"from {low:g} to {high:g}"
            raise ValueError(f"must be a number {bounds}")
        return value

    return ValueType("X", parse)


def choice(*values: str, aliases: Mapping[str, str] | None = None) -> ValueType[str]:
    """One of `values`, or another name of one."""

    def parse(text: str) -> str:
        value = (aliases or {}).get(text, text)
        if value not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return value

    return ValueType("NAME", parse)


def closest(name: str, names: Collection[str], similarity: float = 0.6) -> str | None:
    """The one of `names` that is most like `name`, if any is: what a misspelt name was meant to be."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=similarity)), None)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are OptionErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise one line instead of printing the usage."""
        raise OptionError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Suggest a flag for the first that is unknown."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            meant = closest(unknown[0].partition("=")[0], self._option_string_actions)
            suggestion = f", did you mean {meant}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return parsed


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value as text; `source` is the flag or variable that set it."""

    source: str
    text: str
    negated: bool

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"{self.source}={text!r}"


def make_parser(prog: str, options: Sequence[Option], foreign: Sequence[Option]) -> Parser:
    """The parser of a server's flags; `foreign` options are accepted, but have no effect."""
    parser = Parser(
        prog=prog,
        usage=f"{prog} --model-name TEXT [options]",
        description="Serve a model over gRPC. A flag overrides the environment variable of its name.",
        epilog="Options of TGIS and vllm-tgis-adapter that are accepted, but have no effect:\n"
        + _indented(opt.name.upper() for opt in foreign if opt.name)
        + "\nNames of vLLM that are flags, too:\n"
        + _indented(flag_name(name) for opt in options for name in opt.vllm_names),
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=6),
        allow_abbrev=False,
    )
    add_flags(parser, [*options, *foreign])
    help_text = "show every option and what would be refused; start nothing"
    parser.add_argument("--check", action="store_true", help=help_text)
    return parser


def _indented(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(names), 79, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def add_flags(parser: Parser, options: Sequence[Option]) -> None:
    """Add a flag for every name of every option; the help shows the preferred ones of options that have a group."""
    groups = {opt.group: parser.add_argument_group(opt.group) for opt in options if opt.group}
    for opt in options:
        for name in opt.flags:
            shown = bool(opt.group) and name == opt.name
            (groups[opt.group] if shown else parser).add_argument(
                *([opt.short] if opt.short and name == opt.name else []),
                flag_name(name),
                dest=name,
                metavar=opt.value_type.metavar,
                nargs="*" if opt.value_type.many else "?" if opt.value_type.bare_value else None,
                default=argparse.SUPPRESS,
                help=_help(opt) if shown else argparse.SUPPRESS,
            )


def _help(opt: Option) -> str:
    variables = ", ".join(name.upper() for name in opt.names)
    default = "required" if opt.required else f"default: {opt.shown_default}"
    return f"{opt.help_text} [env: {variables}] [{default}]".replace("%", "%%")


def flag_name(name: str) -> str:
    """`max_batch_size` as `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def find_raw_values(opt: Option, flags: Mapping[str, Words], environ: Mapping[str, str]) -> list[RawValue]:
    """The values given by flags, else those given by variables that are not blank."""
    by_flag = [
        RawValue(flag_name(name), _joined(flags[name], opt), _negates(name)) for name in opt.flags if name in flags
    ]
    variables = [RawValue(name.upper(), environ.get(name.upper(), "").strip(), _negates(name)) for name in opt.names]
    return by_flag or [variable for variable in variables if variable.text]


def _negates(name: str) -> bool:
    return name.startswith(("no_", "disable_"))


def _joined(words: Words, opt: Option) -> str:
    """The words after a flag as one text, as a variable would have it."""
    text = words if isinstance(words, str) else " ".join(words or ()) or opt.value_type.bare_value or ""
    return text.strip()


def parse_option(opt: Option, raw_values: list[RawValue]) -> Any:
    """The value that all of `raw_values`, at least one, agree on."""
    values = [_parse_raw_value(opt, raw) for raw in raw_values]
    for raw, value in zip(raw_values, values, strict=True):
        if value != values[0]:
            raise OptionError(f"{raw_values[0]} and {raw} must be the same")
    return values[0]


def _parse_raw_value(opt: Option, raw: RawValue) -> Any:
    if not raw.text:
        raise OptionError(f"{raw} must not be empty")
    try:
        value = opt.value_type.parse(opt.nearest_values.get(raw.text, raw.text))
    except ValueError as error:
        raise OptionError(f"{raw} {error}") from None
    return not value if raw.negated else value
