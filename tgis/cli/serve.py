"""`tgis serve`: options, logs, directories, then the server."""

from tgis import logs
from tgis.config import Config, from_process, prepare


def main(argv: list[str], prog: str) -> int:
    """Serve until told to leave."""
    config = from_process(argv, prog)
    logs.set_up(level=config.log_level, json_output=config.json_output)
    prepare(config)
    return _serve(config)


def _serve(config: Config) -> int:
    from tgis import server  # noqa: PLC0415 - not for --help, nor for an option that is wrong

    return server.run(config)
