"""`tgis quantize`: quantizes the weights of a model on this machine, for any server that reads the format."""

from typing import Any

from tgis.bench.workload import read_texts
from tgis.cli.convert import find, model_parser
from tgis.environment import prepare_libraries
from tgis.errors import OptionError
from tgis.models.quantize import FORMATS, Recipe, quantize_model
from tgis.utils.options import PATH, Parser, ValueType, choice, decimal, integer

_GROUP_SIZES = ("-1", "32", "64", "128", "256", "512", "1024")
_GROUPS = "inputs that share a scale, halved until they divide every layer; -1: all of a layer"
_OPTIONS: list[tuple[str, ValueType[Any], Any, str, str]] = [  # name, type, default, metavar, help
    ("--bits", choice("4", "8"), "4", "N", "bits of a weight: 4 or 8 (default: 4)"),
    ("--group-size", choice(*_GROUP_SIZES), None, "N", f"{_GROUPS} (default: 128 with 4 bits, -1 with 8)"),
    ("--calibration", PATH, None, "TEXTS", "file of texts, one a line, or .jsonl with text (default: round)"),
    ("--iterations", integer(1, 10_000), 200, "N", "steps of calibration for each block (default: 200)"),
    ("--format", choice(*FORMATS), "gptq", "NAME", f"{', '.join(FORMATS)} (default: gptq)"),
    ("--percdamp", decimal(0, 1), None, "NUMBER", "no effect; an option of TGIS"),
]


def main(argv: list[str], prog: str) -> int:
    """Quantize; the last line on stdout is the output directory."""
    options = _parser(prog).parse_args(argv)
    bits = int(options.bits)
    if options.format == "awq" and bits != 4:
        raise OptionError(f"--format=awq has weights of 4 bits only, not --bits={bits}")
    size = int(options.group_size or (128 if bits == 4 else -1))
    texts = read_texts(options.calibration, "--calibration") if options.calibration else None
    recipe = Recipe(bits, None if size == -1 else size, options.format, texts, options.iterations)
    prepare_libraries()
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
    for name, kind, default, metavar, help_text in _OPTIONS:
        parser.add_argument(name, type=kind, default=default, metavar=metavar, help=help_text)
    parser.add_argument("--act-order", action="store_true", help="no effect; an option of TGIS")
    parser.add_argument("out", type=PATH, metavar="OUT", help="output directory, to be created")
    return parser
