"""Find changes that make a model fit; each remedy is tried before it is named. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from shardmlx.config.common_options import AUTO, OFF, SIMPLEST
from shardmlx.config.specs import DIVIDED_WEIGHTS, RECOMPUTE, RunSpec
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.workload import DTYPE_BYTES, Workload
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.choice import fits
from shardmlx.planning.facts import Facts, SequenceLengths

QUANTISED_BITS = 4.5
"""Bits of a weight in 4 bits, in groups of 64 with a scale and a bias of 16 bits each."""

SHORTEST = 128
"""Tokens of the shortest useful sequence."""

MOST_MACHINES = 8
"""Limit of machines to suggest."""


def remedies(run: RunSpec, facts: Facts) -> list[str]:
    """Return short descriptions of changes after which the run fits, each by itself."""
    batch, tune, workload = run.batch, run.fine_tune, facts.workload
    found = []
    for name, tighter in _tighter(run, facts):
        if fits(tighter, facts):
            found.append(name)
    lora = replace(run, fine_tune=replace(tune, fine_tune_type="lora", unfreeze_all=False))
    if tune.is_full and fits(lora, facts):
        found.append("--fine-tune-type lora")
    packed = quantised(workload)
    if packed is not None and fits(lora, replace(facts, workload=packed)):
        adapters = " and --fine-tune-type lora" if tune.is_full else ""
        found.append(f"the model quantised to 4 bits{adapters}")
    for length in _halved_lengths(facts.lengths.longest[0]):
        short = replace(run, batch=replace(batch, max_seq_length=length))
        if fits(short, replace(facts, lengths=SequenceLengths.full(length))):
            found.append(f"--max-seq-length {length}")
            break
    free = replace(run.layout, stage_map=None, pipeline_stages=None, data_parallel=None)
    run, facts = replace(run, layout=free), replace(facts, stage_map=None)
    for name, fewer in _one_machine_less(facts.cluster):
        if fits(run, replace(facts, cluster=fewer)):
            found.append(f"{name} left out")
            break
    for name, larger in _more_machines(facts.cluster, workload.shape.num_layers):
        if fits(run, replace(facts, cluster=larger)):
            found.append(name)
            break
    return found


def _tighter(run: RunSpec, facts: Facts) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with one of the user's options replaced by a thriftier one."""
    batch, layout, tune = run.batch, run.layout, run.fine_tune
    if OFF in (batch.attention_chunk, batch.loss_chunk):
        pieces = replace(batch, attention_chunk=AUTO, loss_chunk=AUTO)
        yield "--attention-chunk auto --loss-chunk auto", replace(run, batch=pieces)
    if (batch.micro_batch_size or 1) > 1:
        yield "--micro-batch-size 1", replace(run, batch=replace(batch, micro_batch_size=1))
    if batch.recompute is not None:
        for more in RECOMPUTE[RECOMPUTE.index(batch.recompute) + 1 :]:
            yield f"--recompute {more}", replace(run, batch=replace(batch, recompute=more))
    if tune.zero is not None and not tune.divides_weights:
        divided = replace(tune, zero=DIVIDED_WEIGHTS)
        yield f"--zero {DIVIDED_WEIGHTS}", replace(run, fine_tune=divided)
    if layout.schedule not in (AUTO, SIMPLEST) and facts.stage_map is None:
        simple = replace(layout, schedule=SIMPLEST)
        yield f"--schedule {SIMPLEST}", replace(run, layout=simple)


def quantised(workload: Workload) -> Workload | None:
    """Return the same work on weights of 4 bits; None if they are quantised already."""
    shape, sizes = workload.shape, workload.weight_sizes
    width = DTYPE_BYTES[workload.dtype]
    if sizes.layers[0] < width * shape.layer(0).parameters:
        return None
    factor = QUANTISED_BITS / (8 * width)
    packed = LayerCosts(
        tuple(factor * each for each in sizes.layers), factor * sizes.embedding, factor * sizes.head
    )
    return replace(workload, weight_sizes=packed)


def _halved_lengths(length: int) -> Iterator[int]:
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
