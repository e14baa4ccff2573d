"""Divide the batch among replicas of unequal speed, by rows. No MLX, no MPI.

The loss is the sum over all tokens of the batch, divided by their number: the division of rows
changes only the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmlx.costmodel.cluster import Cluster, pipeline_seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.pipeline.plan import Plan


def with_replica_rows(plan: Plan, workload: Workload, cluster: Cluster, length: int) -> Plan:
    """Return the plan with the rows of each replica that ``--replica-rows`` asks for.

    Division by speed lets the last replica finish as early as possible, with rows of ``length``
    tokens. Raises ``UserError`` if a machine's speed is unknown, or if replicas that gather weights
    together would do so unequal numbers of times.
    """
    batch, dp = workload.batch, plan.mesh.dp
    if batch.replica_rows is None or dp == 1:
        return plan
    rows = batch.given_rows or rows_by_speed(
        batch.batch_size, _seconds_of_replicas(plan, workload, cluster, length)
    )
    size = plan.micro_batch_size
    if batch.micro_batch_size is None and size == plan.rows:
        size = max(rows)  # all rows of a replica are one micro-batch
    unequal = rows if len(set(rows)) > 1 else ()
    plan = replace(plan, rows=max(rows), replica_rows=unequal, micro_batch_size=size)
    counts = [plan.microbatches_of(replica) for replica in range(dp)]
    if workload.fine_tune.divides_weights and len(set(counts)) > 1:
        raise UserError(
            f"--replica-rows {batch.replica_rows}: replicas would have "
            f"{', '.join(map(str, counts))} micro-batches of {size}, and with --zero 3 all gather "
            "weights for each",
            f"give --micro-batch-size {max(rows)}, or leave --replica-rows out",
        )
    return plan


def rows_by_speed(total: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Divide ``total`` rows among replicas with so many seconds a row: each gets at least one, and
    each next row goes to the replica that finishes it first."""
    rows = [1] * len(seconds)
    for _ in range(total - len(seconds)):
        first = min(range(len(rows)), key=lambda each: (rows[each] + 1) * seconds[each])
        rows[first] += 1
    return tuple(rows)


def _seconds_of_replicas(
    plan: Plan, workload: Workload, cluster: Cluster, length: int
) -> list[float]:
    """Return the seconds that a row takes on the busiest rank of each replica."""
    cluster.check_speeds()
    recompute, size = workload.batch.recomputed, plan.micro_batch_size
    found = []
    for replica in range(plan.mesh.dp):
        models = pipeline_seconds(
            workload, cluster, plan.mesh, size, length, recompute=recompute, replica=replica
        )
        busy = [0.0] * plan.mesh.pp
        ranges = plan.stage_map.partition.ranges
        for rank, ends in zip(plan.stage_map.placement, ranges, strict=True):
            busy[rank] += models[rank].stage(*ends).microbatch
        found.append(max(busy) / size)
    return found
