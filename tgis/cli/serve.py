"""`tgis serve`: options, logs, directories, then the server."""

from tgis.config import Config, from_process, prepare
from tgis.errors import StartError
from tgis.utils import logs


def main(argv: list[str], prog: str) -> int:
    """Serve until told to leave."""
    config = from_process(argv, prog)
    logs.set_up(level=config.log_level, json_output=config.json_output)
    try:
        prepare(config)
        return _serve(config)
    except StartError as error:
        logs.leave_reason(config.termination_log, str(error))
        raise


def _serve(config: Config) -> int:
    from tgis import server  # noqa: PLC0415 - not for --help, nor for an option that is wrong

    return server.run(config)
