"""`tgis convert-to-fast-tokenizer`: tokenizer.json out of a tokenizer in an older format."""

from tgis.cli import model
from tgis.errors import OptionError
from tgis.models.convert.fast_tokenizer import add_tokenizer
from tgis.utils.options import PATH, Parser


def main(argv: list[str], prog: str) -> int:
    """Convert, and tell what was done."""
    parser = Parser(
        prog=prog,
        description="Make a tokenizer.json for a model on this machine that has an older kind of tokenizer. tgis"
        " serve does the same when it starts, but keeps the result for itself. Does nothing if there is one.",
        epilog=model.ENVIRONMENT_HELP,
    )
    model.add_arguments(parser, "a directory, or a name in the local hub cache")
    parser.add_argument(
        "--output-path",
        "--output_path",
        type=PATH,
        metavar="PATH",
        help="directory that gets the whole tokenizer (default: that of the model gets tokenizer.json)",
    )
    options = parser.parse_args(argv)
    if options.output_path is not None and not options.output_path.is_dir():
        raise OptionError(f"--output-path={str(options.output_path)!r} is no directory")
    print(add_tokenizer(model.find(options), options.output_path))
    return 0
