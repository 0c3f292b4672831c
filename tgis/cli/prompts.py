"""`tgis prompts`: what is in a store of soft prompts and LoRA adapters, checked as the server would."""

import json
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from tgis.errors import OptionError
from tgis.models.files import embedding_size, find_model, is_encoder_decoder, max_sequence_length
from tgis.utils.options import Parser, choice, integer

_COLUMNS = ("ID", "LAYOUT", "TOKENS", "RANK", "WIDTH", "TYPE", "STATE")


def main(argv: list[str], prog: str) -> int:
    """Run the action; `check` ends with 1 if anything is wrong."""
    options = _parser(prog).parse_args(argv)
    if not options.path.is_dir():
        raise OptionError(f"{options.path} is not a directory")
    try:
        lines = list(_check_store(options))
    except OSError as error:
        raise OptionError(f"cannot read {error.filename}: {error.strerror}") from error
    if options.json:
        print(*(json.dumps(asdict(line)) for line in lines), sep="\n")
    else:
        _print(lines)
    return int(any(line.problem for line in lines))


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Look after soft prompts and LoRA adapters.")
    actions = parser.add_subparsers(required=True, metavar="ACTION", parser_class=Parser)
    check = actions.add_parser(
        "check",
        help="say what is in a store, and what is wrong with it",
        description="Say what is in a store, and what is wrong with it. The exit code is 1 if anything is.",
    )
    check.add_argument("path", type=Path, metavar="PATH", help="the store: PREFIX_STORE_PATH of a server")
    check.add_argument("--model", metavar="NAME", help="directory of the model that they are for")
    number, dtype = integer(1), choice("float32", "float16", "bfloat16")
    check.add_argument(
        "--max-length", type=number, metavar="N", help="virtual tokens (default: half the model's length)"
    )
    check.add_argument("--dtype", type=dtype, metavar="NAME", default="float32", help="of the model (default: float32)")
    check.add_argument("--cache-mb", type=number, metavar="N", default=512, help="PROMPT_CACHE_SIZE_MB (default: 512)")
    check.add_argument("--json", action="store_true", help="write a line of JSON for each")
    return parser


def _check_store(options: Namespace) -> Iterable[Any]:
    config = find_model(options.model, None, None).config if options.model else {}
    length = options.max_length or -(-max_sequence_length(config) // 2)
    torch, tensors = import_module("torch"), import_module("tgis.prompts.tensor_file")
    dtype, device = getattr(torch, options.dtype), torch.device("cpu")
    kind = is_encoder_decoder(config) if options.model else None
    target = tensors.TargetModel(embedding_size(config), length, dtype, device, kind)
    check_store = import_module("tgis.prompts.survey").check_store
    lines: Iterable[Any] = check_store(options.path, target, options.cache_mb << 20)
    return lines


def _print(lines: list[Any]) -> None:
    """A table, and what it comes to."""
    rows = [
        (_printable(line.id), line.layout, line.tokens, line.rank, line.width, line.dtype, line.problem or "ok")
        for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row in [_COLUMNS, *rows]:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    wrong, size = sum(bool(line.problem) for line in lines), sum(line.size for line in lines)
    print(f"\n{len(lines) - wrong} good, {size / 1024:,.0f} KiB in memory; {wrong} with a problem")


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
