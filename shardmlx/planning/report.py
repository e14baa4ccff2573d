"""Write a chosen plan as text for people and as JSON for programs. No MLX, no MPI."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any

from shardmlx.common.formatting import columns, gibibytes, numbers_of
from shardmlx.config.specs import NONE
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.predict import Prediction, RankPrediction
from shardmlx.planning.search import ChosenPlan, Limits

_NOTABLE = 0.1
"""Share of a step: what takes less binds nothing."""


def report(
    choice: ChosenPlan,
    cluster: Cluster,
    limits: Limits,
    hostfile: str,
    stage_map: str | None,
    options: Sequence[str],
    facts: Sequence[str] = (),
) -> str:
    """Return the plan, a line for each rank, what binds it, and the command that runs it.

    ``facts`` are lines about the model. ``options`` are those of ``train`` that the user gave, the
    model among them.
    """
    prediction = choice.prediction
    lines = [
        _headline(choice, limits),
        "",
        columns(
            (
                "rank", "host", "layers", "weights", "peak memory", "of", "F", "I", "W",
                "bubble", "exposed communication",
            ),
            [_line(rank, each) for rank, each in enumerate(prediction.ranks)],
        ),
        "",
        _speed(prediction, cluster),
        f"what binds it: {binding(choice, cluster)}",
    ]  # fmt: skip
    lines += facts
    lines += ["", *_how_to_run(choice, options, hostfile, stage_map)]
    return "\n".join(lines)


def _headline(choice: ChosenPlan, limits: Limits) -> str:
    plan, way = choice.prediction.plan, choice.candidate
    replicas = f"{plan.mesh.dp} replicas x " if plan.mesh.dp > 1 else ""
    stages = f"{plan.mesh.pp} rank{'s' if plan.mesh.pp > 1 else ''}"
    if plan.stage_map.num_stages > plan.mesh.pp:
        stages += f" with {plan.stage_map.virtual} stages each"
    again = ", packed" * plan.pack
    if plan.replica_rows:
        again += f", rows {' + '.join(map(str, plan.replica_rows))}"
    again += ", with weights divided among replicas" * way.divides_weights
    again += f", with --recompute {way.recompute}" * (way.recompute != NONE)
    return (
        f"best of {choice.tried} plans: {replicas}{stages}, {plan.schedule}, batches of "
        f"{limits.batch_size} x {limits.length} tokens in {plan.microbatches} "
        f"micro-batch{'es' if plan.microbatches > 1 else ''} of {plan.micro_batch_size}{again}"
    )


def _line(rank: int, each: RankPrediction) -> tuple[str, ...]:
    ranges = ", ".join(numbers_of(*layers) for layers in each.ranges)
    has = "?" if math.isinf(each.capacity) else gibibytes(each.capacity)
    seconds = each.seconds
    return (
        str(rank),
        _hosts(each.hosts),
        ranges,
        gibibytes(each.weights),
        gibibytes(each.peak),
        has,
        _seconds(seconds.forward),
        _seconds(seconds.input_gradient),
        _seconds(seconds.weight_gradient),
        f"{100 * each.bubble:.1f}%",
        _seconds(each.exposed),
    )


def _hosts(hosts: Sequence[str]) -> str:
    """Return the first replica's host, and how many more there are."""
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} +{len(hosts) - 1}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def _speed(prediction: Prediction, cluster: Cluster) -> str:
    source = (
        f"measured times ({cluster.profile.path})"
        if cluster.profile is not None
        else f"FLOP/s at {100 * cluster.efficiency:.0f}% of those of the hostfile: measure with "
        "shardmlx profile for more than an estimate"
    )
    parts = [f"step {_seconds(prediction.step_seconds)}"]
    if prediction.update_seconds:
        parts.append(f"of it update {_seconds(prediction.update_seconds)}")
    if prediction.reduce_seconds:
        parts.append(f"sums over replicas up to {_seconds(prediction.reduce_seconds)}")
    hosts = {each.host: each.link for each in cluster.machines}
    unknown = [host for host, link in hosts.items() if link is None]
    if len(hosts) > 1 and unknown:
        source += f"\nlinks of {', '.join(unknown)} not known: messages cost nothing"
    speed = f"{', '.join(parts)}: {prediction.tokens_per_second:.1f} tokens/s of full sequences"
    sent = f"messages: up to {gibibytes(prediction.sent)} leave a host in a step"
    return "\n".join([speed, *[sent] * (prediction.sent > 0), f"times from {source}"])


def binding(choice: ChosenPlan, cluster: Cluster) -> str:
    """Return what one would have to change for a faster step."""
    prediction = choice.prediction
    step = prediction.step_seconds
    ranks = prediction.ranks
    if choice.unlimited is not None:
        fullest = max(ranks, key=lambda each: each.peak / each.capacity)
        gain = step / choice.unlimited.step_seconds
        return (
            f"memory, of {fullest.hosts[0]} first of all: with enough of it everywhere the step "
            f"would be {gain:.2f} times as fast"
        )
    shares = {
        "links": max(each.exposed for each in ranks) / step,
        "sums": prediction.reduce_seconds / step,
        "update": prediction.update_seconds / step,
        "bubble": max(each.bubble for each in ranks) * prediction.simulation.makespan / step,
    }
    most = max(shares, key=lambda name: shares[name])
    busiest = max(range(len(ranks)), key=lambda rank: ranks[rank].busy)
    compute = f"compute, of {ranks[busiest].hosts[0]} first of all"
    share = f"{100 * shares[most]:.0f}% of the step"
    if shares[most] < _NOTABLE:
        return compute
    if most == "links":
        return f"links: {share} waits for messages: a faster cable, or larger --batch-size"
    if most == "sums":
        return f"sums over replicas: up to {share}: a faster cable, or fewer replicas"
    if most == "update":
        return f"the optimizer: {share}: larger --batch-size, or --grad-accumulation-steps"
    return (
        f"{compute}, and a bubble of up to {share}: more micro-batches (larger --batch-size) "
        "make it smaller"
    )


def _how_to_run(
    choice: ChosenPlan,
    options: Sequence[str],
    hostfile: str,
    stage_map: str | None,
) -> list[str]:
    plan = choice.prediction.plan
    words = ["shardmlx", "launch", "--hostfile", hostfile, "train", *options]
    words += ["--stage-map", stage_map or "MAP.yaml", "--schedule", plan.schedule]
    words += ["--micro-batch-size", str(plan.micro_batch_size)]
    if plan.replica_rows:
        words += ["--replica-rows", ",".join(map(str, plan.replica_rows))]
    words += ["--zero", "3"] * (choice.candidate.divides_weights and "--zero" not in options)
    words += ["--recompute", choice.candidate.recompute] * (choice.candidate.recompute != NONE)
    command = shlex.join(words)
    if stage_map is None:
        return ["write the stage map with -o MAP.yaml, then run:", command]
    return [f"wrote {stage_map}; run:", command]


def as_json(choice: ChosenPlan, limits: Limits) -> dict[str, Any]:
    """Return all numbers: bytes, seconds, tokens a second."""
    prediction = choice.prediction
    plan = prediction.plan
    return {
        "pp": plan.mesh.pp,
        "dp": plan.mesh.dp,
        "schedule": plan.schedule,
        "virtual": plan.stage_map.virtual,
        "num_layers": plan.stage_map.partition.sizes,
        "placement": plan.stage_map.placement,
        "batch_size": limits.batch_size,
        "length": limits.length,
        "micro_batch_size": plan.micro_batch_size,
        "microbatches": plan.microbatches,
        "pack": plan.pack,
        "rows": plan.shares,
        "recompute": choice.candidate.recompute,
        "divides_weights": choice.candidate.divides_weights,
        "step_seconds": prediction.step_seconds,
        "update_seconds": prediction.update_seconds,
        "reduce_seconds": prediction.reduce_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "sent_bytes": prediction.sent,
        "bubble": prediction.simulation.bubble,
        "tried": choice.tried,
        "ranks": [
            {
                "hosts": each.hosts,
                "layers": each.ranges,
                "weights_bytes": each.weights,
                "peak_memory_bytes": each.peak,
                "capacity_bytes": None if math.isinf(each.capacity) else each.capacity,
                "forward_seconds": each.seconds.forward,
                "input_gradient_seconds": each.seconds.input_gradient,
                "weight_gradient_seconds": each.seconds.weight_gradient,
                "busy_seconds": each.busy,
                "exposed_comm_seconds": each.exposed,
                "bubble": each.bubble,
            }
            for each in prediction.ranks
        ],
    }
