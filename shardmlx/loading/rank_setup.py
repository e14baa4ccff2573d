"""Set up a run on every rank before it loads: open the model, see the machines, limit memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx
import psutil

from shardmlx.common.digests import json_digest
from shardmlx.common.process_memory import memory_limit, resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.common_options import AUTO
from shardmlx.config.specs import MachineOptions, ModelSource
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine, read_hostfile, same_host
from shardmlx.costmodel.memory_limits import (
    MemoryBudget,
    MemoryLimits,
    PlannedMemory,
    ProcessMemory,
    budgets_of,
    unwired,
    within,
)
from shardmlx.costmodel.profile_file import Profile, read_profiles
from shardmlx.costmodel.workload import ModelSizes, Workload
from shardmlx.distributed.agreement import AgreedError, from_rank_0, on_all_ranks
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.loading.discovery import find_weights
from shardmlx.loading.transfer import LocalFiles
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import needed_shape
from shardmlx.models.config_reader import read_config
from shardmlx.models.family import APPROXIMATE
from shardmlx.models.shape import ModelShape
from shardmlx.pipeline.stage_map import StageMap, read_stage_map

SETUP_SECONDS = 12 * 3600.0
"""Seconds that ranks wait for one that downloads a large model, or tokenises much data."""

GROWTH = 8 << 20
"""Measured bytes that a process takes after setup: buffers of MPI and BLAS, late imports."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that every rank can read, its config.json, and this rank's path of adapters."""

    weights: LocalFiles
    adapters: str | None
    config: Mapping[str, Any]
    shape: ModelShape

    @property
    def path(self) -> Path:
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
    """Choose the device, find the model and ``adapters``, read config.json. Collective. Raises
    ``AgreedError``."""
    choose_device(transport, source.device, reporter.say)
    with transport.longer_timeout(SETUP_SECONDS):
        weights = find_weights(transport, reporter, source, adapters)
    with closing(weights):
        config = on_all_ranks(transport, "reading config.json", partial(read_config, weights.path))
        shape = on_all_ranks(
            transport, "checking config.json", lambda: needed_shape(open_model(str(weights.path)))
        )
        if shape.is_approximate:
            reporter.warn(APPROXIMATE)
        here = adapters if weights.adapters is None else weights.adapters
        yield OpenedModel(weights, here, config, shape)


Sizes = TypeVar("Sizes", bound=ModelSizes)


@dataclass(frozen=True, slots=True)
class PlanInputs(Generic[Sizes]):
    """The facts that a run is planned from; the same on all ranks. ``machines`` are the actual
    ones, ``cluster`` the same with no more memory than their ``budgets``; ``stage_map`` is the
    user's."""

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
    """Read headers on all ranks, the user's files on rank 0. Collective. Raises ``AgreedError``."""
    sizes = on_all_ranks(transport, "reading the headers", read_sizes)
    cluster = _find_cluster(transport, machines.hostfile, machines.profile)
    budgets = find_budgets(transport, cluster, machines.memory_limit, later)

    def check_profile() -> None:
        if isinstance(sizes, Workload):
            for rank in range(cluster.size):
                cluster.clock(rank, sizes)

    # Find a profile of other work or other machines before anything is loaded.
    on_all_ranks(transport, "checking the profile", check_profile)
    given = from_rank_0(
        transport,
        "reading the stage map",
        lambda: None if stage_map is None else read_stage_map(stage_map),
    )
    return PlanInputs(sizes, within(cluster, budgets), budgets, given, cluster)


def measure_again(
    transport: Transport, inputs: PlanInputs[Sizes], machines: MachineOptions
) -> PlanInputs[Sizes]:
    """Measure the processes' bytes, now that rank 0 holds the data. All ranks must call it."""
    budgets = find_budgets(transport, inputs.machines, machines.memory_limit)
    return replace(inputs, cluster=within(inputs.machines, budgets), budgets=budgets)


def _find_cluster(transport: Transport, hosts_file: str | None, profiles: str | None) -> Cluster:
    """Return the ranks' machines: their memory, and the facts in rank 0's files. Collective."""

    def read_files() -> tuple[tuple[Machine, ...], Profile | None]:
        machines = () if hosts_file is None else read_hostfile(hosts_file)
        return machines, None if profiles is None else read_profiles(profiles)

    known, profile = from_rank_0(transport, "reading what the machines have", read_files)
    everyone = transport.all_gather(psutil.virtual_memory().total, "comparing machines")

    def share(host: str, memory: int) -> Machine:
        """Return a rank's share of a host: less memory than there is, if the hostfile says so."""
        ranks = transport.hosts.count(host)
        entry = next((each for each in known if same_host(each.host, host)), None)
        if entry is None:
            return Machine(host=host, memory=memory // ranks)
        flops = None if entry.flops is None else entry.flops / ranks
        memory = memory if entry.memory is None else min(memory, entry.memory)
        return replace(entry, host=host, slots=1, memory=memory // ranks, flops=flops)

    machines = tuple(map(share, transport.hosts, everyone))
    return Cluster(machines=machines, profile=profile, backend=this_backend())


def choose_device(transport: Transport, name: str, say: Callable[[str], object]) -> None:
    """Do ``use_device`` on all ranks, which must call it. Raises ``AgreedError``."""
    on_all_ranks(transport, "choosing the device", partial(use_device, name, say))


def use_device(name: str, say: Callable[[str], object]) -> None:
    """Compute on the ``cpu`` or the ``gpu``; ``auto`` leaves the choice to MLX. To be called before
    there are arrays. Raises ``UserError`` where MLX lacks the device."""
    if name != AUTO:
        device = mx.Device(getattr(mx, name))
        if not mx.is_available(device):
            raise UserError(f"--device {name}: MLX has none here", "use --device auto")
        mx.set_default_device(device)
        say(f"Computing on the {name.upper()}")


def this_backend() -> str:
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "metal"


def compare_plans(transport: Transport, digest: str) -> None:
    """Raise ``AgreedError`` unless all digests are equal. Collective, before the engine sends."""
    everyone = transport.all_gather(digest, "comparing plans")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise AgreedError(
                f"{transport.name(rank)}, unlike {transport.name(0)}, plans another run",
                "give all ranks the same model config.json",
            )


def find_budgets(
    transport: Transport, cluster: Cluster, limit: int | None, later: int = 0
) -> tuple[MemoryBudget, ...]:
    """Return each rank's memory budget, within the user's ``limit``. ``later`` are this rank's
    bytes for requests, outside MLX. Collective, when all have everything but their weights."""
    processes = transport.all_gather(process_memory(later), "comparing memory")
    return budgets_of(cluster, limit, processes)


def process_memory(later: int = 0) -> ProcessMemory:
    """Return this process's limits, and its bytes beside MLX's arrays, with ``later`` ones."""
    outside = resident_bytes() - mx.get_active_memory() - mx.get_cache_memory()
    return ProcessMemory(max(0, outside) + GROWTH + later, memory_limit(), working_set())


def working_set() -> int | None:
    """Return the bytes that macOS lets the GPU wire, of all processes; None if nothing is wired."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def limit_memory(
    rank: int,
    budgets: Sequence[MemoryBudget],
    planned: Sequence[PlannedMemory],
    backend: str,
    reporter: Reporter,
) -> tuple[MemoryLimits, ...]:
    """Limit this process to the plan of its ``rank``, before weights are loaded, so that they are
    wired first; return all ranks' limits. Warns if macOS would not keep the plan in memory."""
    for warning in unwired(budgets, planned):
        reporter.warn(warning)
    limits = tuple(
        MemoryLimits(budget, each, backend) for budget, each in zip(budgets, planned, strict=True)
    )
    set_limits(limits[rank])
    return limits


def set_limits(limits: MemoryLimits) -> None:
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
