"""Options of TGIS, vllm-tgis-adapter, TGI and vLLM that the server does not have; foreign_options.toml lists them."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tgis.errors import OptionError
from tgis.utils.options import ANY, Option, RawValue, Words, find_raw_values


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option without an effect, and the verdict on it: honoured, warned or refused."""

    option: Option
    verdict: str
    reason: str = ""
    harmless: tuple[str, ...] = ()

    def asks_for_nothing(self, raw: RawValue, model_name: str) -> bool:
        return self.verdict == "honoured" or raw.text.lower() in self.harmless or raw.text == model_name


def foreign_options(adapter_environ: Iterable[str] | None) -> Iterator[ForeignOption]:
    """The foreign options of `tgis serve`, or those of `python -m vllm_tgis_adapter` with these variables."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for verdict, groups in tables.items():
        for group in groups:
            switches = group.get("switches", [])
            vllm = [*group.get("vllm", []), *switches, *(f"no_{name}" for name in switches)]
            for name in [*group.get("names", []), *(vllm if adapter_environ is not None else [])]:
                yield ForeignOption(Option(ANY, name), verdict, group.get("reason", ""), group.get("harmless", ()))
    for name in adapter_environ or ():
        if name.startswith("VLLM_"):
            yield ForeignOption(Option(ANY, name.lower()), "warned")


def foreign_warnings(
    foreign: Sequence[ForeignOption], flags: Mapping[str, Words], environ: Mapping[str, str], model_name: str
) -> list[str]:
    """Warnings about the foreign options that are set; OptionError for one that is refused."""
    asked = [
        (row, raw)
        for row in foreign
        for raw in find_raw_values(row.option, flags, environ)
        if not row.asks_for_nothing(raw, model_name)
    ]
    for row, raw in asked:
        if row.verdict == "refused":
            raise OptionError(f"{raw} is not supported: {row.reason}")
    warnings = [f"{raw} has no effect: {row.reason}" for row, raw in asked if row.reason]
    ignored = [raw.source for row, raw in asked if not row.reason]
    return [*warnings, f"ignored options: {', '.join(ignored)}"] if ignored else warnings


def plain_flag(argument: str) -> str:
    """A flag as the parser knows it: vLLM also takes --max_model_len, --compilation-config.level=3 and -O3."""
    if argument.startswith("-O"):
        return f"--optimization-level={argument[2:]}"
    name, equals, value = argument.partition("=")
    return name.partition(".")[0].replace("_", "-") + equals + value if name.startswith("--") else argument
