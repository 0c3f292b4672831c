"""`tgis convert-to-onnx`: exports a model to ONNX, for the engine hf_optimum_ort."""

import argparse
import os
from pathlib import Path

from tgis import config
from tgis.cli import model
from tgis.models.onnx.export import OnnxOptions, convert_to_onnx
from tgis.utils.options import DIRECTORY, PATH, TEXT, Parser, ValueType


def _program(text: str) -> Path:
    if not os.path.isfile(TEXT(text)) or not os.access(text, os.X_OK):
        raise ValueError("is not a program")
    return Path(text)


PROGRAM = ValueType("PATH", _program)


def main(argv: list[str], prog: str) -> int:
    """Export; the last line on stdout is the output directory."""
    parser = Parser(
        prog=prog,
        description="Export a model on this machine to ONNX, into a directory that can be served with"
        " DEPLOYMENT_FRAMEWORK=hf_optimum_ort. The export uses Optimum, which needs an older transformers than tgis:"
        " both are installed once into a separate directory in CACHE_DIR, used only by the export.",
        epilog=model.ENVIRONMENT_HELP,
    )
    model.add_arguments(parser, "a directory, or a name in the local hub cache")
    parser.add_argument("out", type=PATH, metavar="OUT", help="output directory, to be created")
    parser.add_argument("--optimize", action="store_true", help="fold constants and fuse operators for the CPU")
    parser.add_argument("--quantize", choices=["int8"], help="quantize the weights of matrix products")
    parser.add_argument("--python", type=PROGRAM, metavar="PATH", help="Python interpreter with Optimum")
    parser.add_argument(
        "--wheels", type=DIRECTORY, metavar="PATH", help="directory with Optimum's wheels, for use without a network"
    )
    parser.add_argument("--merge-graphs", action="store_true", help=argparse.SUPPRESS)  # TGIS's option: always done
    options = parser.parse_args(argv)
    wanted = OnnxOptions(options.optimize, options.quantize is not None, options.python, options.wheels)
    cache = config.cache_config()
    config.prepare_cache_dir(cache)
    convert_to_onnx(model.find(options), options.out, wanted, cache.cache_dir)
    print(options.out)
    return 0
