"""MLX's limits on each rank: from the plan, the machine, and what the user allows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.common.units import GIB, MIB, parse_bytes
from shardmlx.config.inference import InferenceConfig
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.rank_setup import process_memory, set_limits
from shardmlx.modelfiles.parts import read_shape
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.layout import trainable_stages
from shardmlx.planning.memory.limits import (
    BOUND_FRACTION,
    GPU_FRACTION,
    LEAST_CACHE,
    MemoryBudget,
    MemoryLimits,
    PlannedMemory,
    ProcessMemory,
    budgets_of,
    exceeded,
    how_to_allow,
    limit_for,
    unwired,
    within,
    would_take,
)
from shardmlx.planning.time.predict import planned_memory
from shardmlx.training.datasets import longest_input
from testbed.tiny_models import tiny_config
from tests.helpers.workloads import workload


def cluster(*machines: tuple[str, int | None]) -> Cluster:
    return Cluster(machines=tuple(Machine(host=host, memory=memory) for host, memory in machines))


MACS = cluster(("studio", 64 * GIB), ("mini", 16 * GIB))
ONE_MAC = cluster(("studio", 32 * GIB), ("studio", 32 * GIB))
"""Two ranks, each with its share."""


PLAN = PlannedMemory(peak=10 * GIB, resident=6 * GIB)


def metal(*gib: int, outside: int = 0) -> list[ProcessMemory]:
    """Processes on machines whose GPUs may wire so much."""
    return [ProcessMemory(outside, working_set=each * GIB) for each in gib]


# What a rank may use


def test_a_rank_may_use_the_part_of_its_machine_that_plans_count_on() -> None:
    assert budgets_of(MACS) == (
        MemoryBudget("studio", 48 * GIB, "75% of the machine's memory", 64 * GIB),
        MemoryBudget("mini", 12 * GIB, "75% of the machine's memory", 16 * GIB),
    )
    assert budgets_of(replace(MACS, memory_fraction=0.5))[1].nbytes == 8 * GIB


def test_ranks_on_one_machine_share_its_memory_and_what_it_wires() -> None:
    budget, same = budgets_of(ONE_MAC)
    assert budget == same
    assert (budget.nbytes, budget.most) == (24 * GIB, 32 * GIB)
    assert budget.reason == "75% of the machine's memory, shared by 2 ranks"
    budget, same = budgets_of(ONE_MAC, None, metal(40, 40))
    assert (budget.nbytes, budget.most, budget.wirable) == (20 * GIB, 32 * GIB, 20 * GIB)
    assert budget.reason == "what macOS wires for the GPU, shared by 2 ranks"
    (budget, _) = budgets_of(ONE_MAC, 16 * GIB, metal(24, 24))
    assert MemoryLimits(budget, PLAN, "metal").wired == 12 * GIB


def test_what_macos_wires_counts_instead_of_a_part_of_the_machine() -> None:
    # sudo sysctl iogpu.wired_limit_mb=56000
    budget, other = budgets_of(MACS, None, metal(56, 11))
    assert (budget.nbytes, budget.reason) == (56 * GIB, "what macOS wires for the GPU")
    assert (other.nbytes, other.wirable) == (11 * GIB, 11 * GIB)
    # No rank uses more than the hostfile says.
    assert budgets_of(cluster(("studio", 8 * GIB)), None, metal(48))[0].nbytes == 8 * GIB


def test_a_hostfile_may_know_what_macos_wires() -> None:
    studio, mini = MACS.machines
    small = replace(MACS, machines=(studio, replace(mini, wired=11 * GIB)))
    budget = budgets_of(small)[1]
    assert budget.nbytes == small.capacity(1) == 11 * GIB
    assert budget.reason == "what macOS wires for the GPU, by the hostfile"
    # What Metal itself says on the machine counts more, and a limit of the user's most.
    assert budgets_of(small, None, metal(10, 10))[1].nbytes == 10 * GIB
    assert within(small, budgets_of(small, 5 * GIB)).capacity(1) == 5 * GIB


def in_cgroup(nbytes: int, outside: int = 0) -> ProcessMemory:
    return ProcessMemory(outside, nbytes)


def test_a_memory_cgroup_counts_if_it_is_the_least() -> None:
    studio, mini = budgets_of(MACS, processes=(in_cgroup(2 * GIB), in_cgroup(99 * GIB)))
    assert studio.nbytes == studio.most == BOUND_FRACTION * 2 * GIB
    assert (studio.reason, mini.reason) == ("the memory cgroup", "75% of the machine's memory")
    (studio, _) = budgets_of(MACS, 3 * GIB, processes=(in_cgroup(2 * GIB), ProcessMemory()))
    assert studio.reason == "the memory cgroup; --memory-limit is more"


def test_ranks_in_one_cgroup_of_a_host_share_it() -> None:
    together = budgets_of(ONE_MAC, processes=(in_cgroup(4 * GIB), in_cgroup(4 * GIB)))
    assert {budget.process for budget in together} == {BOUND_FRACTION * 2 * GIB}
    assert together[0].reason == "the memory cgroup, shared by 2 ranks"
    hosts = budgets_of(MACS, processes=(in_cgroup(4 * GIB), in_cgroup(4 * GIB)))
    assert {budget.process for budget in hosts} == {BOUND_FRACTION * 4 * GIB}


def test_a_gpu_with_memory_of_its_own_bounds_the_arrays() -> None:
    card = ProcessMemory(GIB, gpu=24 * GIB)
    (mine, other) = budgets_of(ONE_MAC, processes=(card, card))
    assert {mine.nbytes, other.nbytes} == {GPU_FRACTION * 12 * GIB}
    assert mine.reason == "the GPU's own memory, shared by 2 ranks"
    assert mine.wirable is None
    (asked, _) = budgets_of(ONE_MAC, 20 * GIB, processes=(card, card))
    assert asked.nbytes == asked.most - GIB == GPU_FRACTION * 12 * GIB
    # Where the GPU has the memory of the machine, it bounds nothing.
    (unified, _) = budgets_of(ONE_MAC, processes=(ProcessMemory(gpu=64 * GIB),) * 2)
    assert unified.nbytes == budgets_of(ONE_MAC)[0].nbytes


def test_of_the_limit_of_a_process_its_arrays_have_what_the_rest_of_it_leaves() -> None:
    process = ProcessMemory(GIB // 2)
    studio, mini = budgets_of(MACS, 8 * GIB, processes=(process, process))
    assert (studio.nbytes, studio.process) == (7.5 * GIB, 8 * GIB)
    assert mini.nbytes == 7.5 * GIB
    # Metal's working set is of arrays alone.
    (arrays, _) = budgets_of(MACS, None, metal(40, 11, outside=GIB // 2))
    assert (arrays.nbytes, arrays.process) == (40 * GIB, 40.5 * GIB)
    taken = would_take(1, mini, round(7.7 * GIB))
    assert [word for word in taken.split() if word[0].isdigit()] == ["1", "8.20", "0.50", "8.00"]
    assert how_to_allow((studio, mini), planned(1, 7.7)) == "give --memory-limit 8.3GiB or more, "
    limits = MemoryLimits(mini, planned(1)[0], "cpu")
    assert limits.as_json()["process_limit_bytes"] == 8 * GIB


def test_the_users_limit_wins_but_no_machine_has_more_than_it_has() -> None:
    studio, mini = budgets_of(MACS, 20 * GIB, metal(48, 11))
    assert (studio.nbytes, studio.reason) == (20 * GIB, "--memory-limit")
    assert (mini.nbytes, mini.reason) == (
        16 * GIB,
        "all that there is; --memory-limit is more",
    )
    assert mini.wirable == 11 * GIB
    # More than plans count on, if the user says so.
    assert budgets_of(MACS, 14 * GIB)[1].nbytes == 14 * GIB


def test_the_layers_are_divided_for_what_each_rank_may_use() -> None:
    limited = within(MACS, budgets_of(MACS, 20 * GIB))
    assert [limited.capacity(rank) for rank in range(2)] == [20 * GIB, 16 * GIB]
    unknown = cluster(("studio", None), ("mini", 16 * GIB))
    assert within(unknown, budgets_of(unknown)).capacity(0) == math.inf
    assert within(unknown, budgets_of(unknown, 5 * GIB)).capacity(0) == 5 * GIB


# What is refused


def planned(*peaks: float) -> list[PlannedMemory]:
    return [PlannedMemory(round(peak * GIB), round(peak * GIB / 2)) for peak in peaks]


@pytest.mark.parametrize(
    ("limit", "peaks", "enough"),
    [
        (8 * GIB, (7.9, 8.11), "8.2GiB"),
        (100 * MIB, (0.1205, 0.1), "124MiB"),
        (None, (40, 13), "40GiB"),
        (None, (40, 17), ""),  # more than the mini has
    ],
)
def test_the_remedy_is_the_least_limit_that_the_machines_have(
    limit: int | None, peaks: tuple[float, ...], enough: str
) -> None:
    remedy = how_to_allow(budgets_of(MACS, limit), planned(*peaks))
    assert (enough in remedy) if enough else not remedy


@pytest.mark.parametrize(
    "nbytes", [1, MIB, MIB + 1, GIB - MIB + 1, GIB, GIB + 1, 19 * GIB // 10 + 1]
)
def test_the_limit_in_a_remedy_is_enough_when_it_is_typed(nbytes: int) -> None:
    assert nbytes <= parse_bytes(limit_for(nbytes)) <= 1.1 * nbytes + MIB


# The limits


def budget(nbytes: int, wirable: int | None = 24 * GIB) -> MemoryBudget:
    return MemoryBudget("studio", nbytes, "--memory-limit", 32 * GIB, wirable)


@pytest.mark.parametrize(
    ("nbytes", "backend", "plan", "expected"),
    [
        (20 * GIB, "metal", PLAN, (5 * GIB, 15 * GIB)),
        (10 * GIB, "metal", PLAN, (4 * GIB, 10 * GIB)),
        (GIB, "metal", PlannedMemory(1000, 900), (LEAST_CACHE, LEAST_CACHE + 1000)),
        (20 * GIB, "cpu", PLAN, (LEAST_CACHE, None)),
        (10 * GIB + 5, "cpu", PLAN, (5, None)),
    ],
)
def test_the_cache_holds_what_a_step_frees_within_the_limit(
    nbytes: int, backend: str, plan: PlannedMemory, expected: tuple[int, int | None]
) -> None:
    """On Metal the GPU keeps plan and cache in memory; on a CPU nothing is wired."""
    of_rank = MemoryLimits(budget(nbytes), plan, backend)
    assert (of_rank.memory, of_rank.cache, of_rank.wired) == (nbytes, *expected)


def test_metrics_have_the_limits_with_their_reasons() -> None:
    assert MemoryLimits(budget(20 * GIB), PLAN, "metal").as_json() == {
        "planned_peak_bytes": 10 * GIB,
        "planned_process_bytes": 10 * GIB,
        "memory_limit_bytes": 20 * GIB,
        "process_limit_bytes": 20 * GIB,
        "cache_limit_bytes": 5 * GIB,
        "wired_limit_bytes": 15 * GIB,
        "reasons": {"memory": "--memory-limit"},
    }


def test_a_plan_that_macos_cannot_keep_in_memory_is_warned_of() -> None:
    budgets = budgets_of(MACS, None, metal(48, 11))
    assert unwired(budgets, planned(40, 11)) == ()
    (warning,) = unwired(budgets, planned(40, 11.5))
    assert all(each in warning for each in ("rank 1 (mini)", "11.50 GiB", "11.00 GiB"))


def test_who_took_more_than_the_limit_is_named_afterwards() -> None:
    of_ranks = [
        MemoryLimits(budget(20 * GIB), PLAN, "metal"),
        MemoryLimits(budget(11 * GIB), PLAN, "metal"),
    ]
    assert exceeded(of_ranks, ("a", "b"), (20 * GIB, 11 * GIB)) == ()
    (warning,) = exceeded(of_ranks, ("a", "b"), (20 * GIB, 12 * GIB))
    assert all(each in warning for each in ("rank 1 (b)", "12.00", "11.00", "10.00 GiB"))


@pytest.mark.parametrize("config", [TrainConfig, InferenceConfig])
def test_the_option_is_a_size_above_nothing(
    config: type[TrainConfig] | type[InferenceConfig],
) -> None:
    assert config.from_flat(memory_limit="12GiB").machines.memory_limit == 12 * GIB
    for wrong in ("12 apples", 0):
        with pytest.raises(UserError):
            config.from_flat(memory_limit=wrong)


# From the plan of a run


MACHINES = cluster(*[("studio", 8 * GIB)] * 4)


def test_packed_texts_share_a_row_as_long_as_all_of_them() -> None:
    packed = workload(read_shape(tiny_config()), pack=True)
    setup = MACHINES.setup(packed, 4, 64, 1)
    assert (setup.rows, setup.length) == (1, 256)


def test_long_sequences_that_only_pass_forward_count_too() -> None:
    """Of the validation: no activations are held for them, but their logits are large."""
    stage_map = StageMap(Partition(((0, 5), (5, 8))), (0, 1))
    work = workload(read_shape(tiny_config()), num_layers=4)
    plan = Plan(Mesh(2, 2), stage_map, "1f1b", 4, 1, trainable_stages(work, stage_map))

    def peaks(length: int) -> list[int]:
        return [p.peak for p in planned_memory(plan, work, MACHINES, (64, length))]

    assert peaks(0)[:2] == peaks(0)[2:], "replicas take the same"
    assert peaks(32) == peaks(0)
    assert peaks(0) < peaks(2048)
    of_step = planned_memory(plan, work, MACHINES, (2048, 0))
    assert peaks(2048) < [each.peak for each in of_step]


@pytest.mark.parametrize(("longest", "length"), [(5, 32), (33, 64), (64, 64), (1000, 99)])
def test_the_plan_counts_on_the_longest_sequence_of_the_data(longest: int, length: int) -> None:
    assert longest_input(np.array([3, longest, 2]), 100) == length


# MLX


@pytest.fixture
def mlx_limits() -> Iterator[None]:
    before = mx.get_memory_limit(), mx.set_cache_limit(0)
    yield
    mx.set_memory_limit(before[0])
    mx.set_cache_limit(before[1])


def test_mlx_has_the_limits(mlx_limits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    set_limits(MemoryLimits(budget(20 * GIB), PLAN, "metal"))
    assert (mx.get_memory_limit(), mx.set_cache_limit(0), wired) == (20 * GIB, 5 * GIB, [15 * GIB])
    set_limits(MemoryLimits(budget(20 * GIB, None), PLAN, "cpu"))
    assert (mx.set_cache_limit(0), wired) == (LEAST_CACHE, [15 * GIB])


def test_a_process_says_what_its_machine_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 11 * GIB})
    assert process_memory().working_set == 11 * GIB
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "a CPU"})
    assert process_memory().working_set is None


def test_a_process_says_what_memory_its_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_memory().gpu is None  # tests compute on the CPU
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 24 * GIB})
    assert process_memory().gpu == 24 * GIB
