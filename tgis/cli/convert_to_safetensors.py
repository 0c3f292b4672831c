"""`tgis convert-to-safetensors`: safetensors out of a model's .bin weights."""

from tgis.cli import model
from tgis.models.convert.weights import convert_weights
from tgis.utils.options import Parser


def main(argv: list[str], prog: str) -> int:
    """Convert, and tell what was done."""
    parser = Parser(
        prog=prog,
        description="Make safetensors of the .bin weights of a model on this machine, beside them. Files that hold"
        " anything but tensors are refused, every bit is compared, and names appear only when all is right. Does"
        " nothing if there are safetensors already.",
        epilog=model.ENVIRONMENT_HELP,
    )
    model.add_arguments(parser, "a directory, or a name in the local hub cache")
    print(convert_weights(model.find(parser.parse_args(argv)).path))
    return 0
