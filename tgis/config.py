"""All options of the server in one table; with defaults.py the only module that reads the environment.

A flag overrides the environment variable of the same name, which overrides the default; an empty variable is unset.
Invalid values are an OptionError of one line, before anything is loaded.
"""

# ruff: noqa: RUF009 - the calls in the table are field specifiers

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from tgis import defaults
from tgis.errors import OptionError
from tgis.foreign_options import foreign_options, foreign_warnings, plain_flag
from tgis.speculative_config import SPECULATIVE_CONFIG, SpeculativeConfig, implied_options
from tgis.tracing import can_trace
from tgis.utils.logs import LEVELS
from tgis.utils.options import (
    ADDRESS,
    BOOLEAN,
    ENDPOINT,
    MODEL_OR_NONE,
    NAMED_PATHS,
    PATH,
    SECRET,
    TEXT,
    WORDS,
    Option,
    RawValue,
    Secret,
    choice,
    decimal,
    declared_options,
    find_raw_values,
    flag_name,
    format_value,
    integer,
    is_negation,
    make_parser,
    near_misses,
    option,
    parse_option,
    with_unit,
)

MODEL, LIMITS, BATCHES, TEXTS = "Model", "Request limits", "Batching and memory", "Text"
ADAPTERS, NETWORK, HTTP, CLUSTER = "Adapters", "Network", "HTTP", "Several machines"
PROCESS, LOGS = "Process", "Logging"

ENGINE = choice("auto", "tgis_native", "hf_transformers", "hf_optimum_ort", "fake")
DTYPE = choice(
    "auto", "float32", "float16", "bfloat16", "int8",
    aliases={"float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16"},
)  # fmt: skip
FORMATS = "bitsandbytes", "gptq", "awq", "gptq_marlin", "awq_marlin", "compressed-tensors", "fp8", "gguf"
QUANTIZE = choice("none", "int8", "int4", *FORMATS, aliases={"false": "none", "0": "none"})
KV_CACHE_DTYPE = choice("auto", "int8", "bfloat16")
# vLLM's and TGI's names for KV caches in 8 bits
FP8_KV_CACHE = "fp8", "fp8_e4m3", "fp8_e4m3fn", "fp8_e5m2", "fp8_inc"
CPU_ISA = choice(
    *("auto", "none", "generic", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
    *("neon_dotprod", "neon_bf16"),
)
LOOKUPS = "[ngram]", "ngram", "suffix"  # vLLM's names
SPECULATION = choice("auto", "off", "lookup", aliases=dict.fromkeys(LOOKUPS, "lookup"))
FRACTION = decimal(0, 1, exclude_low=True)
SECONDS = decimal(0, 86400, exclude_low=True)
PORT = integer(0, 65535)
MASTER_PORT = 29500  # default of torch.distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every option, validated."""

    # fmt: off
    model_name: str = option(
        MODEL, TEXT, "model directory, GGUF file, or name of a model in the local Hub cache", "", required=True,
        aliases=("model_id",), vllm_names=("model",))
    served_model_name: tuple[str, ...] = option(
        MODEL, WORDS, "names of the model in the OpenAI API; the first is shown in answers, metrics and logs", (),
        shown_default="MODEL_NAME, or the last part of its path")
    revision: str | None = option(MODEL, TEXT, "revision of the model in the Hub cache", None, shown_default="main")
    tokenizer_name: str | None = option(
        MODEL, TEXT, "directory, or name in the Hub cache, of the tokenizer and chat template", None,
        vllm_names=("tokenizer",), shown_default="MODEL_NAME")
    deployment_framework: str = option(
        MODEL, ENGINE, "engine: auto, tgis_native, hf_transformers, hf_optimum_ort, or fake (for tests)", "auto",
        nearest_values={
            "hf_accelerate": "hf_transformers", "hf_optimum_bt": "hf_transformers", "hf_custom_tp": "tgis_native",
            "ds_inference": "auto", "ibm_fms": "auto"})
    flash_attention: bool = option(MODEL, BOOLEAN, "same as DEPLOYMENT_FRAMEWORK=tgis_native", False)
    paged_attention: bool = option(MODEL, BOOLEAN, "same as FLASH_ATTENTION", False)
    pt2_compile: bool | None = option(
        MODEL, BOOLEAN, "use torch.compile in tgis_native", None, shown_default="on a GPU")
    num_shard: int = option(
        MODEL, integer(1, 64), "tensor-parallel size of tgis_native: ranks on all machines, one GPU each", 1,
        aliases=("num_gpus",), vllm_names=("tensor_parallel_size",), short="-tp")
    dtype: str = option(
        MODEL, DTYPE, "dtype of the weights: float32, float16 or bfloat16; int8 means QUANTIZE=int8", "auto",
        aliases=("dtype_str",), shown_default="bfloat16 if supported, else float32 (CPU) or float16 (GPU)",
        nearest_values={
            "float64": "float32", "double": "float32",
            **dict.fromkeys(("int4", "float8_e4m3fn", "float8_e5m2"), "auto")})
    quantize: str = option(
        MODEL, QUANTIZE, "quantize linear layers to int8 or int4 while loading; not needed for quantized checkpoints",
        "none", vllm_names=("quantization",), short="-q")
    quantize_logits: bool = option(MODEL, BOOLEAN, "with QUANTIZE, also quantize the logits layer to int8", False)
    quantize_activations: str = option(
        MODEL, choice("auto", "none", "int8"),
        "activations of quantized layers: int8, none (DTYPE), or auto (int8 with QUANTIZE, else as saved)", "auto")
    hf_hub_cache: Path | None = option(
        MODEL, PATH, "Hub cache directory", None,
        aliases=("transformers_cache", "huggingface_hub_cache"), vllm_names=("download_dir",),
        shown_default="HF_HOME/hub")
    hf_home: Path = option(
        MODEL, PATH, "parent directory of the Hub cache", defaults.hf_home, shown_default="~/.cache/huggingface")

    max_sequence_length: int | None = option(
        LIMITS, with_unit(integer(2)), "maximum number of input plus output tokens", None,
        aliases=("max_total_tokens",), vllm_names=("max_model_len",), shown_default="from the model")
    max_input_tokens: int | None = option(
        LIMITS, integer(1), "maximum number of input tokens", None,
        aliases=("max_input_length",), shown_default="MAX_SEQUENCE_LENGTH - 1")
    max_new_tokens: int = option(
        LIMITS, integer(1), "largest max_new_tokens; larger values are lowered in the OpenAI API and for SMG", 1024)
    default_max_new_tokens: int = option(
        LIMITS, integer(0), "default max_new_tokens of fmaas.GenerationService; 0 means the remaining context", 20)
    max_top_n_tokens: int = option(
        LIMITS, integer(0, 1024), "largest top_n_tokens of a request; always 20 in the OpenAI API and for SMG", 10,
        vllm_names=("max_logprobs",))
    max_concurrent_requests: int = option(
        LIMITS, integer(1), "maximum number of inputs in flight; further calls fail with RESOURCE_EXHAUSTED", 512)
    max_concurrent_requests_per_client: int | None = option(
        LIMITS, integer(1), "maximum number of inputs in flight per client (known by its token or certificate)", None,
        shown_default="MAX_CONCURRENT_REQUESTS")
    max_call_memory_mb: int = option(
        LIMITS, integer(1), "maximum MiB of request messages in flight, half of it per client; further calls "
        "fail with RESOURCE_EXHAUSTED", 512)
    limit_by_address: bool = option(
        LIMITS, BOOLEAN, "identify anonymous clients by IP address; do not use it behind a proxy", False)
    max_queued_tokens: int = option(
        LIMITS, integer(0), "maximum number of queued input tokens (0 means no limit); further calls fail with "
        "RESOURCE_EXHAUSTED", 0)
    deadline_partial: bool = option(
        LIMITS, BOOLEAN, "end unary calls shortly before their gRPC deadline and return the text so far", False)
    step_timeout_seconds: float = option(
        LIMITS, SECONDS, "seconds without a step until a busy engine is killed", 120.0)

    max_batch_size: int | None = option(
        BATCHES, integer(1, 65536), "maximum number of sequences in a batch", None,
        vllm_names=("max_num_seqs",), shown_default="64 on CPU, 256 on CUDA")
    max_batch_prefill_tokens: int | None = option(
        BATCHES, with_unit(integer(1)), "maximum number of input tokens in one step", None,
        vllm_names=("max_num_batched_tokens",), shown_default="chosen by the engine")
    max_prefill_gap_ms: int | None = option(
        BATCHES, integer(1, 60_000), "target for the delay in ms that prefills cause in running streams", None,
        shown_default="250 on CPU, 150 on CUDA")
    max_prefill_padding: float = option(
        BATCHES, decimal(0, 1), "maximum fraction of padding tokens in a prefill", 0.2)
    max_waiting_tokens: int = option(
        BATCHES, integer(0), "maximum number of decode steps before waiting requests are prefilled", 24)
    estimate_memory: str = option(
        BATCHES, choice("auto", "manual", "off"),
        "KV cache: auto leaves room for steps, off does not, manual fits MAX_BATCH_SIZE full sequences", "auto")
    batch_safety_margin: int | None = option(
        BATCHES, integer(0, 100), "part to keep free, in percent of the memory that weights leave", None,
        shown_default="20; 8 on GPUs for decoder-only models in tgis_native without adapters")
    cuda_process_memory_fraction: float = option(
        BATCHES, FRACTION, "fraction of the GPU memory to use", 1.0,
        aliases=("cuda_memory_fraction",), vllm_names=("gpu_memory_utilization",), short="-c")
    kv_cache_size_mb: int | None = option(
        BATCHES, integer(1), "size of the KV cache of tgis_native in MiB", None,
        shown_default="from the free memory and MAX_BATCH_SIZE")
    kv_cache_dtype: str = option(
        BATCHES, KV_CACHE_DTYPE, "dtype of the KV cache: auto means DTYPE; int8 needs tgis_native on CPUs", "auto",
        nearest_values=dict.fromkeys(FP8_KV_CACHE, "int8"))
    kv_cache_idle_seconds: float = option(
        BATCHES, decimal(0, 86400), "seconds without requests until KV cache memory is freed; 0 means never", 300.0)
    prefix_cache: bool = option(
        BATCHES, BOOLEAN, "in tgis_native, reuse the KV cache of common prompt prefixes", True,
        aliases=("prefix_caching", "use_prefix_caching"),
        vllm_names=("enable_prefix_caching", "no_enable_prefix_caching"))
    num_threads: int = option(
        BATCHES, integer(1, defaults.MAX_THREADS), "number of CPU threads of the engine", defaults.num_threads,
        shown_default="OMP_NUM_THREADS, else the usable cores")
    cpu_isa: str = option(
        BATCHES, CPU_ISA, "instruction set of the CPU kernels, such as avx512_vnni; none uses PyTorch instead", "auto",
        shown_default="the best of the CPU")

    speculation: str = option(
        BATCHES, SPECULATION, "prompt lookup decoding: lookup, off, or auto (on CPUs, if the engine supports it)",
        "auto")
    speculation_max_tokens: int = option(
        BATCHES, integer(0, 63), "maximum number of speculative tokens per sequence and step", 15,
        aliases=("speculate",), vllm_names=("num_speculative_tokens",))
    speculator_name: str | None = option(
        BATCHES, MODEL_OR_NONE, "draft model with the same vocabulary, or MLP speculator", None,
        vllm_names=("speculative_model",))
    speculator_revision: str | None = option(
        BATCHES, TEXT, "revision of SPECULATOR_NAME in the Hub cache", None, shown_default="main")
    speculator_max_batch_size: int | None = option(
        BATCHES, integer(1, 65536), "largest batch for which SPECULATOR_NAME drafts tokens", None,
        shown_default="MAX_BATCH_SIZE")
    speculative_config: SpeculativeConfig | None = option(
        BATCHES, SPECULATIVE_CONFIG, "speculative decoding as a JSON object in the format of vLLM", None)

    prefix_store_path: Path | None = option(
        ADAPTERS, PATH, "directory of soft prompts and LoRA adapters", None, aliases=("adapter_cache",))
    lora_modules: Mapping[str, str] | None = option(
        ADAPTERS, NAMED_PATHS, "LoRA adapters to load at the start, as name=path pairs or as vLLM's JSON", None,
        aliases=("lora_adapters",))
    prompt_cache_size_mb: int = option(
        ADAPTERS, integer(1), "size of the adapter cache in MiB; also the maximum size of an adapter file", 512)
    max_prompt_prefix_length: int | None = option(
        ADAPTERS, integer(1), "maximum length of a soft prompt", None, shown_default="half of MAX_SEQUENCE_LENGTH")

    default_include_stop_seqs: bool = option(
        TEXTS, BOOLEAN, "keep stop sequences in outputs unless the request says otherwise", True)
    output_special_tokens: bool = option(TEXTS, BOOLEAN, "keep special tokens in outputs", False)
    structured_output: bool = option(
        TEXTS, BOOLEAN, "accept requests with a grammar or schema", True, aliases=("disable_grammar_support",))
    add_special_tokens: bool = option(TEXTS, BOOLEAN, "add special tokens such as BOS to inputs", True)
    random_seed: int | None = option(
        TEXTS, integer(0, 2**64 - 1), "for requests without a seed, choose the same seeds in every run", None,
        vllm_names=("seed",), shown_default="none")
    tokenization_workers: int = option(
        TEXTS, integer(1, 256), "number of texts tokenized in parallel", defaults.tokenization_workers,
        aliases=("validation_workers",), shown_default="usable CPUs - 1, but 2 to 8")

    bind_address: str = option(
        NETWORK, ADDRESS, "IP address to listen on", "0.0.0.0",  # noqa: S104 - a server
        aliases=("hostname",), vllm_names=("host",))
    grpc_port: int = option(NETWORK, PORT, "gRPC port; 0 picks a free one", 8033, short="-g")
    port: int = option(
        NETWORK, PORT, "HTTP port for /health, /metrics and the HTTP APIs; 0 picks a free one", 3000, short="-p")
    debug_batch: bool = option(NETWORK, BOOLEAN, "serve the batch and the queue as JSON at /debug/batch", False)
    tls_cert_path: Path | None = option(
        NETWORK, PATH, "PEM certificate of the gRPC port", None, vllm_names=("ssl_certfile",))
    tls_key_path: Path | None = option(
        NETWORK, PATH, "PEM private key of TLS_CERT_PATH", None, vllm_names=("ssl_keyfile",))
    tls_client_ca_cert_path: Path | None = option(
        NETWORK, PATH, "PEM CA certificates for client certificates; turns mTLS on", None, vllm_names=("ssl_ca_certs",))
    auth_token_path: Path | None = option(
        NETWORK, PATH, "file of accepted bearer tokens, one per line", None)
    grpc_max_message_bytes: int = option(NETWORK, integer(1024), "maximum size of a request message in bytes", 4 << 20)
    client_timeout_seconds: float = option(
        NETWORK, SECONDS, "seconds a client may take to send a request or to read an answer", 30.0)
    grpc_max_connection_age_seconds: int | None = option(
        NETWORK, integer(1, 31536000), "seconds until clients must reconnect and find new replicas",
        None, shown_default="no limit")

    http_api: bool = option(HTTP, BOOLEAN, "serve the TGI and OpenAI HTTP APIs", True)
    http_api_port: int | None = option(
        HTTP, PORT, "separate port for the HTTP APIs; required if TLS is on", None, shown_default="PORT if TLS is off")
    http_keep_alive_seconds: float = option(
        HTTP, SECONDS, "seconds until an idle HTTP connection is closed; set it above the timeout of proxies", 620.0)
    generation_config: str = option(
        HTTP, choice("auto", "none", aliases={"vllm": "none"}),
        "sampling defaults of the OpenAI API: auto reads generation_config.json of the model", "auto")
    tool_call_parser: str | None = option(
        HTTP, TEXT, "format of tool calls in the OpenAI API, by its name in vLLM, such as hermes", None,
        shown_default="detected from the chat template")
    reasoning_parser: str | None = option(
        HTTP, TEXT, "format of reasoning in the OpenAI API, by its name in vLLM, such as qwen3", None,
        shown_default="detected from the chat template")
    api_key: Secret | None = option(
        HTTP, SECRET, "bearer token for the HTTP APIs, in addition to those in AUTH_TOKEN_PATH", None)
    cors_allow_origin: tuple[str, ...] = option(
        HTTP, WORDS, "web origins that may call the HTTP APIs; * means all", (), shown_default="none")
    allowed_hosts: tuple[str, ...] = option(
        HTTP, WORDS, "host names accepted in the header Host of HTTP requests; * means all", (),
        shown_default="all; localhost if BIND_ADDRESS is loopback and no token is set")
    max_best_of: int = option(HTTP, integer(1), "largest best_of of a TGI request", 2)
    max_stop_sequences: int = option(HTTP, integer(0, 64), "maximum number of stop sequences of a TGI request", 4)
    max_client_batch_size: int = option(HTTP, integer(1), "shown by /info of the TGI API; has no other effect", 4)
    payload_limit: int = option(HTTP, integer(1024), "maximum size of a request body in bytes", 2_000_000)

    nnodes: int = option(
        CLUSTER, integer(1, 64), "number of machines; each runs NUM_SHARD / NNODES ranks", 1,
        aliases=("group_world_size", "lws_group_size"))
    node_rank: int = option(
        CLUSTER, integer(0, 63), "number of this machine; 0 serves the APIs, others only answer probes", 0,
        aliases=("group_rank", "lws_worker_index"))
    master_addr: str | None = option(
        CLUSTER, TEXT, "address of node 0 for the other nodes", None, aliases=("lws_leader_address",))
    master_port: int = option(
        CLUSTER, integer(1, 65534), "port of node 0 for the other nodes; under torchrun, MASTER_PORT + 1 is used",
        MASTER_PORT)
    cluster_secret_path: Path | None = option(
        CLUSTER, PATH, "file with a secret text, the same on all nodes of the cluster", None)
    cluster_interface: str | None = option(
        CLUSTER, TEXT, "network interface for collectives (gloo, NCCL)", None,
        shown_default="the interface that reaches node 0")
    cluster_timeout_seconds: float = option(
        CLUSTER, decimal(2, 3600), "seconds without an answer until another node counts as lost", 10.0)

    strict_options: bool = option(
        PROCESS, BOOLEAN, "refuse to start if an option is ignored or replaced", False)
    shutdown_grace_seconds: float = option(
        PROCESS, decimal(0, defaults.MAX_GRACE_SECONDS), "seconds for calls in flight to finish after SIGTERM",
        30.0, aliases=("graceful_termination_timeout",))
    cache_dir: Path = option(
        PROCESS, PATH, "directory for all files that the server writes", defaults.cache_dir,
        shown_default="tgis-<uid> in /tmp")
    termination_log: Path = option(
        PROCESS, PATH, "existing file that receives the cause of a fatal error", Path("/dev/termination-log"),
        aliases=("termination_log_dir",))

    otlp_endpoint: str | None = option(
        LOGS, ENDPOINT, "address of the OpenTelemetry collector (OTLP over gRPC) for request spans", None,
        aliases=("otel_exporter_otlp_endpoint", "otel_exporter_otlp_traces_endpoint"),
        vllm_names=("otlp_traces_endpoint",))
    otlp_service_name: str | None = option(
        LOGS, TEXT, "service name in spans", None, aliases=("otel_service_name",), shown_default="tgis")
    git_commit_hash: str | None = option(LOGS, TEXT, "commit of the build, shown in the metric tgi_info", None)
    log_level: str = option(LOGS, TEXT, "lowest level to log: debug, info, warning, error or critical", "info")
    json_output: bool = option(LOGS, BOOLEAN, "log as JSON, one object per line", False)
    log_requests: bool = option(
        LOGS, BOOLEAN, "log a line for every finished input; if false, for failures only", True,
        vllm_names=("enable_log_requests", "no_enable_log_requests", "disable_log_requests"))
    log_text: bool = option(LOGS, BOOLEAN, "log the first 32 characters of inputs and outputs", False)
    record_path: Path | None = option(
        LOGS, PATH, "file for records of all answers, including texts, for tgis verify", None)
    record_max_mb: int = option(
        LOGS, integer(1), "total size of RECORD_PATH and the older RECORD_PATH.1 in MiB", 256)
    # fmt: on

    warnings: tuple[str, ...] = field(default=())  # found while parsing; logged at startup
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # what set each option that is set
    check: bool = field(default=False)  # only say what the server would do

    @property
    def engine(self) -> str:
        """The engine to load, or auto."""
        sharded = self.num_shard > 1 and self.deployment_framework in ("auto", "hf_transformers")
        return "tgis_native" if self.flash_attention or self.paged_attention or sharded else self.deployment_framework

    @property
    def shown_model(self) -> str:
        """The model's name for people."""
        name = os.path.basename(os.path.abspath(self.model_name)) if os.path.isdir(self.model_name) else self.model_name
        return self.served_model_name[0] if self.served_model_name else name

    @property
    def hub_cache(self) -> Path:
        """The directory that contains `models--org--name` directories."""
        return self.hf_hub_cache or self.hf_home / "hub"


OPTIONS = declared_options(Config)
# By the flag of vLLM: ours.
VLLM_FLAGS = {
    flag_name(name): flag_name(opt.name) + " false" * is_negation(name) for opt in OPTIONS for name in opt.vllm_names
}
_RawValues = list[tuple[Option, list[RawValue]]]


def parse(argv: list[str], environ: Mapping[str, str], prog: str, *, as_adapter: bool = False) -> Config:
    """The configuration given by flags and environment; OptionError if it is invalid. --help exits.

    `as_adapter`: with the names, variables and defaults of vllm-tgis-adapter. TGIS's launcher has its defaults.
    """
    foreign = list(foreign_options(environ if as_adapter else None))
    overrides = defaults.ADAPTER if as_adapter else defaults.launcher(environ) if prog == defaults.LAUNCHER else {}
    options = [_with_default(opt, overrides) for opt in OPTIONS]
    if as_adapter:
        options = [replace(opt, aliases=(*opt.aliases, *opt.vllm_names)) for opt in options]
    known = [*options, *(foreign_option.option for foreign_option in foreign)]
    parser = make_parser(prog, known, {} if as_adapter else VLLM_FLAGS)
    flags = vars(parser.parse_args(list(map(plain_flag, argv)) if as_adapter else argv))
    raw_values = [(opt, find_raw_values(opt, flags, environ)) for opt in options]
    values = overrides | _parse_options(raw_values)
    _apply_other_spellings(values, flags, environ)
    sources = {opt.name: ", ".join(raw.source for raw in found) for opt, found in raw_values if found}
    config = Config(**values, sources=sources, check=flags["check"])
    _validate(config)
    warnings = list(_warnings(config, raw_values))
    warnings += foreign_warnings(foreign, flags, environ, config.model_name)
    variables = {name for opt in known for name in opt.variables}
    warnings += near_misses((name for name, text in environ.items() if name not in variables and text.strip()), OPTIONS)
    if warnings and config.strict_options:
        raise OptionError(f"STRICT_OPTIONS: {'; '.join(warnings)}")
    return replace(config, warnings=tuple(warnings))


def _with_default(opt: Option, overrides: Mapping[str, Any]) -> Option:
    """The option with its default in `overrides`, if it has one there."""
    return replace(opt, shown_default=format_value(overrides[opt.name])) if opt.name in overrides else opt


def _apply_other_spellings(values: dict[str, Any], flags: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Set the options that values of others stand for."""
    if (load_format := " ".join(flags.get("load_format", ""))) in FORMATS:
        values.setdefault("quantize", load_format)
    if values.get("dtype") == "int8":
        values |= {"dtype": "auto", "quantize": values.get("quantize", "int8")}
    if values.get("speculator_name") in LOOKUPS:
        values |= {"speculator_name": None, "speculation": values.get("speculation", "lookup")}
    if "speculative_config" in values:
        values |= implied_options(values["speculative_config"], values)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun itself listens there
        values["master_port"] = values.get("master_port", MASTER_PORT) + 1


def _parse_options(raw_values: _RawValues) -> dict[str, Any]:
    """The value of each option that is set; one OptionError for all that are invalid."""
    values, problems = {}, []
    for opt, found in raw_values:
        try:
            if found:
                values[opt.name] = parse_option(opt, found)
            elif opt.required:
                problems.append(f"{opt.name.upper()} is required (or pass {flag_name(opt.name)})")
        except OptionError as error:
            problems.append(str(error))
    if problems:
        raise OptionError("; ".join(problems))
    return values


def _warnings(config: Config, raw_values: _RawValues) -> Iterator[str]:
    """What is replaced or has no effect."""
    for opt, found in raw_values:
        yield from (f"{raw}: using {opt.nearest_values[raw.text]}" for raw in found if raw.text in opt.nearest_values)
    if config.deployment_framework not in ("auto", config.engine):
        flag = "PAGED_ATTENTION" if config.paged_attention else "FLASH_ATTENTION"
        cause = "NUM_SHARD" if config.num_shard > 1 else flag
        yield f"DEPLOYMENT_FRAMEWORK={config.deployment_framework!r}: using {config.engine}, which {cause} needs"
    if config.log_level.lower() not in LEVELS:  # TGIS accepts Rust's filter syntax
        yield f"LOG_LEVEL={config.log_level!r}: using info"
    if config.prefix_store_path is not None and not os.path.isdir(config.prefix_store_path):
        yield f"{config.sources['prefix_store_path']}={str(config.prefix_store_path)!r} is no directory yet"
    if config.http_api_port is not None and not (config.http_api or config.debug_batch):
        yield f"HTTP_API_PORT={config.http_api_port} has no effect: HTTP_API is false"
    if config.otlp_endpoint is not None and not can_trace():
        yield f"OTLP_ENDPOINT={config.otlp_endpoint!r} has no effect: traces need the packages of the extra otel"
    if not config.speculator_name or config.speculation != "auto":
        why = f"SPECULATION is {config.speculation}" if config.speculator_name else "there is no SPECULATOR_NAME"
        for name in ("speculator_name", "speculator_revision", "speculator_max_batch_size"):
            if value := getattr(config, name):
                yield f"{name.upper()}={value!r} has no effect: {why}"


def from_command_line(argv: list[str], prog: str, *, as_adapter: bool = False) -> Config:
    """`parse` with the environment of this process."""
    return parse(argv, os.environ, prog, as_adapter=as_adapter)


def json_output_requested() -> bool:
    """JSON_OUTPUT of this environment, whatever is wrong with the other options."""
    return os.environ.get("JSON_OUTPUT", "").strip().lower() in ("true", "1")


def cache_config() -> Config:
    """The hub cache and the cache directory that `tgis serve` would use in this environment; no other option."""
    names = ("HF_HUB_CACHE", "TRANSFORMERS_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "CACHE_DIR")
    environ = {name: os.environ[name] for name in names if name in os.environ}
    return parse(["--model-name", "any"], environ, "tgis")


def _validate(config: Config) -> None:
    ports = {name: getattr(config, name) for name in ("port", "grpc_port", "http_api_port")}
    for (first, one), (second, other) in combinations(ports.items(), 2):
        if one == other and one:
            raise OptionError(f"{first.upper()} and {second.upper()} are both {one}")
    if config.api_key is not None and not (config.api_key.text.isascii() and config.api_key.text.isprintable()):
        raise OptionError("API_KEY must be printable ASCII text")
    if config.num_shard > 1 and config.engine not in ("tgis_native", "hf_transformers"):
        raise OptionError(f"NUM_SHARD={config.num_shard} needs the engine tgis_native, not {config.engine}")
    nodes = f"{config.sources.get('nnodes', 'NNODES')}={config.nnodes}"
    if config.node_rank >= config.nnodes:
        raise OptionError(f"{config.sources['node_rank']}={config.node_rank} must be below {nodes}")
    if config.nnodes > 1:
        _validate_cluster(config, nodes)
    tls = config.tls_cert_path, config.tls_key_path, config.tls_client_ca_cert_path
    if any(tls) and not all(tls[:2]):
        raise OptionError("TLS needs both TLS_CERT_PATH and TLS_KEY_PATH")


def _validate_cluster(config: Config, nodes: str) -> None:
    if config.num_shard % config.nnodes:
        raise OptionError(f"NUM_SHARD={config.num_shard} must be a multiple of {nodes}")
    for name in ("master_addr", "cluster_secret_path"):
        if getattr(config, name) is None:
            raise OptionError(f"{nodes} needs {name.upper()}")
    interfaces = [name for _, name in socket.if_nameindex()]
    if config.cluster_interface not in (None, *interfaces):
        raise OptionError(f"CLUSTER_INTERFACE={config.cluster_interface} is none of {', '.join(interfaces)}")
