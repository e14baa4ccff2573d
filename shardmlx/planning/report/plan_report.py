"""Write a chosen plan as text, and as JSON. No MLX, no MPI."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from shardmlx.planning.facts.kernels import kernel_lines
from shardmlx.planning.generation_ways import GenerationWay, generation_ways
from shardmlx.planning.report.island_lines import OVERLAP, TERMS, HubTraffic, exchanges
from shardmlx.planning.time.predict import Prediction, RankPrediction

_NOTABLE = 0.1
"""Share of a step below which a part limits nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The results of ``plan``: the choice, the ``others`` with tensor shares or divided weights,
    each machine ``alone``, and the lines of islands, in bit/s.

    ``stage_map`` is the file that the choice was written to, ``start`` begins the command that runs
    it, ``steps`` are those of the run if the plan tells their time, and ``longest`` the tokens of a
    sequence if they were asked for.
    """

    choice: Choice
    start: Sequence[str]
    stage_map: str | None = None
    others: Sequence[Choice] = ()
    lines_of_islands: Sequence[float] = ()
    alone: Sequence[Alone] = ()
    steps: int | None = None
    longest: int | None = None
    notes: Sequence[str] = ()
    """Facts that a run would look at, and the plan did not."""

    @property
    def generation(self) -> list[GenerationWay]:
        """The ways to generate on these machines, the fastest first, if bandwidths are known."""
        whole = self.choice.facts.whole or self.choice.facts
        return generation_ways(whole.workload, whole.cluster, self.choice.facts.lengths.longest[0])

    @property
    def lacking_kernels(self) -> tuple[str, ...]:
        """Lines on layers for whose recurrence a machine has no kernel."""
        facts = self.choice.facts
        mesh = self.choice.plan.mesh
        stage_map = self.choice.plan.stage_map
        ranges = stage_map.partition.ranges
        held = [
            (machine, [ranges[stage] for stage in stage_map.stages_of(mesh.coordinates(rank)[1])])
            for rank, machine in enumerate(facts.cluster.machines)
        ]
        work = facts.work(self.choice.run)
        return kernel_lines(work.shape, held, facts.lengths.longest[0], work.first_trained)

    @property
    def islands(self) -> list[HubTraffic]:
        """The waiting of islands on these lines, by way; nothing without lines."""
        return exchanges(self.choice, self.lines_of_islands) if self.lines_of_islands else []


_NO_TIMES = "times are not known: they need chips in --machines, or flops=27T in the hostfile"


def text(report: PlanReport) -> str:
    """Return the plan, ranks, limits, times, other ways, and the command that runs the plan."""
    choice = report.choice
    steps = report.steps
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
        *([f"longest sequence that fits: {report.longest} tokens"] if report.longest else []),
        f"best of {choice.tried} plans for {rows}: {choice.way}",
        "",
        columns(list(ranks[0]), [list(each.values()) for each in ranks]),
        "",
        *speed,
        *compared(choice, report.alone),
        *(_beside(choice, each) for each in report.others),
        *_generation(report),
        *_islands(report),
        *([APPROXIMATE] if facts.workload.shape.is_approximate else []),
        *report.lacking_kernels,
        *report.notes,
        "",
        *_how_to_run(report),
    ]
    return "\n".join(lines)


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return all of a report in exact bytes, seconds and tokens a second; times that are not known
    are None."""
    choice = report.choice
    return {
        "model": choice.run.model,
        "way": choice.way,
        "tried": choice.tried,
        "batch_size": choice.run.batch.batch_size,
        "max_seq_length": choice.facts.lengths.longest[0],
        "is_longest": report.longest is not None,
        "is_approximate": choice.facts.workload.shape.is_approximate,
        "steps": report.steps,
        **_plan_json(choice),
        "others": [{"way": each.way, **_plan_json(each)} for each in report.others],
        "alone": [
            {"host": each.host, "lacks_bytes": each.lacks}
            | (_plan_json(each.choice) if each.choice is not None else {})
            for each in report.alone
        ],
        "generation": [
            {
                "hosts": each.hosts,
                "tensor_parallel": each.tensor_parallel,
                "expert_parallel": each.whole_experts,
                "rdma": each.has_rdma,
                "num_layers": each.layers,
                "fits": each.fits,
                "peak_memory_bytes": each.peak,
                "limit_bytes": each.capacity,
                "tokens_per_second": each.tokens_per_second,
            }
            for each in report.generation
        ],
        "islands": report.islands,
        "notes": [*report.lacking_kernels, *report.notes],
        "run": command(report),
    }


def _plan_json(choice: Choice) -> dict[str, Any]:
    prediction = choice.prediction
    plan = choice.plan
    has_times = choice.facts.cluster.unit == "seconds"
    times = {
        "step_seconds": prediction.step_seconds,
        "update_seconds": prediction.update_seconds,
        "reduce_seconds": prediction.reduce_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "bubble": prediction.simulation.bubble,
        "spans": prediction.simulation.written_spans,
    }
    return {
        "pipeline_stages": plan.mesh.pp,
        "data_parallel": plan.mesh.dp,
        "tensor_parallel": choice.run.layout.across,
        "schedule": plan.schedule,
        "num_layers": plan.stage_map.partition.sizes,
        "placement": plan.stage_map.placement,
        "micro_batch_size": plan.micro_batch_rows,
        "micro_batches": plan.microbatches,
        "rows": plan.shares,
        "pack": plan.pack,
        "recompute": choice.run.batch.recomputed,
        "divides_weights": plan.mesh.dp > 1 and choice.run.fine_tune.divides_weights,
        **(times if has_times else dict.fromkeys(times)),
        "ranks": [_rank_json(each, has_times) for each in prediction.ranks],
    }


def _rank_json(rank: RankPrediction, has_times: bool) -> dict[str, Any]:
    times = {
        "forward_seconds": rank.seconds.forward,
        "input_gradient_seconds": rank.seconds.input_gradient,
        "weight_gradient_seconds": rank.seconds.weight_gradient,
        "busy_seconds": rank.busy,
        "exposed_comm_seconds": rank.exposed,
        "bubble": rank.bubble,
    }
    return {
        "hosts": rank.hosts,
        "layers": rank.ranges,
        "weights_bytes": rank.weights,
        "peak_memory_bytes": rank.peak,
        "limit_bytes": rank.capacity,
        **(times if has_times else dict.fromkeys(times)),
    }


def _generation(report: PlanReport) -> list[str]:
    """Return a table of the ways to generate, and the fastest one's command, if every memory's
    bandwidth is known."""
    choice = report.choice
    start = report.start
    tokens = choice.facts.lengths.longest[0]
    ways = report.generation
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


def _islands(report: PlanReport) -> list[str]:
    """Return a table of what islands wait for; nothing without their lines."""
    if not report.lines_of_islands:
        return []
    lines = [
        (
            each.way,
            gibibytes(each.nbytes),
            duration(each.seconds),
            f"{each.waiting:.0%}",
            f"{each.overlapped:.0%}",
        )
        for each in report.islands
    ]
    heads = (
        f"{len(report.lines_of_islands)} islands",
        "each way",
        "takes",
        "waiting",
        "overlapped",
    )
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


def command(report: PlanReport) -> list[str]:
    """Return the words of the command that runs the plan."""
    plan = report.choice.plan
    run = report.choice.run
    start = report.start
    across = run.layout.across
    divided = ["--stage-map", report.stage_map or "MAP.yaml"]
    if across > 1:
        divided = ["--pipeline-stages", str(plan.mesh.pp)]
        divided += ["--tensor-parallel", str(across)] * ("--tensor-parallel" not in start)
    words = [*start, *divided, "--schedule", plan.schedule]
    words += ["--micro-batch-size", str(plan.micro_batch_rows)]
    if plan.replica_rows:
        words += ["--replica-rows", ",".join(map(str, plan.replica_rows))]
    words += ["--zero", "3"] * (run.fine_tune.divides_weights and "--zero" not in start)
    return words + ["--recompute", run.batch.recomputed] * (run.batch.recomputed != NONE)


def _how_to_run(report: PlanReport) -> list[str]:
    line = shlex.join(command(report))
    if report.choice.run.layout.across > 1:
        return ["run:", line]
    if report.stage_map is None:
        return ["write the stage map with -o MAP.yaml, then run:", line]
    return [f"wrote {report.stage_map}; run:", line]
