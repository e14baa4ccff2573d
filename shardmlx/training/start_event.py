"""Write the facts of a run before its first step: the ``start`` line of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import shardmlx
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.pipeline.plan import Plan
from shardmlx.training.setup import TrainingRun

MOST_SPANS = 4000
"""Limit of actions of a step on all ranks whose times are written; more cannot be drawn."""


def facts_of(job: TrainingRun, step: int) -> dict[str, Any]:
    """Return the facts of a run that begins after ``step``, JSON-able. On rank 0 only."""
    config, plan = job.config, job.plan
    predicted = _predict(job, job.mean_length)
    return {
        "step": step,
        "iters": config.iters,
        "version": shardmlx.__version__,
        "options": config.to_adapter_config(),
        "changed": _changed(config),
        "chosen": dict(job.chosen),
        "sizes": dict(job.sizes),
        "layout": _layout(plan, job.transport.hosts),
        "schedule": _schedule(plan, predicted, job.cluster.unit == "seconds"),
        "predicted": {
            "data": _as_json(job, predicted, job.mean_length),
            "full": _as_json(job, _predict(job, _full_length(job)), _full_length(job)),
        },
        "memory_limits": [each.as_json() for each in job.limits],
    }


def _changed(config: Any) -> list[str]:
    """Return the names of the options that are not at their defaults."""
    defaults = type(config)()
    return [
        each.name
        for each in fields(config)
        if getattr(config, each.name) != getattr(defaults, each.name)
    ]


def _full_length(job: TrainingRun) -> int:
    """Return the tokens of the longest input that the options allow, which ``plan`` assumes."""
    return job.config.max_seq_length - 1


def _predict(job: TrainingRun, length: int) -> Prediction:
    recompute = job.workload.batch.recomputed
    return predict(job.plan, job.workload, job.cluster, length, recompute=recompute)


def _as_json(job: TrainingRun, predicted: Prediction, length: int) -> dict[str, Any]:
    """Return the seconds of a step with sequences of so many tokens; null without a clock."""
    known = job.cluster.unit == "seconds"
    return {
        "sequence_length": length,
        "step_seconds": predicted.step_seconds if known else None,
    }


def _layout(plan: Plan, hosts: Sequence[str]) -> dict[str, Any]:
    mesh, stage_map = plan.mesh, plan.stage_map
    ranks = []
    for rank in range(mesh.size):
        replica, pipeline_rank = mesh.coordinates(rank)
        host = hosts[rank]
        ranks.append(
            {"rank": rank, "host": host, "replica": replica, "pipeline_rank": pipeline_rank}
        )
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
    return {
        "data_parallel": mesh.dp,
        "pipeline_parallel": mesh.pp,
        "ranks": ranks,
        "stages": stages,
    }


def _schedule(plan: Plan, predicted: Prediction, is_timed: bool) -> dict[str, Any]:
    """Return the predicted course of a step's forward and backward passes.

    ``spans[pipeline rank]`` has an action, its start and its end, as parts of the makespan.
    """
    simulation = predicted.simulation
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
        "micro_batch_size": plan.micro_batch_size,
        "packed": plan.pack,
        "bubble": simulation.bubble,
        "makespan_seconds": makespan if is_timed else None,
        "spans": spans,
    }
