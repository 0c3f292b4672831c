"""Log lines that say what was started, and how to try it."""

import ipaddress
import os
from importlib.metadata import version

from tgis import __version__
from tgis.config import Config
from tgis.ipc.messages import EngineInfo
from tgis.utils.cpus import cpu_quota

_LIBRARIES = ("torch", "transformers", "grpcio")


def startup_lines(
    config: Config, info: EngineInfo, fallback_reason: str, lengths: tuple[int, int], ports: tuple[int, int, int | None]
) -> list[str]:
    """The lines, each with its name.

    `fallback_reason` says why the engine is not the one asked for; `lengths` are the maximum tokens and new tokens of a
    sequence; `ports` those of gRPC, probes and the HTTP APIs.
    """
    lines = {
        "versions": _versions(info),
        "engine": _engine(config, info, fallback_reason),
        "device": _device(config, info),
        "limits": _limits(config, info, *lengths),
        "ports": _ports(config, *ports),
        "try": _try(config, *ports),
    }
    return [f"{name:<10}{text}" for name, text in lines.items()]


def _versions(info: EngineInfo) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
    return f"tgis {__version__}, {libraries}; fingerprint {info.fingerprint}"


def _engine(config: Config, info: EngineInfo, fallback_reason: str) -> str:
    text = f"{info.engine} runs {info.model_class}" + (f": {fallback_reason}" if fallback_reason else "")
    text += f"; lookup of up to {info.proposed_tokens} tokens ahead" if info.proposed_tokens else ""
    return text + (f", or {info.drafted_tokens} by {config.speculator_name}" if info.drafted_tokens else "")


def _device(config: Config, info: EngineInfo) -> str:
    ranks = f", {config.num_shard} ranks" if config.num_shard > 1 else ""
    ranks += f" on {config.nnodes} nodes" if config.nnodes > 1 else ""
    quota, cpus = cpu_quota(), len(os.sched_getaffinity(0))
    allowed = "no quota" if quota is None else f"quota {quota:g}"
    weights = "" if info.quantize == "none" else f", weights in {info.quantize}"
    weights += "" if info.kv_cache_dtype == "auto" else f", KV cache in {info.kv_cache_dtype}"
    return f"{info.device}, {info.dtype}{weights}{ranks}; {config.num_threads} threads on {cpus} CPUs, {allowed}"


def _limits(config: Config, info: EngineInfo, sequence_length: int, new_tokens: int) -> str:
    waiting = max(config.max_concurrent_requests - info.max_batch_size, 0)
    return f"{sequence_length} tokens, {new_tokens} new; batch of {info.max_batch_size}, {waiting or 'none'} may wait"


def _ports(config: Config, grpc_port: int, probe_port: int, api_port: int | None) -> str:
    tls = "mutual TLS" if config.tls_client_ca_cert_path else "TLS" if config.tls_cert_path else "no TLS"
    tokens = "bearer tokens" if config.auth_token_path else "no tokens"
    return f"gRPC {grpc_port} ({tls}, {tokens}), health and metrics {probe_port}, HTTP APIs {api_port or 'off'}"


def _try(config: Config, grpc_port: int, _probe_port: int, api_port: int | None) -> str:
    """A page and a command, from this machine."""
    address = ipaddress.ip_address(config.bind_address)
    is_local = address.is_unspecified or address.is_loopback
    host = "localhost" if is_local else f"[{address}]" if address.version == 6 else str(address)
    flags = f" --target {host}:{grpc_port}"
    flags += " --ca-cert CA" * bool(config.tls_cert_path)
    flags += " --tls-cert CERT --tls-key KEY" * bool(config.tls_client_ca_cert_path)
    flags += " --token-file TOKEN" * bool(config.auth_token_path)
    page = f"http{'s' * bool(config.tls_cert_path)}://{host}:{api_port}/ui in a browser, or "
    return f'{page if api_port else ""}tgis generate{flags} "Once upon a time"'
