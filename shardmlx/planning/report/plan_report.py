"""Write a chosen plan as text. No MLX, no MPI."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from shardmlx.common.formatting import (
    columns,
    duration,
    figure,
    gibibytes,
    long_duration,
    numbers_of,
    plural,
)
from shardmlx.config.specs import NONE
from shardmlx.models.family import APPROXIMATE
from shardmlx.planning.alone import Alone, compared
from shardmlx.planning.choice import CLEARLY, Choice
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.generation import generation_ways
from shardmlx.planning.report.island_lines import OVERLAP, TERMS, exchanges
from shardmlx.planning.time.predict import Prediction, RankPrediction

_NOTABLE = 0.1
"""Share of a step below which a part limits nothing."""

_NO_TIMES = "times are not known: they need chips in --machines, or flops=27T in the hostfile"


def report(
    choice: Choice,
    stage_map: str | None,
    start: Sequence[str],
    others: Sequence[Choice] = (),
    lines_of_islands: Sequence[float] = (),
    alone: Sequence[Alone] = (),
    steps: int | None = None,
) -> str:
    """Return the plan, ranks, limits, the time of so many ``steps``, each machine ``alone``, the
    ``others`` with tensor shares, islands on lines of so many bit/s, and the command that runs the
    plan, which begins with ``start``."""
    prediction = choice.prediction
    facts = choice.facts
    rows = f"batches of {choice.run.batch.batch_size} x {facts.lengths.longest[0]} tokens"
    has_times = facts.cluster.unit == "seconds"
    across = choice.run.layout.across
    ranks = [_cells(rank, each, across, has_times) for rank, each in enumerate(prediction.ranks)]
    speed = [_NO_TIMES]
    if has_times:
        speed = [_speed(prediction, facts.cluster), f"bottleneck: {bottleneck(choice)}"]
        if steps is not None:
            whole = long_duration(steps * prediction.step_seconds)
            speed.insert(1, f"{plural(steps, 'step')}: {whole}, without validation and saving")
    lines = [
        f"best of {choice.tried} plans for {rows}: {choice.way}",
        "",
        columns(list(ranks[0]), [list(each.values()) for each in ranks]),
        "",
        *speed,
        *compared(choice, alone),
        *(_beside(choice, each) for each in others),
        *_generation(choice, start),
        *(_islands(choice, lines_of_islands) if lines_of_islands else []),
        *([APPROXIMATE] if facts.workload.shape.is_approximate else []),
        "",
        *_how_to_run(choice, stage_map, start),
    ]
    return "\n".join(lines)


def _generation(choice: Choice, start: Sequence[str]) -> list[str]:
    """Return a table of the ways to generate, and the fastest one's command, if every memory's
    bandwidth is known."""
    tokens = choice.facts.lengths.longest[0]
    whole = choice.facts.whole or choice.facts
    ways = generation_ways(whole.workload, whole.cluster, tokens)
    if not ways:
        return []
    most = ways[0].tokens_per_second
    lines = [
        (
            str(each),
            gibibytes(each.peak),
            "?" if math.isinf(each.capacity) else gibibytes(each.capacity),
            figure(each.tokens_per_second),
            f"{each.tokens_per_second / most:.2f}" if each.fits else "does not fit",
        )
        for each in ways
    ]
    fastest = ways[0]
    where = [*start[: start.index("train")], "generate"]
    if len(fastest.hosts) == 1:
        where = ["on", f"{fastest.hosts[0]}:", "shardmlx", "generate"]
    words = [*where, "--model", shlex.quote(choice.run.model), *fastest.options.split()]
    heads = ("to generate", "fullest rank", "limit", "tokens/s at most", "of the fastest")
    return [
        "",
        f"Generating at a {tokens}-token context (upper bounds):",
        columns(heads, lines),
        *(["the fastest: " + " ".join(words)] if fastest.fits else []),
    ]


def _islands(choice: Choice, lines_of_islands: Sequence[float]) -> list[str]:
    """Return a table of what islands on these lines wait for."""
    lines = [
        (
            each.way,
            gibibytes(each.nbytes),
            duration(each.seconds),
            f"{each.waiting:.0%}",
            f"{each.overlapped:.0%}",
        )
        for each in exchanges(choice, lines_of_islands)
    ]
    heads = (f"{len(lines_of_islands)} islands", "each way", "takes", "waiting", "overlapped")
    return [
        "",
        f"islands that are each as planned, a round of {TERMS.inner_steps} steps, waiting with "
        f"--overlap 0 and {OVERLAP}:",
        columns(heads, lines),
    ]


def _beside(choice: Choice, other: Choice) -> str:
    """Say what another way gains or loses, and why it was not chosen though it may gain."""
    seconds = other.prediction.step_seconds
    peak = max(r.peak for r in other.prediction.ranks)
    ratio = seconds / choice.prediction.step_seconds
    worth = f"{ratio:.2f} times as long" if ratio > 1 else f"{1 / ratio:.2f} times as fast"
    across = other.run.layout.across
    is_divided = other.run.fine_tune.divides_weights
    option = "--zero 3" if is_divided and across == 1 else f"--tensor-parallel {across}"
    reason = ""
    if ratio < 1 and is_divided:
        reason = "; not chosen: what its gathers take has not been measured on any Mac"
    elif ratio < 1 and ratio * CLEARLY > 1:
        reason = (
            "; not chosen: what its sums take has not been measured on any Mac, and it gains less "
            f"than {CLEARLY - 1:.0%}"
        )
    elif ratio < 1:
        reason = "; not chosen: -o takes stages alone"
    return (
        f"with {option}: step {duration(seconds)}, {worth}, "
        f"{gibibytes(peak)} on the fullest rank{reason}"
    )


def _cells(rank: int, each: RankPrediction, across: int, has_times: bool) -> dict[str, str]:
    seconds = each.seconds
    others = len(each.hosts) * across - 1
    cells = {
        "rank": str(rank),
        "host": f"{each.hosts[0]} +{others}" if others else each.hosts[0],
        "layers": ", ".join(numbers_of(*layers) for layers in each.ranges),
        "weights": gibibytes(each.weights),
        "peak memory": gibibytes(each.peak),
        "limit": "?" if math.isinf(each.capacity) else gibibytes(each.capacity),
    }
    times = {
        "F": duration(seconds.forward),
        "I": duration(seconds.input_gradient),
        "W": duration(seconds.weight_gradient),
        "bubble": f"{100 * each.bubble:.1f}%",
        "exposed communication": duration(each.exposed),
    }
    return cells | times if has_times else cells


def _speed(prediction: Prediction, cluster: Cluster) -> str:
    source = (
        f"measured times ({cluster.profile.path})"
        if cluster.profile is not None
        else f"FLOP/s at {100 * cluster.efficiency:.0f}% of the machines' peak: measure with "
        "shardmlx profile for more than an estimate"
    )
    parts = [f"step {duration(prediction.step_seconds)}"]
    if prediction.update_seconds:
        parts.append(f"of it update {duration(prediction.update_seconds)}")
    if prediction.reduce_seconds:
        parts.append(f"sums over replicas up to {duration(prediction.reduce_seconds)}")
    hosts = {each.host: each.link for each in cluster.machines}
    unknown = [host for host, link in hosts.items() if link is None]
    if len(hosts) > 1 and unknown:
        source += f"\nlinks of {', '.join(unknown)} not known: messages cost nothing"
    speed = f"{', '.join(parts)}: {figure(prediction.tokens_per_second)} tokens/s of full sequences"
    return f"{speed}\ntimes from {source}"


def bottleneck(choice: Choice) -> str:
    """Return the part that limits the speed of a step, and the change that would help."""
    prediction = choice.prediction
    step = prediction.step_seconds
    ranks = prediction.ranks
    of_shares = " and sums of tensor shares" * (choice.run.layout.across > 1)
    compute = f"compute{of_shares}, on {max(ranks, key=lambda each: each.busy).hosts[0]} first"
    parts = {
        "links: {} waits for messages; use a faster cable, or a larger --batch-size": (
            max(each.exposed for each in ranks)
        ),
        "sums over replicas: up to {}; use a faster cable, fewer replicas, or a shorter type "
        "(sum_dtype)": prediction.reduce_seconds,
        "optimizer: {}; use a larger --batch-size, or --grad-accumulation-steps": (
            prediction.update_seconds
        ),
        f"{compute}, and a bubble of up to {{}}; a larger --batch-size gives more micro-batches "
        "and a smaller bubble": max(each.bubble for each in ranks) * prediction.simulation.makespan,
    }
    longest = max(parts, key=lambda part: parts[part])
    share = parts[longest] / step
    return longest.format(f"{100 * share:.0f}% of the step") if share >= _NOTABLE else compute


def _how_to_run(choice: Choice, stage_map: str | None, start: Sequence[str]) -> list[str]:
    plan = choice.plan
    run = choice.run
    across = run.layout.across
    divided = ["--stage-map", stage_map or "MAP.yaml"]
    if across > 1:
        divided = ["--pipeline-stages", str(plan.mesh.pp)]
        divided += ["--tensor-parallel", str(across)] * ("--tensor-parallel" not in start)
    words = [*start, *divided, "--schedule", plan.schedule]
    words += ["--micro-batch-size", str(plan.micro_batch_rows)]
    if plan.replica_rows:
        words += ["--replica-rows", ",".join(map(str, plan.replica_rows))]
    words += ["--zero", "3"] * (run.fine_tune.divides_weights and "--zero" not in start)
    words += ["--recompute", run.batch.recomputed] * (run.batch.recomputed != NONE)
    command = shlex.join(words)
    if across > 1:
        return ["run:", command]
    if stage_map is None:
        return ["write the stage map with -o MAP.yaml, then run:", command]
    return [f"wrote {stage_map}; run:", command]
