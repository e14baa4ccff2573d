"""Say which shorter types of messages would pay between these machines. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardmlx.config.specs import FineTune
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.predict import Prediction, predict
from shardmlx.costmodel.workload import Workload

WORTH_A_LINE = 0.01
"""Part of a step that must be saved."""

PAYS_BELOW = {
    ("sum_dtype", "bfloat16"): 0.5e9,
    ("sum_dtype", "int8"): 0.6e9,
    ("send_dtype", "bfloat16"): 2e9,
}
"""Bytes a second of a link below which a type pays: the bytes that it spares a number, two or three
of four, in the time that one core takes to round and to widen it. On one of an x86 server that is
4.2, 5 and 1 ns a number."""


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
        limit = PAYS_BELOW[name]
        if now - then >= WORTH_A_LINE * now and min(links) < limit:
            lines.append(
                f"--{name[0].replace('_', '-')} {name[1]} would make the step "
                f"{100 * (now - then) / now:.0f}% shorter; it pays on links below "
                f"{8 * limit / 1e9:g} Gbit/s"
            )
    return lines


def _shorter(
    workload: Workload, prediction: Prediction
) -> Iterator[tuple[tuple[str, str], FineTune]]:
    """Yield the types that the run could use and does not."""
    tune, mesh = workload.fine_tune, prediction.plan.mesh
    if mesh.dp > 1 and tune.sum_dtype == "float32":
        for dtype in ("bfloat16", "int8"):
            yield ("sum_dtype", dtype), replace(tune, sum_dtype=dtype)
    if mesh.pp > 1 and tune.send_dtype is None and workload.dtype_bytes > 2:
        yield ("send_dtype", "bfloat16"), replace(tune, send_dtype="bfloat16")
