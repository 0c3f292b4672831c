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
from tgis.models.convert.weights import convert_weights
from tgis.models.files import CONFIG_EXTENSIONS, find_model, find_weights
from tgis.models.staging import timed
from tgis.utils.options import BOOLEAN, TEXT, Parser, ValueType

SAFETENSORS, BIN = ".safetensors", ".bin"


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
        " that are complete are not downloaded again; others begin anew. The last line of the output is the model's"
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
        default=(SAFETENSORS,),
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
    parser.add_argument("--auto_convert", type=BOOLEAN, help=argparse.SUPPRESS)  # as in vllm-tgis-adapter
    return parser


def _download(options: argparse.Namespace) -> Path:
    """The directory of the model, up to date if the hub is reachable."""
    api = HfApi(token=options.token or None, library_name="tgis", library_version=tgis.__version__)
    cache = config.cache_config().hub_cache
    try:
        listing = hub.fetch_listing(api, options.model_name, options.revision)
    except hub.HubUnreachable as error:
        return _cached_copy(options, cache, error)
    files = _select_files(listing, options, hub.snapshot_of(listing, cache))
    return hub.download(api, listing, files, options.revision, cache)


def _cached_copy(options: argparse.Namespace, cache: Path, reason: StartError) -> Path:
    """The directory of an earlier download; raises `reason` if there is none."""
    ends = (*options.extension, *((BIN,) if options.auto_convert else ()))
    try:
        path = find_model(options.model_name, options.revision, str(cache)).path
    except StartError:
        raise reason from None
    if not any(file.name.endswith(ends) for file in path.iterdir()):
        raise reason
    print(f"{reason}; {options.model_name} is in the cache from before", file=sys.stderr)
    return path


def _select_files(listing: hub.Listing, options: argparse.Namespace, snapshot: Path) -> tuple[str, ...]:
    """The requested files, .bin weights if there are no others, and config and tokenizer."""
    asked: tuple[str, ...] = options.extension
    bare = SAFETENSORS in asked and not hub.select_files(listing, (SAFETENSORS,)) and not _has_safetensors(snapshot)
    if bare and options.auto_convert:
        asked = (*asked, BIN)
    if not hub.select_files(listing, asked) and not _has_safetensors(snapshot):
        others = ", but .bin weights" if bare and hub.select_files(listing, (BIN,)) else ""
        raise StartError(f"{listing.repo} has no files that end with {' or '.join(asked)}{others}")
    alone = len(options.extension) == 1 and options.extension[0] not in CONFIG_EXTENSIONS
    return hub.select_files(listing, (*asked, *CONFIG_EXTENSIONS) if alone else asked)


def _convert(options: argparse.Namespace, path: Path) -> None:
    if SAFETENSORS in options.extension:
        if not _has_safetensors(path):
            with timed("convert-to-safetensors"):
                print(convert_weights(path), file=sys.stderr)
        find_weights(path)
    if not (path / TOKENIZER).is_file():
        print(add_tokenizer(find_model(str(path), None, None), None), file=sys.stderr)


def _has_safetensors(path: Path) -> bool:
    """Whether a model's safetensors are complete."""
    try:
        return bool(find_weights(path))
    except StartError:
        return False
