"""`python tests/support/options_page.py > docs/options.md` writes the page of all options from tgis/config.py."""

from itertools import groupby

from tgis.config import OPTIONS
from tgis.utils.options import Option, is_negation

_HEAD = """# Options

Each option is an environment variable and a flag of `tgis serve`: `MAX_BATCH_SIZE=32` is the same as
`--max-batch-size 32`. A flag overrides a variable. An empty variable counts as unset. If a value is invalid, the server
prints one line and does not start. `tgis serve MODEL --check` prints every value with its source and exits.

Other names of an option follow the word "also". A name after "opposite" has the opposite value:
`DISABLE_GRAMMAR_SUPPORT=true` is the same as `STRUCTURED_OUTPUT=false`. Names in italics are from vLLM; only `python -m
vllm_tgis_adapter` accepts them. [speed.md](speed.md#options-that-matter) says which options matter for speed.
"""


def page() -> str:
    """Options by group, in the order of the table."""
    groups = groupby(OPTIONS, key=lambda opt: opt.group)
    return _HEAD + "".join(f"\n## {group}\n\n{_table(list(options))}" for group, options in groups)


def _table(options: list[Option]) -> str:
    rows = ["| Option | Default | Meaning |", "|---|---|---|", *map(_row, options)]
    return "".join(f"{row}\n" for row in rows)


def _row(opt: Option) -> str:
    default = "required" if opt.required else opt.shown_default or ""
    row = f"| `{opt.name.upper()}` | {default} | {opt.help_text}{_other_names(opt)} |"
    return row.replace("<", "&lt;")


def _other_names(opt: Option) -> str:
    shown = {name: f"`{name.upper()}`" for name in opt.aliases}
    shown |= {name: f"*`{name.upper()}`*" for name in opt.vllm_names}
    same = ", ".join(text for name, text in shown.items() if not is_negation(name))
    opposite = ", ".join(text for name, text in shown.items() if is_negation(name))
    parts = [f"also {same}"] * bool(same) + [f"opposite: {opposite}"] * bool(opposite)
    return f" ({'; '.join(parts)})" if parts else ""


if __name__ == "__main__":
    print(page(), end="")
