"""Options of TGIS, vllm-tgis-adapter, TGI and vLLM that the server does not have; foreign_options.toml lists them.

Options of vLLM with a counterpart are `vllm_names` in `tgis.config`. vLLM's names are flags everywhere, but variables
in the adapter's entry point only: elsewhere HOST, MODEL or SEED is too common a name to be meant for us.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tgis.errors import OptionError
from tgis.utils.options import ANY, Option, Words, find_raw_values

ADAPTER_DEFAULTS = {"port": 8000, "default_max_new_tokens": 0}  # by our names
_ADAPTER_PREFIX = "VLLM_"  # variables that only vLLM reads
_FLAGS_ONLY = ("config", "hostname")  # every container sets the variable HOSTNAME


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option that is accepted or refused, but never has an effect."""

    option: Option
    treatment: str  # without_effect, refused, always_on or ignored: what the file says of them
    reason: str = ""
    harmless: tuple[str, ...] = ()  # values that ask for nothing


def foreign_options(*, as_adapter: bool) -> tuple[ForeignOption, ...]:
    """The foreign options of `tgis serve`, or of `python -m vllm_tgis_adapter`."""
    found = tuple(_read_file())
    return tuple(replace(each, option=as_in_adapter(each.option)) for each in found) if as_adapter else found


def _read_file() -> Iterator[ForeignOption]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    for treatment, groups in tables.items():
        for group in groups:
            switches = group.get("switches", [])
            flags = [*group.get("flags", []), *switches, *(f"no_{name}" for name in switches)]
            options = [Option(ANY, name, short=group.get("short")) for name in group.get("names", [])]
            for opt in [*options, *(Option(ANY, vllm_names=(name,)) for name in flags)]:
                yield ForeignOption(opt, treatment, group.get("reason", ""), tuple(group.get("harmless", [])))


def foreign_warnings(
    foreign: Sequence[ForeignOption],
    flags: Mapping[str, Words],
    environ: Mapping[str, str],
    model_name: str,
    *,
    as_adapter: bool,
) -> list[str]:
    """Warnings about the foreign options that are set; OptionError for one that is refused."""
    found = [(each, raw) for each in foreign for raw in find_raw_values(each.option, flags, environ)]
    warnings = []
    for each, raw in found:
        if each.treatment == "refused" and raw.text not in (*each.harmless, model_name):
            raise OptionError(f"{raw} is not supported: {each.reason}")
        if each.treatment == "without_effect" and raw.text.lower() not in each.harmless:
            warnings.append(f"{raw} has no effect: {each.reason}")
    ignored = [raw.source for each, raw in found if each.treatment == "ignored"]
    ignored += [name for name in environ if as_adapter and name.startswith(_ADAPTER_PREFIX)]
    return [*warnings, f"ignored options: {', '.join(ignored)}"] if ignored else warnings


def as_declared(argument: str) -> str:
    """A flag as the parser knows it: vLLM also takes --max_model_len, --compilation-config.level=3 and -O3."""
    if argument.startswith("-O"):
        return f"--optimization-level={argument[2:]}"
    name, equals, value = argument.partition("=")
    return name.partition(".")[0].replace("_", "-") + equals + value if name.startswith("--") else argument


def as_in_adapter(opt: Option) -> Option:
    """The option as the adapter has it: vLLM's names are variables too, and the default is the adapter's."""
    flags_only = tuple(name for name in opt.vllm_names if name.startswith("no_") or name in _FLAGS_ONLY)
    variables = tuple(name for name in opt.vllm_names if name not in flags_only)
    shown = str(ADAPTER_DEFAULTS.get(opt.name, opt.shown_default))
    return replace(opt, aliases=(*opt.aliases, *variables), vllm_names=flags_only, shown_default=shown)
