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
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, NoReturn, TypeAlias, TypeVar

import msgspec

from tgis import __version__
from tgis.errors import OptionError

T = TypeVar("T")
D = TypeVar("D")
Words: TypeAlias = str | list[str] | None  # what follows a flag

_METADATA_KEY = "option"
_MISSPELT = 0.84  # similarity of a variable to the option that is probably meant
# Containers set HOSTNAME, and CONFIG is too common a name.
_FLAGS_ONLY = ("hostname", "config")


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
    name: str = ""
    group: str = ""
    help_text: str = ""
    aliases: tuple[str, ...] = ()
    # Names in vLLM: further aliases under `python -m vllm_tgis_adapter`, unknown elsewhere.
    vllm_names: tuple[str, ...] = ()
    short: str | None = None
    # Values of TGIS that do not exist here, and the value that replaces each with a warning.
    nearest_values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shown_default: str | None = None
    required: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Lower case with underscores; the preferred one first. Names that are set must agree."""
        return (self.name, *self.aliases)

    @property
    def variables(self) -> tuple[str, ...]:
        """The names that are environment variables."""
        return tuple(name.upper() for name in self.names if name not in _FLAGS_ONLY and not name.startswith("no_"))


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


def _parser(kind: Callable[[str], T], accepts: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """A parser of what msgspec converts to `kind`, for values that are accepted."""

    def parse(text: str) -> T:
        with suppress(msgspec.ValidationError):
            value: T = msgspec.convert(text, kind, strict=False, dec_hook=lambda other_type, obj: other_type(obj))
            if accepts(value):
                return value
        raise ValueError(f"must be {expected}")

    return parse


_text = _parser(str, str.isprintable, "printable text")


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address("127.0.0.1" if text == "localhost" else text))
    except ValueError:
        raise ValueError("must be an IP address or localhost") from None


class _NamedPath(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    path: Annotated[str, msgspec.Meta(min_length=1)]


def _named_paths(text: str) -> dict[str, str]:
    rest, entries = _text(" ".join(text.split())), []
    try:
        while rest := rest.strip(" ,"):
            if rest[0] in "[{":
                value, end = json.JSONDecoder().raw_decode(rest)
                entries += value if isinstance(value, list) else [value]
                rest = rest[end:]
            else:
                word, rest = re.split("[ ,]|$", rest, maxsplit=1)
                name, equals, path = word.partition("=")
                entries.append({"name": name, "path": path} if equals else {"name": word.split("@")[0], "path": word})
        named = msgspec.convert(entries, list[_NamedPath])
    except (ValueError, RecursionError):
        raise ValueError("must be name=path ..., names in the Hub cache or JSON objects with name and path") from None
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
NAMED_PATHS = ValueType("NAME=PATH", _named_paths, many=True)  # vLLM and TGI take LoRA adapters so
ANY = ValueType("TEXT", _text, bare_value="true", many=True)  # a flag with or without values
MODEL_OR_NONE = ValueType("TEXT", lambda text: None if text.lower() in ("false", "0", "none") else _text(text))
PATH = ValueType("PATH", lambda text: Path(_text(text)))
ADDRESS = ValueType("IP", _address)
_is_endpoint = re.compile(r"(https?://)?(\[[\da-fA-F:.]+\]|[^\s/:@\[\]]+):\d{1,5}(/\S*)?").fullmatch
ENDPOINT = ValueType(
    "URL", _parser(str, lambda text: _is_endpoint(text) is not None, "HOST:PORT, or that after http:// or https://")
)
BOOLEAN = ValueType("BOOL", _parser(bool, lambda _value: True, "true or false"), bare_value="true")


def integer(low: int, high: int = 2**31 - 1) -> ValueType[int]:
    """An integer from `low` to `high`, inclusive."""
    return ValueType("N", _parser(int, lambda value: low <= value <= high, f"a whole number from {low} to {high}"))


def decimal(low: float, high: float, *, exclude_low: bool = False) -> ValueType[float]:
    """A finite number from `low` to `high`, inclusive; `exclude_low` excludes `low` itself."""
    bounds = f"above {low:g}, at most {high:g}" if exclude_low else f"from {low:g} to {high:g}"
    lowest = math.nextafter(low, high) if exclude_low else low
    return ValueType("X", _parser(float, lambda value: lowest <= value <= high, f"a number {bounds}"))


def with_unit(value_type: ValueType[T]) -> ValueType[T]:
    """A type that also takes 4k and 4K, as vLLM does: thousands, and multiples of 1024."""

    def parse(text: str) -> T:
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text, re.ASCII):
            text = str(int(Fraction(found[1]) * {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[found[2]]))
        return value_type.parse(text)

    return dataclasses.replace(value_type, parse=parse)


def choice(*values: str, aliases: Mapping[str, str] | None = None) -> ValueType[str]:
    """One of `values`, or another name of one."""
    parse = _parser(str, values.__contains__, f"one of {', '.join(values)}")
    return ValueType("NAME", lambda text: parse((aliases or {}).get(text, text)))


def closest(name: str, names: Collection[str], similarity: float = 0.7) -> str | None:
    """The one of `names` that is most like `name`, if any is: what a misspelt name was meant to be."""
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=similarity)), None)


def near_misses(unknown: Iterable[str], options: Iterable[Option]) -> list[str]:
    """Variables that are probably misspelt options. OMP_NUM_THREADS and its like are options of others."""
    ours = [name for opt in options for name in opt.variables]
    meant = {name: closest(name, ours, _MISSPELT) for name in unknown}
    return [
        f"{name} is no option: did you mean {option}?"
        for name, option in meant.items()
        if option is not None and not name.endswith(f"_{option}")
    ]


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are OptionErrors."""

    renamed_flags: Mapping[str, str] = MappingProxyType({})

    def error(self, message: str) -> NoReturn:
        """Raise one line instead of printing the usage."""
        raise OptionError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        """Name the right flag for the first that is unknown."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0].replace("_", "-")
            if flag in self.renamed_flags:
                self.error(f"unrecognized flag {flag}: here it is {self.renamed_flags[flag]}")
            meant = closest(flag, re.findall(r"--[a-z0-9-]+", self.format_help()))
            suggestion = f", did you mean {meant}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return parsed


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value as text; `source` is the flag or variable that set it."""

    source: str
    text: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"{self.source}={text!r}"


def make_parser(prog: str, options: Sequence[Option], renamed_flags: Mapping[str, str]) -> Parser:
    """The parser of a server's flags; the help shows the preferred names of options that have a group.

    `renamed_flags` are those of other servers, by the name there.
    """
    parser = Parser(
        prog=prog,
        usage=f"{prog} MODEL [options]",
        description="Serve a model over gRPC. A flag overrides the environment variable of its name.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=6),
        allow_abbrev=False,
    )
    parser.renamed_flags = renamed_flags
    help_text = "show every option and what would be refused; start nothing"
    parser.add_argument("--check", action="store_true", help=help_text)
    parser.add_argument("-V", "--version", action="version", version=f"tgis {__version__}")
    groups = {opt.group: parser.add_argument_group(opt.group) for opt in options if opt.group}
    for opt in options:
        for name in opt.names:
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
    return parser


def _help(opt: Option) -> str:
    variables = ", ".join(opt.variables)
    default = "required" if opt.required else f"default: {opt.shown_default}"
    return f"{opt.help_text} [env: {variables}] [{default}]"


def flag_name(name: str) -> str:
    """`max_batch_size` as `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def is_negation(name: str) -> bool:
    """A name that means the opposite: `--no-enable-x`, `DISABLE_X`."""
    return re.match("(--)?(no[-_]|disable)", name.lower()) is not None


def find_raw_values(opt: Option, flags: Mapping[str, Words], environ: Mapping[str, str]) -> list[RawValue]:
    """The values given by flags, else those given by variables that are not blank."""
    by_flag = [RawValue(flag_name(name), _joined(flags[name], opt)) for name in opt.names if name in flags]
    variables = [RawValue(name, environ.get(name, "").strip()) for name in opt.variables]
    return by_flag or [variable for variable in variables if variable.text]


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
    return not value if is_negation(raw.source) else value
