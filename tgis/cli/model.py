"""Shared by the commands for model files: the model, found as `tgis serve` would find it."""

import argparse

from tgis import config
from tgis.models.files import ModelFiles, find_model
from tgis.utils.options import TEXT

ENVIRONMENT_HELP = """The hub cache is HF_HUB_CACHE, else HF_HOME/hub, else
~/.cache/huggingface/hub, the same as for tgis serve."""


def add_arguments(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("model_name", type=TEXT, metavar="MODEL_NAME", help=about)
    parser.add_argument(
        "--revision",
        type=lambda text: TEXT(text) or None,
        metavar="TEXT",
        help="branch, tag or commit on the hub (default: main)",
    )


def find(options: argparse.Namespace) -> ModelFiles:
    """The model on this machine; StartError if it is missing."""
    return find_model(options.model_name, options.revision, str(config.cache_config().hub_cache))
