"""Sum gradients over the ranks that hold the same weights.

Replicas of a stage sum in float32, in buckets, each started as soon as its gradients are there,
so that it travels while the rest of the backward pass computes. Tied embeddings are held by the
first and the last stage: their gradient sums over both, and counts once in the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import Handle
from shardmlx.distributed.transport import Transport
from shardmlx.engine.buffers import BUCKET_BYTES
from shardmlx.engine.stage import Stage
from shardmlx.pipeline.plan import Plan


@dataclass(frozen=True, slots=True)
class _Bucket:
    stage: Stage
    names: Sequence[str]
    total: mx.array
    handle: Handle


class GradientReducer:
    """The sums that one rank takes part in, for its own stages. Methods are collective."""

    def __init__(self, plan: Plan, transport: Transport, stages: Sequence[Stage]) -> None:
        self._transport = transport
        replica, pipeline_rank = plan.mesh.coordinates(transport.rank)
        self._replicas = plan.mesh.replicas_of(pipeline_rank)
        self._replica = replica
        self._world = tuple(range(plan.mesh.size))
        ends = {plan.stage_map.placement[0], plan.stage_map.placement[-1]}
        self._holders = tuple(sorted(rank for end in ends for rank in plan.mesh.replicas_of(end)))
        self._stages = stages
        self._shared = sorted(
            {name for stage in stages for name in stage.names if stage.part.shares(name)}
        )
        self._buckets: list[_Bucket] = []
        # Joining has no timeout of its own, so that all must be there first; and it waits for the
        # whole group, so that all join in the same order.
        transport.barrier("start of the engine")
        for group in (self._replicas, self._world):
            transport.join(group)
        if pipeline_rank in ends:
            transport.join(self._holders)

    def parts(self, stage: Stage) -> list[list[str]]:
        """Divide the stage's trained weights into buckets, in the order in which gradients come."""
        if len(self._replicas) == 1:
            return [list(stage.names)]
        parts: list[list[str]] = []
        room = 0
        for name in stage.names:
            size = 4 * stage.part[name].size
            if not parts or size > room:
                parts.append([])
                room = BUCKET_BYTES
            parts[-1].append(name)
            room -= size
        return parts

    def start(self, stage: Stage, names: Sequence[str]) -> None:
        """Start to sum evaluated gradients, but for those of weights that several stages share."""
        names = [name for name in names if name not in self._shared]
        if len(self._replicas) == 1 or not names:
            return
        total = mx.concatenate([stage.gradients[name].reshape(-1) for name in names])
        mx.eval(total)
        for name in names:
            del stage.gradients[name]  # the bucket holds it now: it exists once
        handle = self._transport.all_reduce(total, self._replicas)
        self._buckets.append(_Bucket(stage, names, total, handle))

    def finish(self, what: Callable[[], str]) -> None:
        """Wait for all sums; ``stage.gradients`` then hold those of the whole batch."""
        self._sum_shared(what)
        for bucket in self._buckets:
            self._transport.wait(bucket.handle, what)
            offset = 0
            for name in bucket.names:
                shape = bucket.stage.part[name].shape
                size = math.prod(shape)
                part = bucket.total[offset : offset + size].reshape(shape)
                bucket.stage.gradients[name] = part
                offset += size
        self._buckets.clear()

    def _sum_shared(self, what: Callable[[], str]) -> None:
        """Sum each shared weight's gradient over all stages that hold it, this rank's first."""
        for name in self._shared:
            holders = [stage for stage in self._stages if name in stage.gradients]
            total = holders[0].gradients[name]
            for stage in holders[1:]:
                total = total + stage.gradients[name]
            total = mx.contiguous(total)
            mx.eval(total)
            self._transport.wait(self._transport.all_reduce(total, self._holders), what)
            for stage in holders:
                stage.gradients[name] = total

    def norm(self, what: Callable[[], str], spoiled: bool = False) -> float:
        """Return the global gradient norm: of the whole model, each weight counted once.

        It is the same on all ranks of all replicas, and not a number if any rank is ``spoiled``.
        """
        # Row by row: on the CPU MLX adds one number after the other, and a float32 sum of all the
        # 58 million squares of one large matrix would be wrong by a sixth.
        squares = [
            mx.square(gradient).sum(axis=-1).sum()
            for stage in self._stages
            for name, gradient in stage.gradients.items()
            if name not in self._shared or stage.part.is_first
        ]
        # Replicas hold the same gradients: one of them counts.
        total = mx.array([math.nan if spoiled else 0.0])
        if self._replica == 0:
            total = total + sum(squares)
        mx.eval(total)
        self._transport.wait(self._transport.all_reduce(total, self._world), what)
        (square,) = np.array(total)
        return math.sqrt(square)
