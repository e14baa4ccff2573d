"""What all runs need before they load, on every rank: the machines, and that all mean the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import psutil

from shardmlx.costmodel.cluster import Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine, read_hostfile, same_host
from shardmlx.costmodel.profile_file import Profile
from shardmlx.distributed.agreement import AgreedError, on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.pipeline.stage_map import StageMap, read_stage_map

SETUP_SECONDS = 12 * 3600.0
"""One rank may download a large model, or tokenise much data, for hours while others wait."""


def model_digest(model_config: Mapping[str, Any]) -> str:
    """Which model this is, by its config.json."""
    return hashlib.sha256(json.dumps(model_config, sort_keys=True).encode()).hexdigest()


def cluster_of(transport: Transport, hosts_file: str | None, profiles: str | None) -> Cluster:
    """The machines that the ranks run on: their memory, and what rank 0's files say of them.

    Collective.
    """

    def read() -> tuple[tuple[Machine, ...], Profile | None]:
        machines = () if hosts_file is None else read_hostfile(hosts_file)
        return machines, None if profiles is None else read_profiles(profiles)

    known, profile = transport.broadcast(
        on_rank_0(transport, "reading what the machines have", read), what="machines"
    )
    everyone = transport.all_gather(psutil.virtual_memory().total, "comparing machines")
    hosts = transport.hosts
    return Cluster(
        machines=tuple(
            _machine(host, has // hosts.count(host), known, hosts.count(host))
            for host, has in zip(hosts, everyone, strict=True)
        ),
        profile=profile,
        backend="cpu" if mx.default_device() == mx.Device(mx.cpu) else "metal",
    )


def given_stage_map(transport: Transport, path: str | None) -> StageMap | None:
    """The stage map in rank 0's file, if there is one. Collective."""
    given = on_rank_0(
        transport, "reading the stage map", lambda: None if path is None else read_stage_map(path)
    )
    stage_map: StageMap | None = transport.broadcast(given, what="stage map")
    return stage_map


def _machine(host: str, memory: int, known: Sequence[Machine], ranks: int) -> Machine:
    """A rank's share of a host, with what the hostfile says of it: less memory than there is, where
    it is to have no more."""
    entry = next((each for each in known if same_host(each.host, host)), None)
    if entry is None:
        return Machine(host=host, memory=memory)
    flops = None if entry.flops is None else entry.flops / ranks
    memory = memory if entry.memory is None else min(memory, entry.memory // ranks)
    return replace(entry, host=host, slots=1, memory=memory, flops=flops)


def compare_plans(transport: Transport, digest: str) -> None:
    """Before the first message of the engine: all ranks mean the same run. Collective.

    ``digest`` is that of this rank's plan.
    """
    everyone = transport.all_gather(digest, "comparing plans")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise AgreedError(
                f"{transport.name(rank)}, unlike {transport.name(0)}, plans another run: give all "
                "ranks the same model config.json"
            )
