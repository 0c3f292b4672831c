"""`tgis download-weights`: downloads a model from the hub into the local cache, ready to serve."""

import argparse
import sys
from pathlib import Path

from huggingface_hub import HfApi

import tgis
from tgis import config
from tgis.cli.convert import ENVIRONMENT_HELP, add_model_arguments
from tgis.errors import OptionError, StartError
from tgis.models import hub
from tgis.models.convert.fast_tokenizer import TOKENIZER, add_tokenizer
from tgis.models.convert.weights import convert_weights, needs_conversion
from tgis.models.files import CONFIG_EXTENSIONS, SAFETENSORS, find_model, find_weights
from tgis.models.staging import timed
from tgis.utils.options import BOOLEAN, TEXT, Parser, ValueType

SUFFIX = ".safetensors"


def main(argv: list[str], prog: str) -> int:
    """Download and convert; the last line on stdout is the model's directory."""
    options = _parser(prog).parse_args(argv)
    if (Path(options.model_name) / "config.json").is_file():
        raise OptionError(f"{options.model_name} is a directory on this machine, which is what would be served")
    path = _download(options)
    if options.auto_convert and (path / "config.json").is_file():
        _convert(options, path)
    print(path)
    return 0


def _extensions(text: str) -> tuple[str, ...]:
    extensions = tuple(part.strip() for part in text.split(","))
    if not all(len(part) > 1 and part.startswith(".") and part.isprintable() for part in extensions):
        raise ValueError("must be extensions as .safetensors, with commas between")
    return extensions


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Download a model from the hub into the local cache, where tgis serve finds it by name. Files"
        " that are complete are not downloaded again. The last line of the output is the model's"
        " directory.",
        epilog=f"{ENVIRONMENT_HELP} HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and HTTPS_PROXY work as in huggingface_hub.",
    )
    add_model_arguments(parser, "name on the hub: org/name")
    parser.add_argument(
        "--token", type=TEXT, metavar="TEXT", help="access token; prefer HF_TOKEN, since ps shows options"
    )
    parser.add_argument(
        "--extension",
        type=ValueType("LIST", _extensions),
        default=(SUFFIX,),
        metavar="LIST",
        help="comma-separated extensions of the files to download; with a single one, also config and"
        " tokenizer (default: .safetensors)",
    )
    parser.add_argument(
        "--auto-convert",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="if the hub has only .bin weights, download and convert those; likewise a slow tokenizer (default: yes)",
    )
    parser.add_argument("--auto_convert", type=BOOLEAN, help=argparse.SUPPRESS)  # vllm-tgis-adapter's spelling
    return parser


def _download(options: argparse.Namespace) -> Path:
    """Download the requested files, with .bin weights if there are no safetensors."""
    wanted: tuple[str, ...] = options.extension
    api = HfApi(token=options.token or None, library_name="tgis", library_version=tgis.__version__)
    cache = config.cache_config().hub_cache
    only_weights = len(wanted) == 1 and wanted[0] not in CONFIG_EXTENSIONS
    extensions = (*wanted, *CONFIG_EXTENSIONS) if only_weights else wanted
    path = hub.download(api, options.model_name, options.revision, extensions, cache)
    if options.auto_convert and SUFFIX in wanted and not any((path / name).is_file() for name in SAFETENSORS):
        wanted = (*wanted, ".bin")
        path = hub.download(api, options.model_name, options.revision, (*extensions, ".bin"), cache)
    if not any(file.name.endswith(wanted) for file in path.glob("*")):
        raise StartError(f"{options.model_name} has no files that end with {' or '.join(wanted)}")
    return path


def _convert(options: argparse.Namespace, path: Path) -> None:
    if SUFFIX in options.extension:
        if needs_conversion(path):
            with timed("convert-to-safetensors"):
                print(convert_weights(path), file=sys.stderr)
        find_weights(path)
    if not (path / TOKENIZER).is_file():
        print(add_tokenizer(find_model(str(path), None, None), None), file=sys.stderr)
