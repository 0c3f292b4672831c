"""`tgis prompts`: checks a store of soft prompts and LoRA adapters as the server would."""

import json
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tgis.errors import OptionError
from tgis.models.files import find_model
from tgis.utils.logs import escape
from tgis.utils.options import Parser, choice, integer

_COLUMNS = ("ID", "ADAPTER", "RANK", "TOKENS", "STATE")


def main(argv: list[str], prog: str) -> int:
    """Run the action; `check` returns 1 if any adapter has a problem."""
    options = _parser(prog).parse_args(argv)
    if not options.path.is_dir():
        raise OptionError(f"{options.path} is not a directory")
    try:
        entries = list(_check_store(options))
    except OSError as error:
        raise OptionError(f"cannot read {error.filename}: {error.strerror}") from error
    if options.json:
        print(*(json.dumps(asdict(entry)) for entry in entries), sep="\n")
    else:
        _print(entries)
    return int(any(entry.problem for entry in entries))


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Manage soft prompts and LoRA adapters.")
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    check = actions.add_parser(
        "check",
        help="list the adapters of a store with their problems",
        description="List the adapters of a store with their problems. The exit code is 1 if there is a problem.",
    )
    check.add_argument("path", type=Path, metavar="PATH", help="the store: PREFIX_STORE_PATH of a server")
    check.add_argument("--model", metavar="NAME", help="directory of the model that the adapters are for")
    number, dtype = integer(1), choice("float32", "float16", "bfloat16")
    check.add_argument(
        "--max-length",
        type=number,
        metavar="N",
        help="virtual tokens allowed (default: half the model's length)",
    )
    check.add_argument("--dtype", type=dtype, metavar="NAME", default="float32", help="of the model (default: float32)")
    check.add_argument("--cache-mb", type=number, metavar="N", default=512, help="PROMPT_CACHE_SIZE_MB (default: 512)")
    check.add_argument("--json", action="store_true", help="print one line of JSON per adapter")
    return parser


def _check_store(options: Namespace) -> Iterable[Any]:
    from tgis.cli.store_check import check_store  # noqa: PLC0415 - torch; not needed for --help

    model_config = find_model(options.model, None, None).config if options.model else None
    return check_store(options.path, model_config, options.dtype, options.max_length, options.cache_mb << 20)


def _print(entries: list[Any]) -> None:
    rows = [(escape(e.id), e.kind, str(e.rank or ""), str(e.length or ""), e.problem or "ok") for e in entries]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row in [_COLUMNS, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    wrong, size = sum(bool(entry.problem) for entry in entries), sum(entry.size for entry in entries)
    print(f"\n{len(entries) - wrong} good, {size / 1024:,.0f} KiB in memory; {wrong} with a problem")
