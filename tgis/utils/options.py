"""The machinery below `tgis.config`: kinds of values, options as dataclass fields, flags, variables.

Knows no single option. Every value is read from text, wherever it came from, and every fault is one
OptionError that names the flag or variable, the value and the bound.
"""

import argparse
import dataclasses
import functools
import ipaddress
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

from tgis.errors import OptionError

T = TypeVar("T")
D = TypeVar("D")

NOT_YET = "is not supported yet"
HELP_INDENT, HELP_WIDTH = 6, 73  # of a line of help
_OPTION = "option"  # key of a field's metadata


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How text becomes a value; `read` raises ValueError with what to say after the value."""

    metavar: str
    read: Callable[[str], T]
    bare: str | None = None  # what a flag without a value means

    def __call__(self, text: str) -> T:
        """As the `type` of an argument of argparse."""
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} {error}") from None


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: a flag and the environment variable of the same name."""

    kind: Kind[Any]
    name: str = ""  # as a field: lower case with underscores
    group: str = ""
    about: str = ""
    aliases: tuple[str, ...] = ()  # other names of the same thing; all that are given must agree
    short: str | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)  # old values that still work
    shown: str | None = None  # the default, as the help says it
    required: bool = False
    computed: Callable[[Mapping[str, str]], object] | None = None  # the default, from the environment

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, the best first."""
        return (self.name, *self.aliases)


def required(group: str, kind: Kind[T], about: str) -> T:
    """A field without which nothing works."""
    row = Option(kind, group=group, about=about, required=True)
    return cast("T", dataclasses.field(metadata={_OPTION: row}))


def option(
    group: str,
    kind: Kind[T],
    about: str,
    default: D,
    *,
    aliases: tuple[str, ...] = (),
    short: str | None = None,
    renamed: Mapping[str, str] | None = None,
    shown: str | None = None,
) -> T | D:
    """A field with a default; `shown` replaces the default in the help."""
    row = Option(
        kind,
        group=group,
        about=about,
        aliases=aliases,
        short=short,
        renamed=renamed or {},
        shown=shown or _show(default),
    )
    return dataclasses.field(default=default, metadata={_OPTION: row})


def computed(group: str, kind: Kind[T], about: str, default: Callable[[Mapping[str, str]], T], *, shown: str) -> T:
    """A field whose default depends on the machine and on the environment given to `default`."""
    row = Option(kind, group=group, about=about, shown=shown, computed=default)
    return dataclasses.field(default_factory=lambda: default({}), metadata={_OPTION: row})


def _show(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def options_of(table: type) -> tuple[Option, ...]:
    """The options that are fields of dataclass `table`, in its order."""
    rows = [(field.name, field.metadata.get(_OPTION)) for field in dataclasses.fields(table)]
    return tuple(dataclasses.replace(row, name=name) for name, row in rows if row is not None)


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
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError("must be an IP address") from None


TEXT = Kind("TEXT", _text)
PATH = Kind("PATH", lambda text: Path(_text(text)))
DIRECTORY = Kind("PATH", _directory)
ADDRESS = Kind("IP", _address)
BOOLEAN = Kind("BOOL", _boolean, bare="true")


def integer(low: int, high: int = 2**31 - 1) -> Kind[int]:
    """A whole number from `low` to `high`, both included."""

    def read(text: str) -> int:
        try:
            value = int(text) if text.isascii() and "_" not in text else None
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return Kind("N", read)


def decimal(low: float, high: float, *, above: bool = False) -> Kind[float]:
    """A finite number from `low` to `high`, both included; with `above`, `low` itself is out."""

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
            bounds = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise ValueError(f"must be a number {bounds}")
        return value

    return Kind("X", read)


def choice(*values: str, not_yet: tuple[str, ...] = ()) -> Kind[str]:
    """One of `values`; those of `not_yet` are known and refused."""

    def read(text: str) -> str:
        if text in not_yet:
            raise ValueError(NOT_YET)
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return text

    return Kind("NAME", read)


def not_yet(kind: Kind[T], *neutral: T) -> Kind[T]:
    """A known option whose part does not exist: only the values that ask for nothing are taken."""

    def read(text: str) -> T:
        value = kind.read(text)
        if value not in neutral:
            raise ValueError(NOT_YET)
        return value

    return dataclasses.replace(kind, read=read)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are OptionError."""

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        raise OptionError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as somebody gave it; `source` is the flag or the variable."""

    source: str
    text: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"{self.source}={text!r}"


def parser_of(
    options: tuple[Option, ...], hidden: tuple[Option, ...], prog: str, description: str, epilog: str
) -> Parser:
    """A parser with a flag for every name of every option; aliases and `hidden` ones are not in the help."""
    needed = [f"{flag(row.name)} {row.kind.metavar}" for row in options if row.required]
    parser = Parser(
        prog=prog,
        usage=" ".join([prog, *needed, "[options]"]),
        description=description,
        epilog=epilog,
        formatter_class=functools.partial(argparse.RawTextHelpFormatter, max_help_position=HELP_INDENT),
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(name) for name in dict.fromkeys(row.group for row in options)}
    for row in options:
        _add_flag(groups[row.group], row, row.name, _help(row))
        for alias in row.aliases:
            _add_flag(parser, row, alias, argparse.SUPPRESS)
    for row in hidden:
        for name in row.names:
            _add_flag(parser, row, name, argparse.SUPPRESS)
    return parser


def _add_flag(target: argparse._ActionsContainer, row: Option, name: str, text: str) -> None:
    names = [row.short] if row.short and name == row.name else []
    target.add_argument(
        *names,
        flag(name),
        dest=name,
        metavar=row.kind.metavar,
        nargs="?" if row.kind.bare else None,
        const=row.kind.bare,
        default=argparse.SUPPRESS,
        help=text,
    )


def _help(row: Option) -> str:
    variables = ", ".join(name.upper() for name in row.names)
    default = "required" if row.required else f"default: {row.shown}"
    facts = _joined(f"[env: {variables}]", f"[{default}]")
    return _joined(row.about, facts).replace("%", "%%")


def _joined(first: str, second: str) -> str:
    """On one line where they fit."""
    return f"{first}{' ' if len(first) + len(second) < HELP_WIDTH else chr(10)}{second}"


def flag(name: str) -> str:
    """`max_batch_size` as `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def given(row: Option, flags: Mapping[str, str], environ: Mapping[str, str]) -> list[Given]:
    """Where the option was set: by flags, else by variables that are not blank."""
    by_flag = [Given(flag(name), flags[name].strip()) for name in row.names if name in flags]
    variables = [Given(name.upper(), environ.get(name.upper(), "").strip()) for name in row.names]
    return by_flag or [variable for variable in variables if variable.text]


def read(row: Option, givens: list[Given]) -> Any:
    """The one value that all of `givens` (at least one) say."""
    values = [_read_one(row, given) for given in givens]
    for given, value in zip(givens, values, strict=True):
        if value != values[0]:
            raise OptionError(f"{givens[0]} and {given} must be the same")
    return values[0]


def _read_one(row: Option, given: Given) -> Any:
    if not given.text:
        raise OptionError(f"{given} must not be empty")
    try:
        return row.kind.read(row.renamed.get(given.text, given.text))
    except ValueError as error:
        raise OptionError(f"{given} {error}") from None
