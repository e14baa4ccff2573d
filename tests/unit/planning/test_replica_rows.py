"""The rows of replicas that are not alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardmlx.config.options import OptionError
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import read_shape
from shardmlx.pipeline.actions import Action, Kind
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import SCHEDULES
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.layout import lay_out, rows_by_speed
from shardmlx.planning.time.predict import predict
from shardmlx.planning.ways import ways
from tests.helpers.fake_models import MISTRAL_7B
from tests.helpers.workloads import workload

BALANCED = {
    "partitioner": "balanced",
    "schedule": "1f1b",
    "pack": False,
    "num_layers": -1,
    "zero": 1,
}


def test_rows_go_to_whom_they_make_last_the_shortest() -> None:
    assert rows_by_speed(12, [1.0, 2.0]) == (8, 4)
    assert rows_by_speed(7, [1.0, 1.0]) == (4, 3)
    assert rows_by_speed(4, [1.0, 100.0]) == (3, 1), "each has one"


def macs(*tera: float) -> Cluster:
    machines = (Machine(host=f"mac{i}", flops=each * 1e12) for i, each in enumerate(tera))
    return Cluster(machines=tuple(machines))


def laid_out(cluster: Cluster, **options: Any) -> tuple[Plan, Workload]:
    settings: dict[str, Any] = {**BALANCED, **options}
    work = workload(read_shape(MISTRAL_7B), "bfloat16", **settings)
    facts = PlanFacts(workload=work, cluster=cluster, lengths=SequenceLengths.full(512))
    run = TrainConfig.from_flat(model="mistral", **settings).spec
    return lay_out(ways(run, facts)[0], facts), work


def test_a_replica_that_is_twice_as_fast_gets_twice_the_rows() -> None:
    cluster = macs(20, 10)
    auto, work = laid_out(cluster, batch_size=12, pipeline_stages=1, replica_rows="auto")
    assert (auto.replica_rows, auto.micro_batch_rows) == ((8, 4), 8)
    equal, _ = laid_out(cluster, batch_size=12, pipeline_stages=1)
    seconds = [predict(plan, work, cluster, 512).step_seconds for plan in (auto, equal)]
    assert seconds[1] / seconds[0] == pytest.approx(1.5, rel=1e-3)  # (s1 + s2) / (2 s2)


def test_of_a_pipeline_its_busiest_rank_counts_and_micro_batches_stay() -> None:
    slow_at_its_end = macs(20, 20, 20, 2)
    plan, _ = laid_out(
        slow_at_its_end, batch_size=11, pipeline_stages=2, replica_rows="auto",
        partitioner="uniform",
    )  # fmt: skip
    assert plan.replica_rows == (10, 1)
    assert [plan.microbatches_of(replica) for replica in (0, 1)] == [10, 1]


def test_replicas_alike_have_equal_rows() -> None:
    plan, _ = laid_out(macs(10, 10), batch_size=8, pipeline_stages=1, replica_rows="auto")
    assert (plan.replica_rows, plan.shares) == ((), (4, 4))


def test_rows_may_be_given() -> None:
    cluster = Cluster(machines=(Machine(host="a"), Machine(host="b")))
    plan, _ = laid_out(cluster, batch_size=7, pipeline_stages=1, replica_rows="5,2")
    assert plan.starts == (0, 5, 7)
    with pytest.raises(UserError, match="--replica-rows 5,3 are 8 rows"):
        laid_out(cluster, batch_size=7, pipeline_stages=1, replica_rows="5,3")
    with pytest.raises(UserError, match="how fast a is"):
        laid_out(cluster, batch_size=7, pipeline_stages=1, replica_rows="auto")
    with pytest.raises(OptionError, match="5,x"):
        laid_out(cluster, replica_rows="5,x")


@pytest.mark.parametrize("name", SCHEDULES)
def test_sums_start_in_the_same_order_however_many_micro_batches_there_are(name: str) -> None:
    """A replica starts the sum of a stage after its last W: with other rows in the same order."""
    for pp in (1, 2, 3, 4):
        for virtual in SCHEDULES[name].virtual_choices or (1, 2, 3):
            placement = SCHEDULES[name].placement(pp, virtual)
            stage_map = StageMap.from_sizes([1] * len(placement), placement)
            orders = set()
            for rows in range(1, 10):
                plan = Plan(Mesh(1, pp), stage_map, name, rows, 1, (True,) * len(placement))
                orders.add(tuple(map(ended, plan.actions)))
            assert len(orders) == 1, (pp, virtual)


def ended(actions: Sequence[Action]) -> tuple[int, ...]:
    """A rank's stages, in the order of their last W."""
    return tuple(dict.fromkeys(each.stage for each in reversed(actions) if each.kind is Kind.W))
