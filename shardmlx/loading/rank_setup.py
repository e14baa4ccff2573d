"""Set up a run before it loads: open the model on every rank, hear what the ranks have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import psutil

from shardmlx.common.digests import json_digest
from shardmlx.common.process_memory import memory_limit, resident_bytes
from shardmlx.common.reporter import Reporter
from shardmlx.config.common_options import AUTO
from shardmlx.config.specs import MachineOptions, ModelSource
from shardmlx.distributed.crew import Crew, together
from shardmlx.distributed.mlx_group import join_group
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.loading.discovery import find_adapter_files, find_model_files
from shardmlx.loading.local_files import LocalFiles
from shardmlx.loading.transfer import Needs, bring
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import needed_shape
from shardmlx.models.family import APPROXIMATE
from shardmlx.models.sizes.config_reader import read_config
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine, read_hostfile, same_host
from shardmlx.planning.facts.job_facts import Facts
from shardmlx.planning.facts.profile_file import read_profiles
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.memory.limits import MemoryLimits, ProcessMemory, budgets_of

GROWTH = 8 << 20
"""Measured bytes that a process takes after setup: buffers of MPI and BLAS, late imports."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that this rank can read, its config.json, and the path of adapters if there are
    some."""

    path: Path
    adapters: str | None
    config: Mapping[str, Any]
    shape: ModelShape

    @property
    def digest(self) -> str:
        """Digest of config.json, which identifies the model."""
        return json_digest(self.config)

    @property
    def max_positions(self) -> int | None:
        """Limit of tokens in a sequence, if the model states one."""
        return self.config.get("max_position_embeddings")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts that a rank alone knows: its machine's memory in bytes, its process's, and what MLX
    computes with there. On CUDA memory is planned by the rules of Metal, the ``backend``."""

    memory: int
    process: ProcessMemory
    computes_with: str

    @property
    def backend(self) -> str:
        """The backend by whose rules memory is planned: ``metal`` or ``cpu``."""
        return "cpu" if self.computes_with == "cpu" else "metal"


class ModelWorker:
    """The part of one rank in a run with a model: it opens the model, and loads its part of it.

    All ranks have one. Rank 0's ``Crew`` calls its methods on all of them. Must be closed.
    """

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        transport.activity.begin("loading")
        self.transport = transport
        self.reporter = reporter
        self.model_files = LocalFiles(transport, reporter)
        self.adapter_files = LocalFiles(transport, reporter)
        self._opened: OpenedModel | None = None
        self._all_sum: Callable[[mx.array], mx.array] | None = None

    def report_to(self, reporter: Reporter) -> None:
        """Say everything to this reporter from now on."""
        self.reporter = reporter
        self.model_files.report_to(reporter)
        self.adapter_files.report_to(reporter)

    @property
    def opened(self) -> OpenedModel:
        """The model, once ``open`` was called."""
        if self._opened is None:
            raise RuntimeError("the model is not open yet")
        return self._opened

    def use_device(self, name: str) -> None:
        """Compute on a device, see ``use_device`` of this module."""
        use_device(name, self.reporter.say)

    def open(self, adapters: str | None) -> str:
        """Read config.json, and return its digest. ``adapters`` are the path of adapters on rank 0,
        if there are some. Raises ``UserError``."""
        path = self.model_files.path
        config = read_config(path)
        shape = needed_shape(open_model(str(path)))
        here = str(self.adapter_files.path) if adapters else adapters
        self._opened = OpenedModel(path, here, config, shape)
        return self._opened.digest

    def facts(self) -> RankFacts:
        """Return what only this rank knows."""
        return RankFacts(psutil.virtual_memory().total, process_memory(), computes_with())

    def set_limits(self, limits: Sequence[MemoryLimits]) -> None:
        """Limit this process to its part of the plan, before weights are loaded, so that they are
        wired first."""
        set_limits(limits[self.transport.rank])

    @together
    def join_group(self, members: Sequence[Sequence[int]]) -> None:
        """Join the group of ranks that share layers, with the others: ``members[rank]``. May be
        called again."""
        if self._all_sum is None:
            mine = members[self.transport.rank]
            self._all_sum = join_group(self.transport, mine, self.reporter)

    @property
    def all_sum(self) -> Callable[[mx.array], mx.array]:
        """The sum over the ranks of the group, once it was joined."""
        if self._all_sum is None:
            raise RuntimeError("no group was joined yet")
        return self._all_sum

    def close_files(self) -> None:
        """Remove temporary files, once the weights are loaded. May be called again."""
        self.model_files.close()
        self.adapter_files.close()

    def close(self) -> None:
        """Let go of all that the run holds, even after loading failed."""
        self.close_files()


def open_everywhere(
    crew: Crew[ModelWorker], source: ModelSource, adapters: str | None, reporter: Reporter
) -> OpenedModel:
    """Choose the device, find the model and ``adapters``, and read config.json on every rank;
    return rank 0's. Raises ``UserError``."""
    crew.all(ModelWorker.use_device, source.device)
    find_model_files(crew.part(LocalFiles, "model_files"), source, reporter)
    if adapters:
        files = crew.part(LocalFiles, "adapter_files")
        find_adapter_files(files, source, adapters, reporter)
    first, *others = crew.all(ModelWorker.open, adapters)
    for rank, digest in enumerate(others, 1):
        if digest != first:
            name = crew.transport.name
            raise UserError(
                f"{name(rank)}, unlike {name(0)}, has another model",
                "give all ranks the same model config.json",
            )
    if crew.worker.opened.shape.is_approximate:
        reporter.warn(APPROXIMATE)
    return crew.worker.opened


def join_groups(crew: Crew[ModelWorker], mesh: Mesh) -> None:
    """Let the ranks that share layers join a group each, if any do."""
    if mesh.tp > 1:
        crew.all(ModelWorker.join_group, [mesh.sharing(rank) for rank in range(mesh.size)])


def bring_weights(crew: Crew[ModelWorker], needs: Needs, reporter: Reporter) -> None:
    """Bring each rank the tensors that it lacks of the model, and of the adapters, from which all
    ranks have built theirs, lazily. Raises ``UserError``."""
    bring(crew.part(LocalFiles, "model_files"), needs, reporter, "weights")
    bring(crew.part(LocalFiles, "adapter_files"), needs, reporter, "adapters")


def gather_facts(
    crew: Crew[ModelWorker],
    model: ModelSizes,
    options: MachineOptions,
    stage_map: str | None,
    later: int = 0,
) -> Facts:
    """Hear what the ranks have, and read the user's files on rank 0. ``later`` are rank 0's bytes
    for requests, outside MLX. Raises ``UserError``."""
    facts = crew.all(ModelWorker.facts)
    known = () if options.hostfile is None else read_hostfile(options.hostfile)
    profile = None if options.profile is None else read_profiles(options.profile)
    hosts = crew.transport.hosts
    machines = tuple(
        replace(_share(known, hosts, host, each.memory), backend=each.computes_with)
        for host, each in zip(hosts, facts, strict=True)
    )
    cluster = Cluster(machines=machines, profile=profile, backend=facts[0].backend)
    given = None if stage_map is None else read_stage_map(stage_map)
    processes = [each.process for each in facts]
    processes[0] = replace(processes[0], outside=processes[0].outside + later)
    return Facts(
        model=model,
        machines=cluster,
        budgets=budgets_of(cluster, options.memory_limit, processes),
        stage_map=given,
        digest=crew.worker.opened.digest,
    )


def measure_again(crew: Crew[ModelWorker], facts: Facts, options: MachineOptions) -> Facts:
    """Measure the processes' bytes, when all have everything but their weights."""
    processes = [each.process for each in crew.all(ModelWorker.facts)]
    return replace(facts, budgets=budgets_of(facts.machines, options.memory_limit, processes))


def _share(known: Sequence[Machine], hosts: Sequence[str], host: str, memory: int) -> Machine:
    """Return a rank's share of a host: less memory than there is, if the hostfile says so."""
    ranks = hosts.count(host)
    entry = next((each for each in known if same_host(each.host, host)), None)
    if entry is None:
        return Machine(host=host, memory=memory // ranks)
    flops = None if entry.flops is None else entry.flops / ranks
    memory = memory if entry.memory is None else min(memory, entry.memory)
    return replace(entry, host=host, slots=1, memory=memory // ranks, flops=flops)


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
    """Return the backend of MLX's default device: ``cpu`` or ``metal``."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "metal"


def computes_with() -> str:
    """Return what MLX computes with in this process: ``cpu``, ``cuda`` or ``metal``."""
    backend = this_backend()
    return "cuda" if backend != "cpu" and mx.cuda.is_available() else backend


def process_memory() -> ProcessMemory:
    """Return this process's limits, and its bytes beside MLX's arrays."""
    outside = resident_bytes() - mx.get_active_memory() - mx.get_cache_memory()
    return ProcessMemory(max(0, outside) + GROWTH, memory_limit(), working_set(), gpu_memory())


def working_set() -> int | None:
    """Return the bytes that macOS lets the GPU wire, of all processes; None if nothing is wired."""
    size = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def gpu_memory() -> int | None:
    """Return the bytes of the GPU that CUDA computes on; None on a CPU, and on a Mac, whose GPU has
    the machine's memory."""
    if computes_with() != "cuda":
        return None
    size = mx.device_info().get("total_memory")
    return None if size is None else int(size)


def set_limits(limits: MemoryLimits) -> None:
    """Set MLX's limits in this process."""
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    if limits.wired is not None:
        mx.set_wired_limit(limits.wired)
