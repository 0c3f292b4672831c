"""`tgis bench`: the load generator of `tgis.bench`."""

from tgis.bench import command
from tgis.utils.options import Parser


def main(argv: list[str], prog: str) -> int:
    """Measure a running server."""
    parser = Parser(prog=prog, description="Measure a running server: latencies and throughput at a given load.")
    command.add_arguments(parser)
    return command.run(parser.parse_args(argv))
