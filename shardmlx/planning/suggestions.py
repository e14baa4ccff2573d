"""Find changes that make a model fit; each remedy is tried before it is named. No MLX, no MPI."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from shardmlx.config.common_options import AUTO, OFF, SIMPLEST
from shardmlx.config.specs import DIVIDED_WEIGHTS, RECOMPUTE, RunSpec
from shardmlx.planning.choice import fits
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.ways import size_of, with_smallest

QUANTISED_BITS = 4.5
"""Bits of a weight in 4 bits, in groups of 64 with a scale and a bias of 16 bits each."""

SHORTEST = 128
"""Tokens of the shortest useful sequence."""

MOST_MACHINES = 8
"""Limit of machines to suggest."""


def remedies(run: RunSpec, facts: PlanFacts) -> list[str]:
    """Return short descriptions of changes after which the run fits, each by itself."""
    found: list[str] = []
    for changes in _changes(run, facts):
        found += islice((name for name, other, of in changes if fits(other, of)), 1)
    return found


def _changes(run: RunSpec, facts: PlanFacts) -> Iterator[Iterable[tuple[str, RunSpec, PlanFacts]]]:
    """Yield changes of one kind, the least first, with the run and the facts that they make."""
    batch = run.batch
    tune = run.fine_tune
    cluster = facts.cluster
    for name, tighter in _tighter(run, facts):
        yield [(name, tighter, facts)]
    lora = replace(run, fine_tune=replace(tune, fine_tune_type="lora", unfreeze_all=False))
    if tune.is_full:
        yield [("--fine-tune-type lora", lora, facts)]
    packed = quantised(facts.workload)
    if packed is not None:
        adapters = " and --fine-tune-type lora" if tune.is_full else ""
        name = f"the model quantised to 4 bits{adapters}"
        yield [(name, lora, replace(facts, workload=packed))]
    longest = facts.lengths.longest[0]
    yield (
        (
            f"--max-seq-length {length}",
            replace(run, batch=replace(batch, max_seq_length=length)),
            replace(facts, lengths=SequenceLengths.full(length)),
        )
        for length in (longest >> halvings for halvings in range(1, longest.bit_length()))
        if length >= SHORTEST
    )
    free = replace(run.layout, stage_map=None, pipeline_stages=None, data_parallel=None)
    run = replace(run, layout=free)
    facts = replace(facts, stage_map=None)
    for clusters in (_one_machine_less(cluster), _more_machines(cluster, facts)):
        yield ((name, run, replace(facts, cluster=other)) for name, other in clusters)


def _tighter(run: RunSpec, facts: PlanFacts) -> Iterator[tuple[str, RunSpec]]:
    """Yield the run with one of the user's options replaced by a thriftier one."""
    batch = run.batch
    layout = run.layout
    tune = run.fine_tune
    if OFF in (batch.attention_chunk, batch.loss_chunk):
        pieces = replace(batch, attention_chunk=AUTO, loss_chunk=AUTO)
        yield "attention_chunk: auto and loss_chunk: auto", replace(run, batch=pieces)
    if (small := with_smallest(run)) is not None:
        yield f"--micro-batch-size {size_of(small)}", small
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
    shape = workload.shape
    sizes = workload.weight_sizes
    width = workload.dtype_bytes
    if sizes.layers[0] < width * shape.layer(0).parameters:
        return None
    factor = QUANTISED_BITS / (8 * width)
    return replace(workload, weight_sizes=sizes.scaled(factor))


def _one_machine_less(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster without its smallest machine, without the next one, and so on."""
    by_size = sorted(cluster.machines, key=lambda machine: machine.memory or math.inf)
    for host in dict.fromkeys(machine.host for machine in by_size):
        others = tuple(machine for machine in cluster.machines if machine.host != host)
        if others:
            yield f"{host} left out", replace(cluster, machines=others)


def _more_machines(cluster: Cluster, facts: PlanFacts) -> Iterator[tuple[str, Cluster]]:
    """Yield the cluster with 1, 2 ... copies of the largest machine."""
    largest = max(cluster.machines, key=lambda machine: machine.memory or 0)
    most = min(MOST_MACHINES, facts.workload.shape.num_layers - cluster.size)
    for count in range(1, most + 1):
        copies = tuple(
            replace(largest, host=f"{largest.host}-copy-{i}", kind=largest.kind or largest.host)
            for i in range(count)
        )
        name = f"{count} more machine{'s' if count > 1 else ''} like {largest.host}"
        yield name, replace(cluster, machines=(*cluster.machines, *copies))
