"""Say what replicas that divide the weights cost beside a pipeline. No MLX, no MPI."""

from __future__ import annotations

from dataclasses import replace

from shardmlx.common.formatting import gibibytes, plural
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import DoesNotFitError
from shardmlx.planning.search import ChosenPlan, Limits, fastest


def other_way(
    workload: Workload, cluster: Cluster, limits: Limits, choice: ChosenPlan
) -> list[str]:
    """Return a line about the best step of the other way to hold a model that no machine holds.

    Of a pipeline where replicas divide the weights, and of these where layers are divided. Nothing
    where each machine holds the whole model, where the user has settled it, or where it is not
    known what messages take.
    """
    is_settled = (limits.divides_weights, limits.data_parallel, limits.stage_map) != (None,) * 3
    mesh, divides = choice.candidate.mesh, choice.candidate.divides_weights
    if is_settled or not cluster.knows_messages or not (divides or mesh.pp > 1):
        return []
    if divides:
        workload = replace(workload, fine_tune=replace(workload.fine_tune, zero=None))
        way, other = "layers divided", replace(limits, divides_weights=False)
    else:
        way = f"weights divided among {plural(cluster.size, 'replica')} (--zero 3)"
        other = replace(limits, divides_weights=True, data_parallel=cluster.size)
    try:
        best = fastest(workload, cluster, other).prediction
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
