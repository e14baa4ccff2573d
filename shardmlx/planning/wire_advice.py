"""Say which shorter types of messages would pay between these machines. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardmlx.config.specs import FineTune
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.costmodel.training_setup import FLOAT32
from shardmlx.costmodel.workload import ROUNDING_SECONDS, Workload

WORTH_A_LINE = 0.01
"""Part of a step that must be saved."""


def wire_advice(
    workload: Workload, cluster: Cluster, prediction: Prediction, length: int, *, recompute: str
) -> list[str]:
    """Return a line for each type that would save a hundredth of a step on some link here."""
    links = [each.link for each in cluster.machines if each.link is not None]
    if cluster.unit != "seconds" or not links:
        return []
    now, lines = prediction.step_seconds, []
    for name, tune in _shorter(workload, prediction):
        other = replace(workload, fine_tune=tune)
        then = predict(prediction.plan, other, cluster, length, recompute=recompute).step_seconds
        if now - then >= WORTH_A_LINE * now:
            lines.append(
                f"--{name[0].replace('_', '-')} {name[1]} would make the step "
                f"{100 * (now - then) / now:.0f}% shorter; it pays on links below "
                f"{8 * _pays_below(other, name) / 1e9:.2g} Gbit/s"
            )
    return lines


def _pays_below(workload: Workload, name: tuple[str, str]) -> float:
    """Return the bytes a second of a link on which what a type spares of a number takes as long as
    to round and to widen it."""
    many = 1 << 20
    if name[0] == "sum_dtype":
        whole, short = FLOAT32 * many, workload.sum_bytes(FLOAT32 * many)
    else:
        whole = workload.dtype_bytes * many
        short = workload.sent(whole)
    return (whole - short) / many / ROUNDING_SECONDS[name]


def _shorter(
    workload: Workload, prediction: Prediction
) -> Iterator[tuple[tuple[str, str], FineTune]]:
    """Yield the types that the run could use and does not."""
    tune, mesh = workload.fine_tune, prediction.plan.mesh
    if mesh.dp > 1 and tune.sum_dtype == "float32":
        for dtype in ("bfloat16", "int8"):
            yield ("sum_dtype", dtype), replace(tune, sum_dtype=dtype)
    if mesh.pp > 1 and tune.send_dtype is None:
        for dtype in ("bfloat16", "int8") if workload.dtype_bytes > 2 else ("int8",):
            yield ("send_dtype", dtype), replace(tune, send_dtype=dtype)
