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

NOT_SUPPORTED = "is not supported yet"
HELP_INDENT, HELP_WIDTH = 6, 73  # of a line of help
_METADATA_KEY = "option"  # key of a field's metadata


@dataclass(frozen=True, slots=True)
class ValueType(Generic[T]):
    """How text becomes a value; `read` raises ValueError with what to say after the value."""

    metavar: str
    parse: Callable[[str], T]
    bare_value: str | None = None  # what a flag without a value means

    def __call__(self, text: str) -> T:
        """As the `type` of an argument of argparse."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} {error}") from None


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table: a flag and the environment variable of the same name."""

    value_type: ValueType[Any]
    name: str = ""  # as a field: lower case with underscores
    group: str = ""
    help_text: str = ""
    aliases: tuple[str, ...] = ()  # other names of the same thing; all that are given must agree
    short: str | None = None
    old_values: Mapping[str, str] = dataclasses.field(default_factory=dict)  # old values that still work
    shown_default: str | None = None  # the default, as the help says it
    required: bool = False
    default_factory: Callable[[Mapping[str, str]], object] | None = None  # the default, from the environment

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, the best first."""
        return (self.name, *self.aliases)


def required_option(group: str, value_type: ValueType[T], help_text: str) -> T:
    """A field without which nothing works."""
    row = Option(value_type, group=group, help_text=help_text, required=True)
    return cast("T", dataclasses.field(metadata={_METADATA_KEY: row}))


def option(
    group: str,
    value_type: ValueType[T],
    help_text: str,
    default: D,
    *,
    aliases: tuple[str, ...] = (),
    short: str | None = None,
    old_values: Mapping[str, str] | None = None,
    shown_default: str | None = None,
) -> T | D:
    """A field with a default; `shown` replaces the default in the help."""
    row = Option(
        value_type,
        group=group,
        help_text=help_text,
        aliases=aliases,
        short=short,
        old_values=old_values or {},
        shown_default=shown_default or _format_default(default),
    )
    return dataclasses.field(default=default, metadata={_METADATA_KEY: row})


def computed_option(
    group: str,
    value_type: ValueType[T],
    help_text: str,
    default_factory: Callable[[Mapping[str, str]], T],
    *,
    shown_default: str,
) -> T:
    """A field whose default depends on the machine and on the environment given to `default`."""
    row = Option(
        value_type, group=group, help_text=help_text, shown_default=shown_default, default_factory=default_factory
    )
    return dataclasses.field(default_factory=lambda: default_factory({}), metadata={_METADATA_KEY: row})


def _format_default(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if default is None or isinstance(default, bool) else str(default)


def declared_options(table: type) -> tuple[Option, ...]:
    """The options that are fields of dataclass `table`, in its order."""
    rows = [(field.name, field.metadata.get(_METADATA_KEY)) for field in dataclasses.fields(table)]
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


TEXT = ValueType("TEXT", _text)
PATH = ValueType("PATH", lambda text: Path(_text(text)))
DIRECTORY = ValueType("PATH", _directory)
ADDRESS = ValueType("IP", _address)
BOOLEAN = ValueType("BOOL", _boolean, bare_value="true")


def integer(low: int, high: int = 2**31 - 1) -> ValueType[int]:
    """A whole number from `low` to `high`, both included."""

    def read(text: str) -> int:
        try:
            value = int(text) if text.isascii() and "_" not in text else None
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return ValueType("N", read)


def decimal(low: float, high: float, *, exclude_low: bool = False) -> ValueType[float]:
    """A finite number from `low` to `high`, both included; with `above`, `low` itself is out."""

    def read(text: str) -> float:
        try:
            value = float(text) if text.isascii() and "_" not in text else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high or (exclude_low and value == low):
            bounds = f"above {low:g}, at most {high:g}" if exclude_low else f"from {low:g} to {high:g}"
            raise ValueError(f"must be a number {bounds}")
        return value

    return ValueType("X", read)


def choice(*values: str, unsupported: tuple[str, ...] = ()) -> ValueType[str]:
    """One of `values`; those of `not_yet` are known and refused."""

    def read(text: str) -> str:
        if text in unsupported:
            raise ValueError(NOT_SUPPORTED)
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return text

    return ValueType("NAME", read)


def unsupported(value_type: ValueType[T], *neutral: T) -> ValueType[T]:
    """A known option whose part does not exist: only the values that ask for nothing are taken."""

    def read(text: str) -> T:
        value = value_type.parse(text)
        if value not in neutral:
            raise ValueError(NOT_SUPPORTED)
        return value

    return dataclasses.replace(value_type, parse=read)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are OptionError."""

    def error(self, message: str) -> NoReturn:
        """One line instead of the usage."""
        raise OptionError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True, slots=True)
class RawValue:
    """A value as somebody gave it; `source` is the flag or the variable."""

    source: str
    text: str

    def __str__(self) -> str:
        text = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return f"{self.source}={text!r}"


def build_parser(
    options: tuple[Option, ...], hidden: tuple[Option, ...], prog: str, description: str, epilog: str
) -> Parser:
    """A parser with a flag for every name of every option; aliases and `hidden` ones are not in the help."""
    needed = [f"{flag_name(row.name)} {row.value_type.metavar}" for row in options if row.required]
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
        flag_name(name),
        dest=name,
        metavar=row.value_type.metavar,
        nargs="?" if row.value_type.bare_value else None,
        const=row.value_type.bare_value,
        default=argparse.SUPPRESS,
        help=text,
    )


def _help(row: Option) -> str:
    variables = ", ".join(name.upper() for name in row.names)
    default = "required" if row.required else f"default: {row.shown_default}"
    facts = _join(f"[env: {variables}]", f"[{default}]")
    return _join(row.help_text, facts).replace("%", "%%")


def _join(first: str, second: str) -> str:
    """On one line where they fit."""
    return f"{first}{' ' if len(first) + len(second) < HELP_WIDTH else chr(10)}{second}"


def flag_name(name: str) -> str:
    """`max_batch_size` as `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def find_raw_values(row: Option, flags: Mapping[str, str], environ: Mapping[str, str]) -> list[RawValue]:
    """Where the option was set: by flags, else by variables that are not blank."""
    by_flag = [RawValue(flag_name(name), flags[name].strip()) for name in row.names if name in flags]
    variables = [RawValue(name.upper(), environ.get(name.upper(), "").strip()) for name in row.names]
    return by_flag or [variable for variable in variables if variable.text]


def parse_option(row: Option, raw_values: list[RawValue]) -> Any:
    """The one value that all of `givens` (at least one) say."""
    values = [_parse_raw_value(row, given) for given in raw_values]
    for given, value in zip(raw_values, values, strict=True):
        if value != values[0]:
            raise OptionError(f"{raw_values[0]} and {given} must be the same")
    return values[0]


def _parse_raw_value(row: Option, given: RawValue) -> Any:
    if not given.text:
        raise OptionError(f"{given} must not be empty")
    try:
        return row.value_type.parse(row.old_values.get(given.text, given.text))
    except ValueError as error:
        raise OptionError(f"{given} {error}") from None
