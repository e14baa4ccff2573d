"""What would make a model fit that does not: each remedy is tried before it is named. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardmlx.cluster import Cluster
from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts
from shardmlx.planner import Limits, candidates, predict_candidate
from shardmlx.workload import DTYPE_BYTES, Workload

QUANTISED_BITS = 4.5
"""Of a weight in 4 bits, in groups of 64 with a scale and a bias of 16 bits each."""

SHORTEST = 128
"""Tokens; shorter sequences are no remedy."""

MOST_MACHINES = 8
"""That one would add."""


def remedies(workload: Workload, cluster: Cluster, limits: Limits) -> list[str]:
    """Short descriptions of changes after which the run fits, each by itself."""
    tight = replace(limits, micro_batch_size=1, schedule="1f1b", checkpoint=True, virtual=None)
    found = []
    lora = replace(workload, config=replace(workload.config, fine_tune_type="lora",
                                            unfreeze_all=False))  # fmt: skip
    if workload.config.fine_tune_type == "full" and fits(lora, cluster, tight):
        found.append("--fine-tune-type lora")
    packed = quantised(lora)
    if packed is not None and fits(packed, cluster, tight):
        adapters = "" if workload.config.fine_tune_type != "full" else " and --fine-tune-type lora"
        found.append(f"the model quantised to 4 bits{adapters}")
    for length in _shorter(limits.length):
        if fits(workload, cluster, replace(tight, length=length)):
            found.append(f"--max-seq-length {length}")
            break
    for count, larger in _more_machines(cluster, workload.shape.num_layers):
        if fits(workload, larger, tight):
            machine = larger.machines[-1]
            s = "s" if count > 1 else ""
            found.append(f"{count} more machine{s} like {machine.host.partition('+')[0]}")
            break
    return found


def fits(workload: Workload, cluster: Cluster, limits: Limits) -> bool:
    """Whether some plan within the limits fits."""
    for way in candidates(limits, cluster.size, workload.shape.num_layers):
        try:
            predict_candidate(way, workload, cluster, limits)
        except UserError:
            continue
        return True
    return False


def quantised(workload: Workload) -> Workload | None:
    """The same work on weights of 4 bits; None if they are not of full width now."""
    shape, sizes = workload.shape, workload.weight_sizes
    width = DTYPE_BYTES[workload.dtype]
    if sizes.layers[0] < width * shape.layer_parameters(0):
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


def _more_machines(cluster: Cluster, num_layers: int) -> Iterator[tuple[int, Cluster]]:
    """With 1, 2 ... copies of the largest machine."""
    largest = max(cluster.machines, key=lambda machine: machine.memory or 0)
    for count in range(1, min(MOST_MACHINES, num_layers - cluster.size) + 1):
        copies = tuple(replace(largest, host=f"{largest.host}+{i}") for i in range(count))
        yield count, replace(cluster, machines=(*cluster.machines, *copies))
