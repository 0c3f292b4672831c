"""`python tests/support/options_page.py > docs/options.md` writes the page of all options from tgis/config.py."""

from itertools import groupby

from tgis.config import OPTIONS
from tgis.utils.options import Option

_HEAD = """# Options

Each option is an environment variable and a flag of `tgis serve`: `MAX_BATCH_SIZE=32` is the same as
`--max-batch-size 32`. A flag overrides a variable. An empty variable counts as unset. If a value is invalid, the server
prints one line and does not start. `tgis serve MODEL --check` prints every value with its source and exits.

Other names of an option follow the word "also". Names in italics are from vLLM; only `python -m vllm_tgis_adapter`
accepts them. [speed.md](speed.md#options-that-matter) says which options matter for speed.
"""


def page() -> str:
    """Options by group, in the order of the table."""
    groups = groupby(OPTIONS, key=lambda opt: opt.group)
    return _HEAD + "".join(f"\n## {group}\n\n{_table(list(options))}" for group, options in groups)


def _table(options: list[Option]) -> str:
    rows = ["| Option | Default | Meaning |", "|---|---|---|", *map(_row, options)]
    return "".join(f"{row}\n" for row in rows)


def _row(opt: Option) -> str:
    others = [f"`{name.upper()}`" for name in opt.aliases] + [f"*`{name.upper()}`*" for name in opt.vllm_names]
    also = f" (also {', '.join(others)})" if others else ""
    default = "required" if opt.required else opt.shown_default or ""
    return f"| `{opt.name.upper()}` | {default} | {opt.help_text}{also} |".replace("<", "&lt;")


if __name__ == "__main__":
    print(page(), end="")
