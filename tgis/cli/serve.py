"""`tgis serve`: parse the options, set up logging and the environment, then run the server."""

from tgis.config import from_command_line, prepare_environment
from tgis.errors import StartError
from tgis.utils import logs


def main(argv: list[str], prog: str) -> int:
    """Serve until a signal."""
    config = from_command_line(argv, prog)
    logs.configure(level=config.log_level, json_output=config.json_output)
    try:
        prepare_environment(config)
        from tgis import server  # noqa: PLC0415 - slow; not needed for --help or a bad option

        return server.run(config)
    except StartError as error:
        logs.write_termination_message(config.termination_log, str(error))
        raise
