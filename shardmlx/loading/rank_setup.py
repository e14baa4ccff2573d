"""Set up a run on every rank before it loads: open the model, look at the machines, agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx
import psutil

from shardmlx.common.digests import json_digest
from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import MachineOptions, ModelSource
from shardmlx.costmodel.cluster import Cluster, read_profiles
from shardmlx.costmodel.hostfile import Machine, read_hostfile, same_host
from shardmlx.costmodel.memory_limits import MemoryBudget, within
from shardmlx.costmodel.profile_file import Profile
from shardmlx.costmodel.workload import ModelSizes, Workload
from shardmlx.distributed.agreement import AgreedError, on_all_ranks, on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.loading.allocator import find_budgets
from shardmlx.loading.discovery import find_weights
from shardmlx.loading.transfer import Weights
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import needed_shape
from shardmlx.models.config_reader import read_config
from shardmlx.models.shape import ModelShape
from shardmlx.models.undeclared import APPROXIMATE
from shardmlx.pipeline.stage_map import StageMap, read_stage_map

SETUP_SECONDS = 12 * 3600.0
"""Seconds that ranks wait for one that downloads a large model, or tokenises much data."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that every rank can read, of which it knows config.json.

    ``adapters`` is this rank's path to the adapters that the model starts with.
    """

    weights: Weights
    adapters: str | None
    config: Mapping[str, Any]
    shape: ModelShape

    @property
    def path(self) -> Path:
        """The directory of the model on this rank."""
        return self.weights.path

    @property
    def digest(self) -> str:
        """Digest of config.json, which identifies the model."""
        return json_digest(self.config)

    @property
    def max_positions(self) -> int | None:
        """Limit of tokens in a sequence, if the model states one."""
        return self.config.get("max_position_embeddings")


@contextmanager
def open_on_all_ranks(
    transport: Transport, reporter: Reporter, source: ModelSource, adapters: str | None
) -> Iterator[OpenedModel]:
    """Find the model and its ``adapters`` on all ranks, and read config.json. Nothing is loaded.

    All ranks must call it. Raises ``AgreedError``.
    """
    with transport.longer_timeout(SETUP_SECONDS):
        weights = find_weights(
            transport,
            reporter,
            source.model,
            mode=source.weights,
            cache=source.weight_cache,
            revision=source.revision,
            adapters=adapters,
        )
    with weights:
        config = on_all_ranks(transport, "reading config.json", partial(read_config, weights.path))
        shape = on_all_ranks(
            transport, "checking config.json", lambda: needed_shape(open_model(str(weights.path)))
        )
        if not shape.is_declared:
            reporter.warn(APPROXIMATE)
        here = adapters if weights.adapters is None else weights.adapters
        yield OpenedModel(weights, here, config, shape)


Sizes = TypeVar("Sizes", bound=ModelSizes)


@dataclass(frozen=True, slots=True)
class PlanInputs(Generic[Sizes]):
    """The facts that a run is planned from; the same on all ranks.

    ``sizes`` are the model's, ``machines`` the actual ones, ``cluster`` the same with no more
    memory than their ``budgets``, and ``stage_map`` is the user's, if there is one.
    """

    sizes: Sizes
    cluster: Cluster
    budgets: tuple[MemoryBudget, ...]
    stage_map: StageMap | None
    machines: Cluster


def gather_plan_inputs(
    transport: Transport,
    read_sizes: Callable[[], Sizes],
    machines: MachineOptions,
    stage_map: str | None,
    later: int = 0,
) -> PlanInputs[Sizes]:
    """Read the model's headers on every rank, and the user's files on rank 0.

    ``later`` is as in ``find_budgets``. All ranks must call it. Raises ``AgreedError``.
    """
    sizes = on_all_ranks(transport, "reading the headers", read_sizes)
    cluster = _find_cluster(transport, machines.hostfile, machines.profile)
    budgets = find_budgets(transport, cluster, machines.memory_limit, later)
    if isinstance(sizes, Workload):
        # Find a profile of other work or other machines before anything is loaded.
        on_all_ranks(transport, "checking the profile", partial(_check_profile, sizes, cluster))
    given = _read_given_map(transport, stage_map)
    return PlanInputs(sizes, within(cluster, budgets), budgets, given, cluster)


def measure_again(
    transport: Transport, inputs: PlanInputs[Sizes], machines: MachineOptions
) -> PlanInputs[Sizes]:
    """Measure the processes' bytes, now that rank 0 holds tokenizer and data.

    All ranks must call it.
    """
    budgets = find_budgets(transport, inputs.machines, machines.memory_limit)
    return replace(inputs, cluster=within(inputs.machines, budgets), budgets=budgets)


def _check_profile(workload: Workload, cluster: Cluster) -> None:
    for rank in range(cluster.size):
        cluster.clock(rank, workload, workload.batch.recomputed)


def _find_cluster(transport: Transport, hosts_file: str | None, profiles: str | None) -> Cluster:
    """Return the machines that the ranks run on: their memory, and the facts in rank 0's files.

    All ranks must call it. Raises ``AgreedError``.
    """
    known, profile = transport.broadcast(
        on_rank_0(
            transport,
            "reading what the machines have",
            partial(_read_machines, hosts_file, profiles),
        ),
        what="machines",
    )
    everyone = transport.all_gather(psutil.virtual_memory().total, "comparing machines")
    hosts = transport.hosts
    return Cluster(
        machines=tuple(
            _machine(host, has // hosts.count(host), known, hosts.count(host))
            for host, has in zip(hosts, everyone, strict=True)
        ),
        profile=profile,
        backend=this_backend(),
    )


def this_backend() -> str:
    """Return the name of MLX's backend here."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "metal"


def _read_machines(
    hosts_file: str | None, profiles: str | None
) -> tuple[tuple[Machine, ...], Profile | None]:
    machines = () if hosts_file is None else read_hostfile(hosts_file)
    return machines, None if profiles is None else read_profiles(profiles)


def _read_given_map(transport: Transport, path: str | None) -> StageMap | None:
    """Return the stage map in rank 0's file, if there is one.

    All ranks must call it. Raises ``AgreedError``.
    """
    given = on_rank_0(
        transport, "reading the stage map", lambda: None if path is None else read_stage_map(path)
    )
    stage_map: StageMap | None = transport.broadcast(given, what="stage map")
    return stage_map


def _machine(host: str, memory: int, known: Sequence[Machine], ranks: int) -> Machine:
    """Return a rank's share of a host, with the hostfile's facts: less memory than there is, if the
    rank is to have no more."""
    entry = next((each for each in known if same_host(each.host, host)), None)
    if entry is None:
        return Machine(host=host, memory=memory)
    flops = None if entry.flops is None else entry.flops / ranks
    memory = memory if entry.memory is None else min(memory, entry.memory // ranks)
    return replace(entry, host=host, slots=1, memory=memory, flops=flops)


def compare_plans(transport: Transport, digest: str) -> None:
    """Check, before the first message of the engine, that all ranks have the same plan.

    ``digest`` is that of this rank's plan. All ranks must call it. Raises ``AgreedError``.
    """
    everyone = transport.all_gather(digest, "comparing plans")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise AgreedError(
                f"{transport.name(rank)}, unlike {transport.name(0)}, plans another run",
                "give all ranks the same model config.json",
            )
