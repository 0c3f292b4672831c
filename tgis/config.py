"""All options of the server, in one table, and the only reader of the environment.

A flag beats the environment variable of the same name, which beats the default; an empty variable is unset.
Whatever can be found wrong without loading a model is found here: one OptionError, one line.
"""

# ruff: noqa: RUF009 - the calls in the table are field specifiers

import os
import stat
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tgis.errors import OptionError, StartError
from tgis.utils.options import (
    ADDRESS,
    BOOLEAN,
    DIRECTORY,
    PATH,
    TEXT,
    Option,
    Parser,
    build_parser,
    choice,
    computed_option,
    decimal,
    declared_options,
    find_raw_values,
    flag_name,
    integer,
    option,
    parse_option,
    required_option,
    unsupported,
)

MODEL, LIMITS, BATCHES, TEXTS = "Model", "Limits of requests", "Batches and memory", "Text"
PROMPTS, NETWORK, PROCESS, LOGS = "Soft prompts", "Network", "Process", "Logs"

ENGINE = choice("auto", "tgis_native", "hf_transformers", "hf_optimum_ort", "fake", unsupported=("ibm_fms",))
DTYPE = choice(
    "float32", "float16", "bfloat16", unsupported=("float64", "int8", "int4", "float8_e4m3fn", "float8_e5m2")
)
FRACTION = decimal(0, 1, exclude_low=True)
SECONDS = decimal(0, 86400, exclude_low=True)
PORT = integer(0, 65535)

LIBRARY_ENVIRONMENT = {  # what libraries of the engine process are told, unless somebody has told them otherwise
    # Threads of a step wait for each other thousands of times. Spinning for ever, the default, takes ten times as
    # long once anything else wants their cores; sleeping at once half as much again at all times.
    "GOMP_SPINCOUNT": "3000",
    # oneDNN makes code for each number of tokens and each shape of a layer, half a MiB, and keeps 1024 of them.
    **dict.fromkeys(("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128"),
}


def _tokenization_workers(_environ: Mapping[str, str]) -> int:
    return min(max(len(os.sched_getaffinity(0)) - 1, 1), 8)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    """A directory that any user can make, also where nothing but the temporary directory is writable."""
    return Path(environ.get("TMPDIR") or "/tmp") / f"tgis-{os.getuid()}"  # noqa: S108 - prepare() checks the owner


def _hf_home(environ: Mapping[str, str]) -> Path:
    """As huggingface_hub does."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return Path(environ.get("XDG_CACHE_HOME") or Path(home) / ".cache") / "huggingface"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option, checked; read top to bottom, this is the table."""

    # fmt: off
    model_name: str = required_option(MODEL, TEXT, "model: a directory, or a name in the local hub cache")
    revision: str | None = option(MODEL, TEXT, "revision in the hub cache", None, shown_default="main")
    deployment_framework: str = option(
        MODEL, ENGINE, "tgis_native, hf_transformers, hf_optimum_ort, fake; auto: what can run it", "auto",
        old_values={"hf_accelerate": "hf_transformers", "hf_custom_tp": "tgis_native"})
    flash_attention: bool = option(MODEL, BOOLEAN, "demand the engine tgis_native", False)
    paged_attention: bool = option(MODEL, BOOLEAN, "the same", False)
    pt2_compile: bool = option(MODEL, BOOLEAN, "let torch.compile fuse what tgis_native computes on a GPU", False)
    num_shard: int = option(
        MODEL, integer(1, 64), "processes, with a GPU each, that share tgis_native's model", 1,
        aliases=("num_gpus",))
    dtype: str | None = option(
        MODEL, DTYPE, "type of the weights: float32, float16 or bfloat16", None,
        aliases=("dtype_str",), shown_default="bfloat16 where the device computes in it")
    hf_hub_cache: Path | None = option(
        MODEL, PATH, "hub cache with models", None,
        aliases=("transformers_cache", "huggingface_hub_cache"), shown_default="HF_HOME/hub")
    hf_home: Path = computed_option(
        MODEL, PATH, "home of the hub's files", _hf_home, shown_default="~/.cache/huggingface")

    max_sequence_length: int | None = option(
        LIMITS, integer(2), "most tokens of input and output together", None, shown_default="from the model")
    max_new_tokens: int = option(LIMITS, integer(1), "most new tokens that a request may ask for", 1024)
    max_concurrent_requests: int = option(
        LIMITS, integer(1), "most inputs in flight; more are refused at once", 512)
    max_queued_tokens: int = option(
        LIMITS, integer(0), "most input tokens of waiting requests; 0 is no limit", 0)
    step_timeout_seconds: float = option(
        LIMITS, SECONDS, "seconds without a step, with work at hand, that mean a stuck engine", 120.0)

    max_batch_size: int | None = option(
        BATCHES, integer(1, 65536), "most rows that run together", None, shown_default="64 on CPU, 256 on CUDA")
    max_prefill_padding: float = option(
        BATCHES, decimal(0, 1), "most padding that a prefill may have, as a proportion", 0.2)
    max_waiting_tokens: int = option(
        BATCHES, integer(0), "most steps that run before waiting requests interrupt for a prefill", 24)
    estimate_memory: str = option(
        BATCHES, choice("auto", "manual", "off"), "auto measures, off counts KV only, manual trusts the limits", "auto")
    batch_safety_margin: int = option(BATCHES, integer(0, 100), "percent of memory held back", 20)
    cuda_process_memory_fraction: float = option(
        BATCHES, FRACTION, "share of the GPU's memory that may be used", 1.0, short="-c")
    kv_cache_size_mb: int | None = option(
        BATCHES, integer(1), "memory of the KV cache of tgis_native", None,
        shown_default="as the longest batch needs, within what is free")
    prefix_cache: bool = option(
        BATCHES, BOOLEAN, "let tgis_native find the beginning of a prompt in its KV cache", True)
    num_threads: int | None = option(
        BATCHES, integer(1, 4096), "CPU threads of the engine", None, shown_default="all cores")

    prefix_store_path: Path | None = option(
        PROMPTS, DIRECTORY, "soft prompts and LoRA adapters, named by prefix_id or adapter_id", None,
        aliases=("adapter_cache",))
    prompt_cache_size_mb: int = option(
        PROMPTS, integer(1), "MiB of prompts and adapters kept loaded, and most of a file", 512)
    max_prompt_prefix_length: int | None = option(
        PROMPTS, integer(1), "most virtual tokens of a soft prompt", None, shown_default="half of MAX_SEQUENCE_LENGTH")

    default_include_stop_seqs: bool = option(
        TEXTS, BOOLEAN, "whether outputs end with their stop sequence if a request does not say", True)
    output_special_tokens: bool = option(TEXTS, BOOLEAN, "leave special tokens in the output", False)
    tokenization_workers: int = computed_option(
        TEXTS, integer(1, 256), "threads that tokenize", _tokenization_workers, shown_default="CPU count - 1, 1 to 8")

    bind_address: str = option(NETWORK, ADDRESS, "address of both ports", "0.0.0.0")  # noqa: S104 - it is a server
    grpc_port: int = option(NETWORK, PORT, "port for gRPC; 0 takes a free one", 8033, short="-g")
    port: int = option(NETWORK, PORT, "port for /health and /metrics; 0 takes a free one", 3000, short="-p")
    debug_batch: bool = option(
        NETWORK, BOOLEAN, "answer /debug/batch on the HTTP port: what runs, what waits and why", False)
    tls_cert_path: Path | None = option(NETWORK, PATH, "PEM certificate of the gRPC port", None)
    tls_key_path: Path | None = option(NETWORK, PATH, "PEM key of the certificate", None)
    tls_client_ca_cert_path: Path | None = option(
        NETWORK, PATH, "PEM authorities; every client must show a certificate of one", None)
    auth_token_path: Path | None = option(
        NETWORK, PATH, "bearer tokens, one per line; every call but health must carry one", None)
    grpc_max_message_bytes: int = option(NETWORK, integer(1024), "most bytes of a request message", 4 << 20)
    grpc_max_concurrent_streams: int = option(NETWORK, integer(1), "most open calls of a connection", 1024)
    grpc_keepalive_seconds: int = option(
        NETWORK, integer(1, 86400), "seconds of silence before a connection is pinged", 60)

    shutdown_grace_seconds: float = option(
        PROCESS, decimal(0, 86400), "seconds that open calls get after SIGTERM", 30.0)
    cache_dir: Path = computed_option(
        PROCESS, PATH, "the only place where files are written", _cache_dir, shown_default="tgis-<uid> in /tmp")
    termination_log: Path = option(
        PROCESS, PATH, "existing file that gets the reason of a fatal end", Path("/dev/termination-log"))

    log_level: str = option(LOGS, TEXT, "debug, info, warning, error or critical", "info")
    json_output: bool = option(LOGS, BOOLEAN, "log JSON objects, one per line", False)
    log_text: bool = option(LOGS, BOOLEAN, "log the first 32 characters of inputs and outputs", False)
    # fmt: on

    warnings: tuple[str, ...] = field(default=())  # learnt while parsing, for whoever starts the logs

    @property
    def engine(self) -> str:
        """The name of the engine to load."""
        return "tgis_native" if self.flash_attention or self.paged_attention else self.deployment_framework

    @property
    def hub_cache(self) -> Path:
        """The folder with `models--org--name` directories."""
        return self.hf_hub_cache or self.hf_home / "hub"


UNSUPPORTED = (  # unless the value asks for nothing
    Option(unsupported(TEXT), "quantize"),
    Option(unsupported(BOOLEAN, False), "trust_remote_code"),
    Option(unsupported(TEXT), "speculator_name"),
    Option(unsupported(TEXT), "otlp_endpoint"),
)
IGNORED = tuple(
    Option(TEXT, name)
    for name in (
        "shard_uds_path",
        "master_addr",
        "master_port",
        "max_batch_weight",
        "max_prefill_weight",
        "otlp_service_name",
    )
)


def parse(argv: list[str], environ: Mapping[str, str], prog: str) -> Config:
    """The configuration that flags and environment say; OptionError if they cannot work. --help exits."""
    flags = vars(_parser(prog).parse_args(argv))
    values, warnings = {}, []
    for row in declared_options(Config):
        if found := find_raw_values(row, flags, environ):
            values[row.name] = parse_option(row, found)
            warnings += [f"{at} is now {row.old_values[at.text]}" for at in found if at.text in row.old_values]
        elif row.required:
            raise OptionError(f"{row.name.upper()} is required (or pass {flag_name(row.name)})")
        elif row.default_factory is not None:
            values[row.name] = row.default_factory(environ)
    for row in UNSUPPORTED:
        if found := find_raw_values(row, flags, environ):
            parse_option(row, found)
    if unused := [at.source for row in IGNORED for at in find_raw_values(row, flags, environ)]:
        warnings.append(f"without effect here: {', '.join(unused)}")
    config = Config(**values, warnings=tuple(warnings))
    _validate(config)
    return config


def from_command_line(argv: list[str], prog: str = "tgis serve") -> Config:
    """`parse` with the environment of this process."""
    return parse(argv, os.environ, prog)


def cache_config() -> Config:
    """Where `tgis serve` with this environment looks for models of the hub, and keeps files; no other option."""
    names = ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")
    environ = {name: os.environ[name] for name in (*names, "CACHE_DIR", "TMPDIR") if name in os.environ}
    return parse(["--model-name", "any"], environ, "tgis")


def prepare_environment(config: Config) -> None:
    """Make the cache directory, and tell the libraries of this process and of its children to use it.

    To be called before any of them is imported. StartError if the directory cannot be made or trusted.
    """
    make_private_dir(config.cache_dir)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(config.hub_cache)}
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.cache_dir / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(config.cache_dir / "inductor"))
    for name, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True").strip():
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]


def make_private_dir(directory: Path) -> None:
    """Where everybody may write, only a directory of this user is safe: others could fill it first."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        shared = directory.parent.stat().st_mode & stat.S_IWOTH
        owner = directory.lstat().st_uid
    except OSError as error:
        raise StartError(f"CACHE_DIR: cannot make {directory}: {error.strerror}") from error
    if shared and owner != os.getuid():
        raise StartError(f"CACHE_DIR: {directory} belongs to user {owner}, not to this one")


def _parser(prog: str) -> Parser:
    return build_parser(
        declared_options(Config),
        UNSUPPORTED + IGNORED,
        prog,
        description="Serve a model over gRPC. A flag beats the environment variable of its name.",
        epilog=_option_names("TGIS options that are not supported yet:", UNSUPPORTED)
        + _option_names("Accepted, without effect:", IGNORED),
    )


def _option_names(title: str, options: tuple[Option, ...]) -> str:
    names = ", ".join(name.upper() for row in options for name in row.names)
    return f"{title}\n{textwrap.fill(names, 79, initial_indent='  ', subsequent_indent='  ')}\n"


def _validate(config: Config) -> None:
    if config.port == config.grpc_port != 0:
        raise OptionError(f"PORT and GRPC_PORT are both {config.port}")
    if config.num_shard > 1 and config.engine not in ("auto", "tgis_native"):
        raise OptionError(f"NUM_SHARD={config.num_shard} needs the engine tgis_native, not {config.engine}")
    tls = config.tls_cert_path, config.tls_key_path, config.tls_client_ca_cert_path
    if any(tls) and not all(tls[:2]):
        raise OptionError("TLS needs both TLS_CERT_PATH and TLS_KEY_PATH")
