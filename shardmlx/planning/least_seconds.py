"""Bound the seconds of a step from below, before its layers are divided. No MLX, no MPI.

A search that looks at ways by their bounds, the least first, ends at the first whose bound is above
a step that it has found: no other can be faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from shardmlx.config.specs import RunSpec
from shardmlx.pipeline.mesh import Mesh
from shardmlx.planning.facts.cluster import pipeline_seconds
from shardmlx.planning.facts.plan_facts import PlanFacts
from shardmlx.planning.layout import divide_batch
from shardmlx.planning.time.parts import COMPUTED_AGAIN, ModelSeconds
from shardmlx.planning.ways import size_of, virtual_of

SET_UP_TOKENS = 24
"""Tokens that could be computed while a micro-batch is set up, at any size: weights are read, and
each operation is started. Counted on an x86 core in float32; going by its data sheet an M1 Pro
reads 16-bit weights while it computes 26 tokens, an M4 Max 31."""

_ROUNDING = 1e-9
"""Relative difference by which rounding may make a bound larger than a step."""


def set_up_tokens(rows: int, facts: PlanFacts) -> int:
    """Return the tokens a row that set-up of ``rows`` costs; measured times have it in them."""
    return 0 if facts.cluster.profile is not None else -(-SET_UP_TOKENS // rows)


def bounded_alike(way: RunSpec, facts: PlanFacts) -> tuple[object, ...]:
    """Return what ways with the same ``least_seconds`` have in common."""
    batch = way.batch
    stages = way.layout.pipeline_stages
    of_batch = (batch.pack, size_of(way), batch.loss_chunk, batch.recompute)
    return stages, virtual_of(way.layout.schedule, facts) == 1, *of_batch


def least_seconds(way: RunSpec, facts: PlanFacts) -> float:
    """Return seconds, or FLOPs, that a step of a way takes at least, however layers are divided."""
    batch = way.batch
    cluster = facts.cluster
    mesh = Mesh.for_world(cluster.size, way.layout.pipeline_stages or 1)
    rows, size = divide_batch(way, mesh)
    length = facts.lengths.mean(batch.pack)
    if mesh.dp > 1 and batch.replica_rows is not None:
        # Replicas may have other numbers of rows, and then larger micro-batches.
        times = partial(pipeline_seconds, facts.work(way), cluster, mesh, size, length)
        models = [model for replica in range(mesh.dp) for model in times(replica)]
        return batch.batch_size / size * _always_busy(models)
    length += set_up_tokens(size, facts)
    models = pipeline_seconds(facts.work(way), cluster, mesh, size, length)
    microbatches = rows / size
    least = microbatches * _always_busy(models)
    if mesh.pp == 1:
        return least
    # The last layer and the head are in one stage.
    last = len(models[0].layers) - 1
    indivisible = microbatches * min(model.stage(last, last + 1).microbatch for model in models)
    filling = 0.0
    if virtual_of(way.layout.schedule, facts) == 1:
        filling = _seconds_of_filling(models, microbatches)
    return max(least, (1 - _ROUNDING) * max(indivisible, filling))


def _speeds(models: Sequence[ModelSeconds]) -> list[float]:
    """Return the model's micro-batches a second of each rank by itself."""
    return [1 / model.stage(0, len(model.layers)).microbatch for model in models]


def _always_busy(models: Sequence[ModelSeconds]) -> float:
    """Return the seconds of a micro-batch on ranks that are always busy."""
    return _least_sum(models) / sum(_speeds(models))


def _least_sum(models: Sequence[ModelSeconds]) -> float:
    """Return the sum of the shares of the model that ranks compute, each share of its time for all
    of it, where each part is on the rank of which it takes the least share: 1 on ranks that differ
    in speed alone."""
    first = models[0]
    unlike = [model for model in models if model is not first]
    if not unlike:
        return 1.0
    shares = []
    for model in (first, *unlike):
        whole = model.stage(0, len(model.layers)).microbatch
        shares.append([each / whole for each in _parts(model)])
    least: float = np.min(shares, axis=0).sum()
    return min(1.0, (1 - _ROUNDING) * least)


def _parts(model: ModelSeconds) -> list[float]:
    """Return the seconds of a micro-batch in each layer, the embedding, and the head."""
    again = COMPUTED_AGAIN[model.recompute]
    layers = [
        each.microbatch + again * (place >= model.first_trained) * each.forward
        for place, each in enumerate(model.layers)
    ]
    return [*layers, model.embedding.microbatch, model.head.microbatch]


def _forward_share(model: ModelSeconds) -> float:
    """Return the part of a stage's micro-batch that is its F, at least."""
    shares = [1 / (1 + COMPUTED_AGAIN[model.recompute])]
    of_layers = zip(model.layers, model.layer_costs.layers, strict=True)
    shares.extend(each.forward / cost for each, cost in of_layers if cost > 0)
    first = model.embedding
    if first.microbatch > first.forward:
        shares.append(first.forward / first.microbatch)
    return max(0.0, min(shares))


def _seconds_of_filling(models: Sequence[ModelSeconds], microbatches: float) -> float:
    """Return the seconds of a step in which each stage is busy, once the F of the first micro-batch
    has come to it.

    A stage of t seconds a micro-batch ends after m t and the F of those before it, which are
    ``forward`` of their t. In a step of a second the stages, each a share t x speed of the model,
    would come so far together: from the last stage on, each adds speed / m, and leaves 1 - forward
    / m of what those after it do. They come farthest with the fastest rank first.
    """
    forward = min(map(_forward_share, models))
    done = 0.0
    for speed in sorted(_speeds(models)):
        done = max(done, done * (1 - forward / microbatches) + speed / microbatches)
    return _least_sum(models) / done
