"""`tgis serve`: options, logs, directories, then the server."""

from tgis.config import Config, from_command_line, prepare_environment
from tgis.errors import StartError
from tgis.utils import logs


def main(argv: list[str], prog: str) -> int:
    """Serve until told to leave."""
    config = from_command_line(argv, prog)
    logs.configure(level=config.log_level, json_output=config.json_output)
    try:
        prepare_environment(config)
        return _serve(config)
    except StartError as error:
        logs.write_termination_message(config.termination_log, str(error))
        raise


def _serve(config: Config) -> int:
    from tgis import server  # noqa: PLC0415 - not for --help, nor for an option that is wrong

    return server.run(config)
