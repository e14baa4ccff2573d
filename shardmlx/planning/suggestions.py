"""Find what would make a model fit; each remedy is tried before it is named. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.specs import DIVIDED_WEIGHTS, RECOMPUTE
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.workload import DTYPE_BYTES, Workload
from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.search import Limits, candidates, predict_candidate

QUANTISED_BITS = 4.5
"""Bits of a weight in 4 bits, in groups of 64 with a scale and a bias of 16 bits each."""

SHORTEST = 128
"""Tokens; shorter sequences are no remedy."""

MOST_MACHINES = 8
"""Limit of machines that one would add."""


def remedies(workload: Workload, cluster: Cluster, limits: Limits) -> list[str]:
    """Short descriptions of changes after which the run fits, each by itself."""
    found = []
    batch = workload.batch
    if OFF in (batch.attention_chunk, batch.loss_chunk):
        pieces = replace(workload, batch=replace(batch, attention_chunk=AUTO, loss_chunk=AUTO))
        if fits(pieces, cluster, limits):
            found.append("--attention-chunk auto --loss-chunk auto")
    for name, tighter in _tighter(limits):
        if fits(workload, cluster, tighter):
            found.append(name)
    is_full = workload.fine_tune.is_full
    with_lora = replace(workload.fine_tune, fine_tune_type="lora", unfreeze_all=False)
    lora = replace(workload, fine_tune=with_lora) if is_full else workload
    if is_full and fits(lora, cluster, limits):
        found.append("--fine-tune-type lora")
    packed = quantised(lora)
    if packed is not None and fits(packed, cluster, limits):
        adapters = " and --fine-tune-type lora" if is_full else ""
        found.append(f"the model quantised to 4 bits{adapters}")
    for length in _shorter(limits.length):
        if fits(workload, cluster, replace(limits, length=length)):
            found.append(f"--max-seq-length {length}")
            break
    for name, fewer in _one_machine_less(cluster):
        if fits(workload, fewer, limits):
            found.append(f"{name} left out")
            break
    for name, larger in _more_machines(cluster, workload.shape.num_layers):
        if fits(workload, larger, limits):
            found.append(name)
            break
    return found


def fits(workload: Workload, cluster: Cluster, limits: Limits) -> bool:
    """Return whether a plan within the limits fits, with the least memory in what is left open."""
    least = replace(
        limits,
        micro_batch_size=limits.micro_batch_size or 1,
        schedule=limits.schedule or "1f1b",
        recompute=RECOMPUTE[-1] if limits.recompute is None else limits.recompute,
    )
    try:
        ways = candidates(least, cluster.size, workload.shape.num_layers)
    except UserError:
        return False
    for way in ways:
        try:
            predict_candidate(way, workload, cluster, least)
        except UserError:
            continue
        return True
    return False


def _tighter(limits: Limits) -> Iterator[tuple[str, Limits]]:
    """Yield the limits with one choice of the user settled for less memory."""
    if (limits.micro_batch_size or 1) > 1:
        yield "--micro-batch-size 1", replace(limits, micro_batch_size=1)
    if limits.recompute is not None:
        for more in RECOMPUTE[RECOMPUTE.index(limits.recompute) + 1 :]:
            yield f"--recompute {more}", replace(limits, recompute=more)
    if limits.divides_weights is False:
        yield f"--zero {DIVIDED_WEIGHTS}", replace(limits, divides_weights=True)
    if limits.schedule not in (None, "1f1b") and limits.stage_map is None:
        yield "--schedule 1f1b", replace(limits, schedule="1f1b", virtual=None)


def quantised(workload: Workload) -> Workload | None:
    """Return the same work on weights of 4 bits; None if they are not of full width now."""
    shape, sizes = workload.shape, workload.weight_sizes
    width = DTYPE_BYTES[workload.dtype]
    if sizes.layers[0] < width * shape.layer(0).parameters:
        return None
    factor = QUANTISED_BITS / (8 * width)
    packed = LayerCosts(
        tuple(factor * each for each in sizes.layers), factor * sizes.embedding, factor * sizes.head
    )
    return replace(workload, weight_sizes=packed)


def _shorter(length: int) -> Iterator[int]:
    while length // 2 >= SHORTEST:
        length //= 2
        yield length


def _one_machine_less(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster without its smallest machine, without the next one, and so on."""
    by_size = sorted(cluster.machines, key=lambda machine: machine.memory or math.inf)
    for host in dict.fromkeys(machine.host for machine in by_size):
        others = tuple(machine for machine in cluster.machines if machine.host != host)
        if others:
            yield host, replace(cluster, machines=others)


def _more_machines(cluster: Cluster, num_layers: int) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with 1, 2 ... copies of the largest machine."""
    largest = max(cluster.machines, key=lambda machine: machine.memory or 0)
    for count in range(1, min(MOST_MACHINES, num_layers - cluster.size) + 1):
        copies = tuple(
            replace(largest, host=f"{largest.host}-copy-{i}", kind=largest.kind or largest.host)
            for i in range(count)
        )
        name = f"{count} more machine{'s' if count > 1 else ''} like {largest.host}"
        yield name, replace(cluster, machines=(*cluster.machines, *copies))
