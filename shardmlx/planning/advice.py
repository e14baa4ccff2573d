"""Say more about a plan: special facts about the model, and the times of other ways.

No MLX, no MPI.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmlx.common.formatting import gibibytes, plural
from shardmlx.config.specs import DIVIDED_WEIGHTS
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.costmodel.training_setup import FLOAT32
from shardmlx.costmodel.workload import (
    ROUNDING_SECONDS,
    ModelSizes,
    Workload,
)
from shardmlx.errors import UserError
from shardmlx.models.undeclared import APPROXIMATE
from shardmlx.partitioners import DoesNotFitError
from shardmlx.planning.choice import choose
from shardmlx.planning.training_plan import TrainingPlan

WORTH_A_LINE = 0.01
"""Share of a step that a shorter type of sums must save."""

_MANY = 1 << 20
"""Bytes of gradients for measuring the saving of a shorter type."""


@dataclass(frozen=True, slots=True)
class ExpertTraffic:
    """Bytes that a token sends in the forward pass: with ``stages`` of whole layers, and with the
    ``experts`` of each layer on all machines."""

    stages: int
    experts: int

    @classmethod
    def of(cls, sizes: ModelSizes, machines: int) -> ExpertTraffic:
        """Return the traffic of a model on so many machines.

        A stage sends the hidden states once. A layer of experts would send them to each other
        machine that has one of a token's experts, and get as much back from it.
        """
        message = sizes.dtype_bytes * sizes.shape.hidden_size
        layers = map(sizes.shape.layer, range(sizes.shape.num_layers))
        asked = sum(min(layer.experts_per_token, machines - 1) for layer in layers)
        return cls(message * (machines - 1), 2 * message * asked)


def model_facts(workload: Workload, prediction: Prediction) -> list[str]:
    """Return a line for each special fact about the model."""
    facts = []
    if not workload.shape.is_declared:
        facts.append(APPROXIMATE)
    machines = prediction.plan.mesh.pp
    traffic = ExpertTraffic.of(workload, machines)
    if traffic.experts and machines > 1:
        a_step = traffic.experts * prediction.tokens
        facts.append(
            "why stages hold whole layers with all their experts: a token sends "
            f"{gibibytes(traffic.stages)} forward, and with experts on all machines up to "
            f"{gibibytes(traffic.experts)}, {traffic.experts / traffic.stages:.0f} times as much "
            f"({gibibytes(traffic.stages * prediction.tokens)} and {gibibytes(a_step)} a step)"
        )
    return facts


def other_way(planned: TrainingPlan) -> list[str]:
    """Return a line about the best step of the other way to hold a model larger than a machine.

    The other way of divided weights is a pipeline, and vice versa. Nothing if each machine holds
    the whole model, if the user has settled it, or if message times are unknown.
    """
    run, facts, choice = planned.run, planned.facts, planned.choice
    tune, layout, size = run.fine_tune, run.layout, facts.cluster.size
    is_settled = (tune.zero, layout.data_parallel, layout.pipeline_stages) != (None,) * 3
    divides = choice.run.fine_tune.divides_weights
    if is_settled or facts.stage_map is not None or not facts.knows_times:
        return []
    if divides:
        way, tune = "layers divided", replace(tune, zero=int(tune.divides_optimizer))
    elif choice.plan.mesh.pp > 1:
        way = f"weights divided among {plural(size, 'replica')} (--zero 3)"
        tune, layout = replace(tune, zero=DIVIDED_WEIGHTS), replace(layout, pipeline_stages=1)
    else:
        return []
    try:
        best = choose(replace(run, fine_tune=tune, layout=layout), facts).prediction
    except DoesNotFitError:
        return [f"{way} instead: does not fit"]
    except UserError:
        return []  # the batch has too few rows
    peak = max(each.peak for each in best.ranks)
    times = best.step_seconds / choice.prediction.step_seconds
    return [
        f"{way} instead: step {best.step_seconds:.3f} s, {times:.2f} times as long, with a peak of "
        f"{gibibytes(peak)}"
    ]


def shorter_sums(planned: TrainingPlan) -> list[str]:
    """Return a line for each ``--sum-dtype`` that would save a hundredth of a step."""
    workload, cluster, prediction = planned.workload, planned.cluster, planned.prediction
    tune, batch = workload.fine_tune, workload.batch
    links = [each.link for each in cluster.machines if each.link is not None]
    is_summed = prediction.plan.mesh.dp > 1 and tune.sum_dtype == "float32"
    if cluster.unit != "seconds" or not links or not is_summed:
        return []
    now, lines = prediction.step_seconds, []
    length = planned.facts.lengths.mean(batch.pack)
    for dtype, rounding in ROUNDING_SECONDS.items():
        other = replace(workload, fine_tune=replace(tune, sum_dtype=dtype))
        then = predict(
            prediction.plan, other, cluster, length, recompute=batch.recomputed
        ).step_seconds
        if now - then >= WORTH_A_LINE * now:
            spared = FLOAT32 * (1 - other.sum_bytes(_MANY) / _MANY)
            lines.append(
                f"--sum-dtype {dtype} would make the step {100 * (now - then) / now:.0f}% shorter; "
                f"it pays on links below {8 * spared / rounding / 1e9:.2g} Gbit/s"
            )
    return lines
