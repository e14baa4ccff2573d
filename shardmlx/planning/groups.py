"""Groups of ranks that compute layers together, as machines of a plan to train. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardmlx.config.checks import shares_of
from shardmlx.config.inference import InferenceConfig
from shardmlx.config.specs import LayoutOptions, RunSpec
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.planning.facts.chips import shares_by_bandwidth
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.plan_facts import PlanFacts
from shardmlx.planning.facts.workload import ModelSizes, Workload, shared
from shardmlx.planning.memory.generation import beside_weights, setups_of


def asked_shares(
    options: LayoutOptions | InferenceConfig, sizes: ModelSizes, cluster: Cluster
) -> TensorShares:
    """Return the shares that a run asks for, or leaves to the bandwidths of memories. Raises
    ``UserError`` where layers, or the ranks, cannot be divided so."""
    across = options.tensor_parallel or 1
    weights = shares_of(options.tensor_shares, across)
    weights = weights or shares_by_bandwidth(cluster.machines, across)
    shares = TensorShares(weights, sizes.group_size, options.expert_parallel)
    shares.check(sizes.shape)
    shares.groups(cluster.size)
    return shares


def parts_of(whole: Workload, shares: TensorShares) -> list[Workload]:
    """Return the work of each rank of a group."""
    found = []
    for rank in range(shares.size):
        shape, sizes = shared(whole.shape, whole.weight_sizes, shares, rank)
        found.append(replace(whole, shape=shape, weight_sizes=sizes))
    return found


def in_shares(run: RunSpec, facts: PlanFacts, across: int) -> tuple[RunSpec, PlanFacts]:
    """Return a run with so many ranks for each layer, and the facts for groups of ranks. Raises
    ``UserError`` where layers, or the ranks, cannot be divided so."""
    run = run.with_shares(across)
    if across == 1:
        return run, facts
    shares = asked_shares(run.layout, facts.workload, facts.cluster)
    work, cluster, ranks = in_groups(facts.workload, facts.cluster, shares)
    beside = facts.beside
    if beside is not None:
        layers = facts.workload.shape.num_layers
        beside = max(setups_of(beside, shares), key=lambda each: beside_weights(each, 0, layers))
    return run, replace(
        facts,
        workload=work,
        cluster=cluster,
        shares=shares,
        whole=facts,
        ranks=tuple(ranks),
        beside=beside,
    )


def in_groups(
    whole: Workload, cluster: Cluster, shares: TensorShares
) -> tuple[Workload, Cluster, list[int]]:
    """Return the work and the machines of a plan for groups, and the rank that stands for each: the
    one with the least memory for its share. A group is as fast as its slowest rank."""
    across = shares.size
    parts = parts_of(whole, shares)
    ringed = cluster.with_rings(shares.size)
    groups = [range(first, first + across) for first in range(0, cluster.size, across)]
    scarcest = [
        min(group, key=lambda rank: cluster.capacity(rank) / shares.weights[rank % across])
        for group in groups
    ]
    fullest = (parts[rank % across] for rank in scarcest)
    work = max(fullest, key=lambda part: sum(part.weight_sizes.layers))
    machines = [
        replace(
            ringed.machines[rank],
            flops=_as_fast(work, parts, [cluster.machines[each] for each in group]),
        )
        for group, rank in zip(groups, scarcest, strict=True)
    ]
    return work, replace(cluster, machines=tuple(machines)), scarcest


def _flops(work: Workload) -> float:
    return sum(work.shape.layer(i).flops(1) for i in range(work.shape.num_layers))


def _as_fast(work: Workload, parts: Sequence[Workload], members: Sequence[Machine]) -> float | None:
    """Return the FLOP/s that would do ``work`` while the slowest of a group does its part."""
    slowest = float("inf")
    for part, machine in zip(parts, members, strict=True):
        if machine.flops is None:
            return None
        slowest = min(slowest, machine.flops * _flops(work) / _flops(part))
    return slowest
