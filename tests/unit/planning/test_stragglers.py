"""Who slows the others down."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.config.specs import BatchOptions, FineTune
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.profile_file import MachineProfile, Profile, Sample, work_of
from shardmlx.costmodel.timing import Seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.modelfiles.model_files import open_model
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.layout import trainable_stages
from shardmlx.planning.stragglers import Straggler, Watch, compute_of_ranks
from tests.helpers.models_and_batches import tiny_config

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
    assert straggler.as_json() == {
        "step": 30,
        "rank": 1,
        "host": "mac-mini",
        "compute_seconds": 1.9,
        "expected_seconds": 1.2,
    }


def test_a_hiccup_is_no_straggler() -> None:
    slow, good = (1.0, 2.0), (1.0, 1.0)
    assert reports(profiled(2), slow, slow, good, slow, slow, good, slow, slow) == []


@pytest.mark.parametrize("seconds", [(1.0, 1.2), (3.0, 3.1), (0.1, 0.1), (0.6, 1.0)])
def test_what_all_share_and_what_is_as_predicted_names_nobody(seconds: tuple[float, ...]) -> None:
    assert reports(profiled(2), *[seconds] * 6) == []


def test_the_median_of_the_others_is_what_counts() -> None:
    found = reports(profiled(4), *[(1.0, 1.1, 5.0, 3.0)] * 6)
    assert [each.rank for each in found] == [2, 3]
    assert [each.expected for each in found] == pytest.approx([1.1, 1.1])


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


def test_of_two_replicas_on_machines_alike_the_slow_one_is_named_from_its_first_step() -> None:
    watch = Watch(HOSTS, alike=[[2], [3], [0], [1]])
    (straggler,) = reports(watch, *[(1.0, 3.0, 1.0, 4.5)] * 6)
    assert (straggler.rank, straggler.seconds, straggler.expected) == (3, 4.5, 3.0)


# Of a plan


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(tiny_config(layers=12, hidden_size=256)))
    return path


def work(model: Path, **options: object) -> Workload:
    settings = {"num_layers": -1, "max_seq_length": 128, **options}
    config = TrainConfig(model=str(model), **settings)  # type: ignore[arg-type]
    return Workload.of(open_model(str(model)), FineTune.of(config), BatchOptions.of(config))


def cluster_of(ranks: int, **what: object) -> Cluster:
    return Cluster(
        machines=tuple(
            Machine(host=host, **what)  # type: ignore[arg-type]
            for host in HOSTS[:ranks]
        )
    )


def plan_for(
    workload: Workload, sizes: tuple[int, ...], schedule: str = "1f1b", dp: int = 1
) -> Plan:
    stage_map = StageMap.from_sizes(sizes)
    trainable = trainable_stages(workload, stage_map)
    return Plan(Mesh(dp, len(sizes)), stage_map, schedule, 8, 1, trainable)


def test_replicas_are_alike_where_their_machines_are_known_to_be_as_fast(model: Path) -> None:
    plan = plan_for(work(model), (6, 6), dp=2)
    assert Watch.of(plan, cluster_of(4, flops=1e12)).alike == [[2], [3], [0], [1]]
    assert Watch.of(plan, cluster_of(4)).alike == [[], [], [], []]
    assert Watch.of(plan, cluster_of(4)).hosts == list(HOSTS)


@settings(max_examples=40, deadline=None)
@given(
    factor=st.floats(1e-12, 1e3),
    sizes=st.sampled_from([(6, 6), (1, 11), (11, 1), (9, 3), (4, 4, 4), (2, 1, 3, 6)]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
    flops=st.sampled_from([None, 1e12]),
    is_measured=st.booleans(),
)
def test_any_common_factor_names_nobody(
    model: Path,
    factor: float,
    sizes: tuple[int, ...],
    schedule: str,
    flops: float | None,
    is_measured: bool,
) -> None:
    workload = work(model)
    plan, cluster = plan_for(workload, sizes, schedule), cluster_of(len(sizes), flops=flops)
    costs = compute_of_ranks(plan, workload, cluster, 64)
    watch = replace(Watch.of(plan, cluster), is_measured=is_measured)
    for step in range(8):
        assert watch.observe(step, [factor * each for each in costs], costs) == []


def test_ranks_of_a_profile_are_measured(model: Path) -> None:
    workload = work(model)
    part = Seconds(1.0, 1.0, 0.1, 0.01)
    sample = Sample(
        rows=1, length=64, layer=part, frozen=Seconds(1.0), embedding=Seconds(), head=Seconds()
    )
    profile = Profile(
        work_of(workload),
        tuple(MachineProfile(host, "M2", (sample,)) for host in HOSTS[:2]),
    )
    cluster = replace(cluster_of(2), profile=profile)
    assert Watch.of(plan_for(workload, (6, 6)), cluster).is_measured
