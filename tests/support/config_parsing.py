"""Configuration parsed from flags and environment variables, and the errors of invalid ones."""

import pytest

from tgis.config import Config, parse
from tgis.errors import OptionError


def read(*argv: str, **environ: str) -> Config:
    """`parse` with a model name, unless `environ` has one."""
    return parse(list(argv), {"MODEL_NAME": "m", **environ}, "tgis serve")


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(OptionError) as caught:
        read(*argv, **environ)
    return str(caught.value)
