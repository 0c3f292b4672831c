"""`tgis convert-to-safetensors`: converts a model's .bin weights."""

from tgis.cli import model
from tgis.models.convert.weights import convert_weights
from tgis.utils.options import Parser


def main(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Convert the .bin weights of a model on this machine to safetensors, next to them. Files that"
        " contain anything but tensors are rejected; every bit is verified before the files appear. Does nothing if"
        " there are safetensors already.",
        epilog=model.ENVIRONMENT_HELP,
    )
    model.add_arguments(parser, "a directory, or a name in the local hub cache")
    print(convert_weights(model.find(parser.parse_args(argv)).path))
    return 0
