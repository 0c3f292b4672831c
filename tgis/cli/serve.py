"""`tgis serve`: parse the options, set up logging and the environment, then run the server or only check it."""

import logging
import os
import resource
import sys
from itertools import groupby

from tgis.config import OPTIONS, Config, from_command_line, json_output_requested
from tgis.engines import describe_memory
from tgis.environment import prepare_environment
from tgis.errors import OptionError, StartError
from tgis.utils import logs
from tgis.utils.options import Option, format_value

MAX_OPEN_FILES = 1 << 16  # more than connections ever need; containers often have a hard limit of a billion

log = logging.getLogger(__name__)


def main(argv: list[str], prog: str, *, as_adapter: bool = False) -> int:
    """Serve until a signal, or only check the options; the first argument may be a model."""
    if argv and not argv[0].startswith("-"):
        argv = ["--model-name", *argv]
    try:
        config = from_command_line(argv, prog, as_adapter=as_adapter)
    except OptionError as error:
        if not json_output_requested():
            raise
        logs.configure(level="info", json_output=True)
        return _log_fatal(error)
    return _check(config) if config.check else _serve(config)


def main_as_adapter(argv: list[str], prog: str) -> int:
    """`python -m vllm_tgis_adapter`: serve with the variables and defaults of vllm-tgis-adapter."""
    return main(argv, prog, as_adapter=True)


def _serve(config: Config) -> int:
    logs.configure(level=config.log_level, json_output=config.json_output)
    try:
        raise_file_limit()
        prepare_environment(config)
        from tgis import server  # noqa: PLC0415 - slow; not needed for --help or a bad option

        code = server.run(config)
        logs.stop()
        os._exit(code)  # tokenizing a long text for a client that has gone must not delay the end
    except StartError as error:
        logs.write_termination_message(config.termination_log, str(error))
        if not config.json_output:
            raise
        return _log_fatal(error)
    except Exception as error:
        logs.write_termination_message(config.termination_log, f"{type(error).__name__}: {error}")
        log.exception("the server cannot go on")
        return 1


def raise_file_limit() -> None:
    """Raise the soft limit, which is often 1,024 for the sake of select(), to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.info("limit of open files raised from %d to %d", soft, wanted)


def _log_fatal(error: StartError) -> int:
    """The last line as JSON, like all others; without JSON_OUTPUT it is text on stderr."""
    log.critical("%s", error)
    return error.exit_code


def _check(config: Config) -> int:
    """Print every option with its value and what set it; StartError for what would be refused."""
    for group, options in groupby(OPTIONS, lambda option: option.group):
        print(f"{group}:", *(_line(config, option) for option in options), sep="\n")
    logging.basicConfig(format="%(levelname)s: %(message)s", stream=sys.stdout, force=True)
    prepare_environment(config)
    from tgis.prepare import prepare  # noqa: PLC0415 - slow

    for line in describe_memory(prepare(config).engine_options()):
        print(line)
    print("tgis can start with these options. A check does not load the weights: the engine may still refuse them.")
    return 0


def _line(config: Config, option: Option) -> str:
    value = getattr(config, option.name)
    shown = option.shown_default if value in (None, ()) else format_value(value)
    return f"  {option.name.upper():<38}{shown:<28}  {config.sources.get(option.name, '')}".rstrip()
