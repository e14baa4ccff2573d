"""Who slows the others down."""

from dataclasses import replace
from typing import Any

import pytest

from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.profile_file import MachineProfile, Profile, Sample, work_of
from shardmlx.costmodel.timing import Seconds
from shardmlx.modelfiles.parts import read_shape
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.stragglers import Straggler, Watch, compute_of_ranks
from tests.helpers.models_and_batches import tiny_config
from tests.helpers.workloads import workload

HOSTS = ("mac-studio", "mac-mini", "macbook", "old-mac")


def reports(watch: Watch, *measured: tuple[float, ...], predicted: float = 1.0) -> list[Straggler]:
    """Whom the watch names at reports of these seconds, each ``predicted`` of every rank."""
    found = []
    for number, seconds in enumerate(measured, start=1):
        found += watch.observe(10 * number, seconds, [predicted] * len(seconds))
    return found


def profiled(ranks: int) -> Watch:
    return Watch(HOSTS[:ranks], is_measured=True)


# With a profile


def test_a_rank_slower_than_predicted_beside_the_others_is_named_once() -> None:
    (straggler,) = reports(profiled(2), *[(1.2, 1.9)] * 8)
    assert straggler == Straggler(30, 1, "mac-mini", 1.9, 1.2)


def test_a_hiccup_is_no_straggler() -> None:
    slow, good = (1.0, 2.0), (1.0, 1.0)
    assert reports(profiled(2), slow, slow, good, slow, slow, good, slow, slow) == []


@pytest.mark.parametrize("seconds", [(1.0, 1.2), (3.0, 3.1), (0.1, 0.1), (0.6, 1.0)])
def test_what_all_share_and_what_is_as_predicted_names_nobody(seconds: tuple[float, ...]) -> None:
    assert reports(profiled(2), *[seconds] * 6) == []


def test_the_median_of_the_others_is_what_counts() -> None:
    found = reports(profiled(4), *[(1.0, 1.1, 5.0, 3.0)] * 6)
    assert [each.rank for each in found] == [2, 3]
    assert [each.expected_seconds for each in found] == pytest.approx([1.1, 1.1])


def test_one_rank_alone_and_missing_times_name_nobody() -> None:
    assert reports(profiled(1), *[(9.0,)] * 6) == []
    assert reports(profiled(2), *[(0.0, 9.0)] * 6) == []
    assert reports(profiled(2), *[(1.0, 9.0)] * 6, predicted=0.0) == []


# Without one


def test_without_a_profile_who_stays_as_it_was_is_no_straggler() -> None:
    assert reports(Watch(HOSTS[:2]), *[(1.0, 3.0)] * 9) == []
    assert reports(Watch(HOSTS[:2]), *[(2.0, 3.0)] * 3, *[(1.0, 3.0)] * 6) == []


def test_but_who_becomes_slower_than_it_was_is() -> None:
    (straggler,) = reports(Watch(HOSTS[:2]), *[(1.0, 3.0)] * 3, *[(1.0, 4.5)] * 3)
    assert (straggler.rank, straggler.step) == (1, 60)
    # A first report that warms up does not hide it.
    found = reports(Watch(HOSTS[:2]), (1.0, 9.0), *[(1.0, 3.0)] * 2, *[(1.0, 4.5)] * 3)
    assert [each.rank for each in found] == [1]


# Of a plan


WORK = workload(read_shape(tiny_config(layers=12)))


def cluster_of(ranks: int, **what: Any) -> Cluster:
    return Cluster(machines=tuple(Machine(host=host, **what) for host in HOSTS[:ranks]))


def plan_for(sizes: tuple[int, ...]) -> Plan:
    stage_map = StageMap.from_sizes(sizes)
    return Plan(Mesh(1, len(sizes)), stage_map, "1f1b", 8, 1, (True,) * len(sizes))


def test_ranks_compute_all_micro_batches_and_an_update() -> None:
    part = Seconds(1.0, 1.0, 0.5, 0.25)
    nothing = Seconds()
    sample = Sample(rows=1, length=64, layer=part, frozen=part, embedding=nothing, head=nothing)
    machines = tuple(MachineProfile(host, "M2", (sample,)) for host in HOSTS[:2])
    cluster = replace(cluster_of(2), profile=Profile(work_of(WORK), machines))
    plan = plan_for((4, 8))
    computed = compute_of_ranks(plan, WORK, cluster, 64)
    assert computed == [pytest.approx(8 * layers * 2.5 + layers * 0.25) for layers in (4, 8)]
