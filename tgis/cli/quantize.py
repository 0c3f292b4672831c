"""`tgis quantize`: quantizes the weights of a model on this machine, for any server that reads the format."""

import sys

from tgis.cli.convert import find, model_parser
from tgis.errors import OptionError
from tgis.models.quantize import FORMATS, Recipe, quantize_model
from tgis.utils.options import PATH, Parser, choice, decimal, integer

_GROUP_SIZES = ("-1", "32", "64", "128", "256", "512", "1024")


def main(argv: list[str], prog: str) -> int:
    """Quantize; the last line on stdout is the output directory."""
    options = _parser(prog).parse_args(argv)
    bits = int(options.bits)
    if options.format == "awq" and bits != 4:
        raise OptionError(f"--format=awq has weights of 4 bits only, not --bits={bits}")
    for name, value in (("--percdamp", options.percdamp), ("--act-order", options.act_order)):
        if value is not None:
            print(
                f"{name} has no effect: auto-round tunes the rounding of weights, in the order of the inputs",
                file=sys.stderr,
            )
    size = int(options.group_size or (128 if bits == 4 else -1))
    recipe = Recipe(bits, None if size == -1 else size, options.format, options.calibration, options.iterations)
    quantize_model(find(options), options.out, recipe)
    print(options.out)
    return 0


def _parser(prog: str) -> Parser:
    parser = model_parser(
        prog,
        "Quantize the weights of a decoder-only model on this machine with auto-round (pip install '.[quantize]' in"
        " a checkout), into a directory that can be served. tgis serve quantizes plain models by rounding, too, with"
        " QUANTIZE; texts for calibration make 4 bits better than that.",
    )
    parser.add_argument("out", type=PATH, metavar="OUT", help="output directory, to be created")
    parser.add_argument("--bits", type=choice("4", "8"), default="4", help="bits of a weight (default: 4)")
    parser.add_argument(
        "--group-size",
        type=choice(*_GROUP_SIZES),
        metavar="N",
        help="inputs that share a scale, halved until they divide every layer; -1: all of a layer (default: 128"
        " with 4 bits, -1 with 8)",
    )
    parser.add_argument(
        "--calibration",
        type=PATH,
        metavar="TEXTS",
        help="file of texts, one a line, or .jsonl with text (default: round)",
    )
    parser.add_argument(
        "--iterations",
        type=integer(1, 10_000),
        default=40,
        metavar="N",
        help="of calibration, for each block (default: 40)",
    )
    parser.add_argument("--format", type=choice(*FORMATS), default="gptq", help=f"{', '.join(FORMATS)} (default: gptq)")
    parser.add_argument("--percdamp", type=decimal(0, 1), help="no effect")
    parser.add_argument("--act-order", action="store_true", default=None, help="no effect")
    return parser
