"""Collect the facts of a run before its first step: the ``start`` line of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import shardmlx
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.job import Job
from shardmlx.training.setup import TrainingRun

MOST_SPANS = 4000
"""Limit of actions of a step on all ranks whose times are written; more cannot be drawn."""


def facts_of(run: TrainingRun, step: int) -> dict[str, Any]:
    """Return the facts of a run that begins after ``step``, JSON-able. On rank 0."""
    assert run.data is not None, "rank 0 has the data"
    planned = run.job
    training = run.training
    asked = run.config.spec.for_ranks(planned.mesh.size // planned.mesh.tp)
    length = training.mean_length
    return {
        "step": step,
        "iters": run.config.iters,
        "version": shardmlx.__version__,
        "options": run.config.to_adapter_config(),
        "changed": run.config.not_usual,
        "chosen": training.way.answers(asked),
        "sizes": run.data.sizes(),
        "layout": _layout(training.plan, run.transport.hosts),
        "schedule": _schedule(planned),
        "predicted": {"data": {"sequence_length": length, "step_seconds": planned.seconds(length)}},
        "memory_limits": [each.as_json() for each in planned.limits],
    }


def _layout(plan: Plan, hosts: Sequence[str]) -> dict[str, Any]:
    mesh = plan.mesh
    stage_map = plan.stage_map
    ranks = []
    for rank in range(mesh.size):
        replica, pipeline_rank = mesh.coordinates(rank)
        place = {"replica": replica, "pipeline_rank": pipeline_rank}
        ranks.append({"rank": rank, "host": hosts[rank], **place})
    last = stage_map.num_stages - 1
    stages = [
        {
            "stage": index,
            "pipeline_rank": stage_map.placement[index],
            "first_layer": start,
            "num_layers": stop - start,
            "has_embedding": index == 0,
            "has_lm_head": index == last,
            "is_trained": plan.trainable[index],
        }
        for index, (start, stop) in enumerate(stage_map.partition.ranges)
    ]
    sizes = {"data_parallel": mesh.dp, "pipeline_parallel": mesh.pp}
    return {**sizes, "ranks": ranks, "stages": stages}


def _schedule(job: Job) -> dict[str, Any]:
    """Return the predicted (action, start, end) of each pipeline rank, as parts of the makespan."""
    plan = job.trained.plan
    simulation = job.predict(job.trained.mean_length).simulation
    makespan = simulation.makespan or 1.0
    spans = None
    if sum(map(len, simulation.spans)) <= MOST_SPANS:
        spans = [
            [
                [str(action), round(start / makespan, 5), round(end / makespan, 5)]
                for action, start, end in actions
            ]
            for actions in simulation.spans
        ]
    return {
        "name": plan.schedule,
        "microbatches": plan.microbatches,
        "micro_batch_size": plan.micro_batch_rows,
        "packed": plan.pack,
        "bubble": simulation.bubble,
        "makespan_seconds": makespan if job.cluster.unit == "seconds" else None,
        "spans": spans,
    }
