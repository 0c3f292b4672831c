"""`tgis convert-to-fast-tokenizer`: makes tokenizer.json from a slow tokenizer."""

from tgis.cli import model
from tgis.errors import OptionError
from tgis.models.convert.fast_tokenizer import add_tokenizer
from tgis.utils.options import PATH, Parser


def main(argv: list[str], prog: str) -> int:
    parser = Parser(
        prog=prog,
        description="Make a tokenizer.json for a model on this machine that has a slow tokenizer. tgis serve does"
        " the same at startup, but keeps the result in its own cache. Does nothing if there is one already.",
        epilog=model.ENVIRONMENT_HELP,
    )
    model.add_arguments(parser, "a directory, or a name in the local hub cache")
    parser.add_argument(
        "--output-path",
        "--output_path",
        type=PATH,
        metavar="PATH",
        help="write the whole tokenizer to this directory (default: add tokenizer.json to the model)",
    )
    options = parser.parse_args(argv)
    if options.output_path is not None and not options.output_path.is_dir():
        raise OptionError(f"--output-path={str(options.output_path)!r} is no directory")
    print(add_tokenizer(model.find(options), options.output_path))
    return 0
