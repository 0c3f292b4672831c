"""`tgis bench`: the load generator of `tgis.bench`."""

from tgis.bench import command
from tgis.utils.options import Parser


def main(argv: list[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Load test a running server: latency and throughput at a given load.")
    command.add_arguments(parser)
    return command.run(parser.parse_args(argv))
