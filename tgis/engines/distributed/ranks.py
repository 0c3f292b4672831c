"""Tensor parallelism: the process group of the ranks, and their messages."""

import fcntl
import ipaddress
import itertools
import logging
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from tgis.engines.distributed.mirror import StepInput
from tgis.engines.loading.loader import load_config
from tgis.engines.sharding.plans import check_plan
from tgis.errors import StartError
from tgis.ipc.messages import EngineOptions, Fatal, Shutdown
from tgis.utils.cpus import share_of_nodes

log = logging.getLogger(__name__)

_SIOCGIFADDR = 0x8915  # linux/sockios.h, of IPv4
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_NEVER = timedelta(days=1)  # ranks load at different speeds, and a dead one is noticed by its connection


class ClearCache(msgspec.Struct, frozen=True, tag="clear_cache"):
    """Forget the KV cache and give unused memory back; no sequence is in it."""


class GiveUp(msgspec.Struct, frozen=True, tag="give_up"):
    """From rank 0: it has failed in a step. As the answer of another rank: it does not wait in that step."""


RankMessage = EngineOptions | StepInput | ClearCache | GiveUp | Shutdown | Fatal


def check_shardable(options: EngineOptions) -> None:
    """StartError if the model cannot be sharded so, or this machine has too few GPUs for its ranks."""
    check_plan(load_config(options), options.num_shards)
    if torch.cuda.is_available() and torch.cuda.device_count() < options.ranks_per_node:
        raise StartError(f"NUM_SHARD={options.num_shards} is more than the {torch.cuda.device_count()} GPUs")


def host_store(address: str, num_ranks: int) -> tuple[dist.Store, str]:
    """A store in this process for all ranks, and its name for `open_store`: HOST:PORT."""
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    # Without a listening socket it would listen on all addresses.
    server = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore(address, port, num_ranks, **server), f"{address}:{port}"


def open_store(name: str, num_ranks: int) -> dist.Store:
    """The store of rank 0."""
    host, _, port = name.rpartition(":")
    return dist.TCPStore(host, int(port), num_ranks, is_master=False)


def use_interface(name: str | None, address: str) -> None:
    """Have collectives of this process and its children use this network interface, by default that of `address`."""
    if interface := name or _interface_of(address):
        # NCCL and the public interface of gloo take it from the environment only.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[variable] = interface


def _interface_of(address: str) -> str | None:
    if (parsed := ipaddress.ip_address(address)).is_loopback:
        return "lo"
    if parsed.version == 6:
        lines = map(str.split, _IPV6_ADDRESSES.read_text().splitlines())
        return next((fields[-1] for fields in lines if fields[0] == parsed.packed.hex()), None)
    for _, name in socket.if_nameindex():
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def finish_collectives() -> None:
    """Wait for the collectives that are queued on the device; without end if a rank does not take part."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def init_ranks(rank: int, num_shards: int, store: dist.Store, ranks_per_node: int) -> None:
    """Join torch's default process group."""
    local_rank = rank % ranks_per_node
    # Transformers reads these; torchrun has set them for its processes, one a node.
    for variable, value in {"RANK": rank, "WORLD_SIZE": num_shards, "LOCAL_RANK": local_rank}.items():
        os.environ[variable] = str(value)
    common = {"store": store, "rank": rank, "world_size": num_shards, "timeout": _NEVER}
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **common)
    else:
        _bind_to_nodes(rank, ranks_per_node)
        dist.init_process_group("gloo", **common)


def _bind_to_nodes(rank: int, ranks_per_node: int) -> None:
    """Keep this thread and those that it starts on this rank's share of the NUMA nodes, where the memory lies that they
    write first. No effect with one NUMA node.
    """
    share = share_of_nodes(rank % ranks_per_node, ranks_per_node, os.sched_getaffinity(0))
    if share:
        os.sched_setaffinity(0, itertools.chain(*share.values()))
        parts = (f"{len(cpus)} CPUs of NUMA node {node}" for node, cpus in share.items())
        log.info("rank %d runs on %s", rank, ", ".join(parts))
