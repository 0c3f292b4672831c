"""`tgis convert-to-safetensors`, `convert-to-fast-tokenizer` and `convert-to-onnx`, for a model on this machine."""

import argparse
import os
from pathlib import Path

from tgis import config
from tgis.environment import prepare_cache_dir
from tgis.errors import OptionError
from tgis.models.convert.fast_tokenizer import add_tokenizer
from tgis.models.convert.weights import convert_weights
from tgis.models.files import ModelFiles, find_model
from tgis.models.onnx.export import convert_to_onnx
from tgis.models.staging import timed
from tgis.utils.options import PATH, TEXT, Parser, ValueType

ENVIRONMENT_HELP = """The hub cache is HF_HUB_CACHE, else HF_HOME/hub, else
~/.cache/huggingface/hub, the same as for tgis serve."""


def safetensors(argv: list[str], prog: str) -> int:
    """Convert a model's .bin weights."""
    parser = model_parser(
        prog,
        "Convert the .bin weights of a model on this machine to safetensors, next to them. Files that"
        " contain anything but tensors are rejected. Does nothing if"
        " there are safetensors already.",
    )
    model = find(parser.parse_args(argv))
    with timed("convert-to-safetensors"):
        print(convert_weights(model.path))
    return 0


def fast_tokenizer(argv: list[str], prog: str) -> int:
    """Make tokenizer.json from a slow tokenizer."""
    parser = model_parser(
        prog,
        "Make a tokenizer.json for a model on this machine that has a slow tokenizer. tgis serve does"
        " the same at startup, but keeps the result in its own cache. Does nothing if there is one already.",
    )
    parser.add_argument(
        "--output-path",
        "--output_path",
        type=PATH,
        metavar="PATH",
        help="write the whole tokenizer to this directory (default: add tokenizer.json to the model)",
    )
    options = parser.parse_args(argv)
    if options.output_path is not None and not options.output_path.is_dir():
        raise OptionError(f"--output-path={str(options.output_path)!r} is no directory")
    print(add_tokenizer(find(options), options.output_path))
    return 0


def onnx(argv: list[str], prog: str) -> int:
    """Export to ONNX, for the engine hf_optimum_ort; the last line on stdout is the output directory."""
    parser = model_parser(
        prog,
        "Export a model on this machine to ONNX, into a directory that can be served with"
        " DEPLOYMENT_FRAMEWORK=hf_optimum_ort. The export uses Optimum, which needs an older transformers than tgis:"
        " both are installed once into a separate directory in CACHE_DIR, used only by the export.",
    )
    parser.add_argument("out", type=PATH, metavar="OUT", help="output directory, to be created")
    parser.add_argument(
        "--python", type=ValueType("PATH", _program), metavar="PATH", help="Python interpreter with Optimum"
    )
    for name in ("--merge-graphs", "--optimize"):  # options of TGIS: merged here always, optimized by each start
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    cache = config.cache_config()
    prepare_cache_dir(cache)
    convert_to_onnx(find(options), options.out, cache.cache_dir, options.python)
    print(options.out)
    return 0


def add_model_arguments(parser: argparse.ArgumentParser, about: str) -> None:
    """Add the model's name and revision."""
    parser.add_argument("model_name", type=TEXT, metavar="MODEL_NAME", help=about)
    parser.add_argument(
        "--revision",
        type=lambda text: TEXT(text) or None,
        metavar="TEXT",
        help="branch, tag or commit on the hub (default: main)",
    )


def model_parser(prog: str, description: str) -> Parser:
    """A parser of the arguments that say which model."""
    parser = Parser(prog=prog, description=description, epilog=ENVIRONMENT_HELP)
    add_model_arguments(parser, "a directory, or a name in the local hub cache")
    return parser


def find(options: argparse.Namespace) -> ModelFiles:
    """The model as tgis serve would find it; StartError if it is missing."""
    return find_model(options.model_name, options.revision, str(config.cache_config().hub_cache))


def _program(text: str) -> Path:
    if not os.path.isfile(TEXT(text)) or not os.access(text, os.X_OK):
        raise ValueError("is not a program")
    return Path(text)
