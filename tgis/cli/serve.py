"""`tgis serve`: parse the options, set up logging and the environment, then run the server or only check it."""

import logging
import sys
from itertools import groupby

from tgis.config import Config, from_command_line, prepare_environment
from tgis.errors import StartError
from tgis.utils import logs
from tgis.utils.options import Option, declared_options, format_value


def main(argv: list[str], prog: str) -> int:
    """Serve until a signal."""
    return run(from_command_line(argv, prog))


def run(config: Config) -> int:
    """Serve until a signal, or only check the options."""
    if config.check:
        return _check(config)
    logs.configure(level=config.log_level, json_output=config.json_output)
    try:
        prepare_environment(config)
        from tgis import server  # noqa: PLC0415 - slow; not needed for --help or a bad option

        return server.run(config)
    except StartError as error:
        logs.write_termination_message(config.termination_log, str(error))
        raise


def _check(config: Config) -> int:
    """Print every option with its value and what set it; StartError for what would be refused."""
    for group, options in groupby(declared_options(Config), lambda option: option.group):
        print(f"{group}:", *(_line(config, option) for option in options), sep="\n")
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stdout, force=True)
    prepare_environment(config)
    from tgis import server  # noqa: PLC0415 - slow

    server.prepare(config)
    print("tgis can start with these options. A check does not load the weights: the engine may still refuse them.")
    return 0


def _line(config: Config, option: Option) -> str:
    value = getattr(config, option.name)
    shown = option.shown_default if value is None else format_value(value)
    return f"  {option.name.upper():<32}{shown:<28}  {config.sources.get(option.name, '')}".rstrip()
