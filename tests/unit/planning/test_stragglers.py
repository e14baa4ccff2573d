"""Who slows the others down."""

from collections.abc import Sequence

import pytest

from shardmlx.modelfiles.parts import read_shape
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.stragglers import Straggler, Watch, Work
from testbed.tiny_models import tiny_config
from tests.helpers.workloads import workload

HOSTS = ("mac-studio", "mac-mini", "macbook", "old-mac")
WORKLOAD = workload(read_shape(tiny_config(layers=8)), fine_tune_type="full")


def reports(ranks: int, *measured: tuple[float, ...]) -> list[Straggler]:
    """Whom the watch names at reports of these seconds."""
    watch, found = Watch(HOSTS[:ranks]), []
    for number, seconds in enumerate(measured, start=1):
        found += watch.observe(10 * number, seconds)
    return found


def after_usual(*measured: tuple[float, ...]) -> list[Straggler]:
    """Whom it names if all ranks take a second in the first reports."""
    ranks = len(measured[0])
    return reports(ranks, *[(1.0,) * ranks] * 3, *measured)


def test_a_rank_slower_than_usual_beside_the_others_is_named_once() -> None:
    (straggler,) = after_usual(*[(1.2, 1.9)] * 8)
    assert (straggler.step, straggler.rank, straggler.host) == (60, 1, "mac-mini")
    assert (straggler.compute_seconds, straggler.expected_seconds) == (1.9, 1.2)
    assert "shardmlx profile" in straggler.remedy


def test_a_hiccup_is_no_straggler() -> None:
    slow, good = (1.0, 2.0), (1.0, 1.0)
    assert after_usual(slow, slow, good, slow, slow, good, slow, slow) == []


@pytest.mark.parametrize("seconds", [(1.0, 1.2), (3.0, 3.1), (0.1, 0.1), (0.6, 1.0)])
def test_what_all_share_and_what_is_as_usual_names_nobody(seconds: tuple[float, ...]) -> None:
    assert after_usual(*[seconds] * 6) == []


def test_the_median_of_the_others_is_what_counts() -> None:
    found = after_usual(*[(1.0, 1.1, 5.0, 3.0)] * 6)
    assert [each.rank for each in found] == [2, 3]
    assert [each.expected_seconds for each in found] == pytest.approx([1.1, 1.1])


def test_one_rank_alone_and_missing_times_name_nobody() -> None:
    assert after_usual(*[(9.0,)] * 6) == []
    assert after_usual(*[(0.0, 9.0)] * 6) == []


def test_who_stays_as_it_was_is_no_straggler() -> None:
    assert reports(2, *[(1.0, 3.0)] * 9) == []
    assert reports(2, *[(2.0, 3.0)] * 3, *[(1.0, 3.0)] * 6) == []


def test_but_who_becomes_slower_than_it_was_is() -> None:
    (straggler,) = reports(2, *[(1.0, 3.0)] * 3, *[(1.0, 4.5)] * 3)
    assert (straggler.rank, straggler.step) == (1, 60)
    # A first report that warms up does not hide it.
    found = reports(2, (1.0, 9.0), *[(1.0, 3.0)] * 2, *[(1.0, 4.5)] * 3)
    assert [each.rank for each in found] == [1]


# From the first step on


def from_the_start(
    mesh: Mesh,
    work: Sequence[float],
    *measured: tuple[float, ...],
    rows: Sequence[int] = (4, 4),
    is_measured: bool = False,
) -> list[Straggler]:
    known = Work(mesh, tuple(work), tuple(rows[: mesh.dp]), is_measured=is_measured)
    watch = Watch(HOSTS[: mesh.size], known)
    return [
        each for step, seconds in enumerate(measured, 1) for each in watch.observe(step, seconds)
    ]


def test_a_replica_that_is_slow_from_its_first_step_is_named_with_the_rows_that_fit_it() -> None:
    """The first report may warm up: after three more it is known."""
    (slow,) = from_the_start(Mesh(2, 2), [8.0, 8.0, 8.0, 8.0], *[(1.0, 1.1, 1.0, 1.9)] * 6)
    assert (slow.step, slow.rank, slow.host) == (4, 3, "old-mac")
    assert slow.compute_seconds == 1.9
    assert slow.expected_seconds == pytest.approx(1.1)
    assert slow.remedy == "give --replica-rows 5,3"
    assert "other replicas" in slow.others


def test_what_a_replica_takes_for_more_rows_is_right() -> None:
    assert from_the_start(Mesh(2, 1), [6.0, 2.0], *[(3.0, 1.1)] * 6, rows=(6, 2)) == []
    (slow,) = from_the_start(Mesh(2, 1), [6.0, 2.0], *[(3.0, 2.0)] * 6, rows=(6, 2))
    assert slow.rank == 1
    assert slow.expected_seconds == pytest.approx(1.0)
    assert "look what else runs there" in slow.remedy, "2 rows are what it can do"


def test_a_stage_that_is_slow_for_its_layers_is_named() -> None:
    mesh, layers = Mesh(1, 3), [10.0, 20.0, 10.0]
    assert from_the_start(mesh, layers, *[(1.0, 2.0, 1.6)] * 6) == []
    (slow,) = from_the_start(mesh, layers, *[(1.0, 2.0, 2.0)] * 6)
    assert (slow.step, slow.rank) == (4, 2)
    assert slow.expected_seconds == pytest.approx(1.0)
    assert "other stages" in slow.others
    assert "shardmlx profile" in slow.remedy
    (slow,) = from_the_start(mesh, layers, *[(1.0, 2.0, 1.4)] * 6, is_measured=True)
    assert slow.rank == 2, "of measured times more is expected"


def test_both_replicas_of_a_slow_stage_are_named_and_one_slow_replica_is_no_slow_stage() -> None:
    found = from_the_start(Mesh(2, 2), [1.0] * 4, *[(1.0, 3.0, 1.0, 3.1)] * 6)
    assert [(each.rank, "stages" in each.others) for each in found] == [(1, True), (3, True)]
    found = from_the_start(Mesh(2, 2), [1.0] * 4, *[(1.0, 3.0, 1.0, 1.0)] * 6)
    assert [(each.rank, "replicas" in each.others) for each in found] == [(1, True)]


def test_a_hiccup_at_the_start_is_none_and_nobody_is_named_twice() -> None:
    slow, good = (1.0, 9.0), (1.0, 1.0)
    assert from_the_start(Mesh(2, 1), [1.0, 1.0], slow, slow, slow, good, good, good) == []
    times = [(1.0, 2.0)] * 5 + [(1.0, 4.0)] * 5
    assert len(from_the_start(Mesh(2, 1), [1.0, 1.0], *times)) == 1


def plan_for(sizes: tuple[int, ...], mesh: Mesh, rows: tuple[int, ...] = ()) -> Plan:
    stage_map = StageMap.from_sizes(sizes)
    trainable = (True,) * len(sizes)
    return Plan(mesh, stage_map, "1f1b", max(rows, default=4), 1, trainable, replica_rows=rows)


def test_the_work_of_a_rank_is_that_of_its_layers_and_rows() -> None:
    """Of equal layers and a head, which counts by its FLOPs; the embedding costs none."""
    machines = Cluster(machines=tuple(Machine(host=host) for host in HOSTS))
    layers = WORKLOAD.shape.num_layers
    plan = plan_for((layers // 4, layers - layers // 4), Mesh(2, 2), (6, 2))
    work = Work.of(plan, WORKLOAD, machines, 64)
    assert work is not None
    first, second, third, fourth = work.of_ranks
    assert [first, second] == pytest.approx([3 * third, 3 * fourth])
    head = WORKLOAD.shape.head_flops() / WORKLOAD.shape.layer(0).flops(64)
    count = layers // 4
    assert second / first == pytest.approx((layers - count + 2 / 3 * head) / count, rel=0.02)
    assert (work.rows, work.is_measured) == ((6, 2), False)


def test_ranks_of_tensor_shares_are_not_compared() -> None:
    machines = Cluster(machines=tuple(Machine(host=host) for host in HOSTS))
    layers = WORKLOAD.shape.num_layers
    plan = plan_for((layers // 2, layers - layers // 2), Mesh(1, 2, 2))
    assert Work.of(plan, WORKLOAD, machines, 64) is None
