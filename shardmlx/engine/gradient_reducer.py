"""Sum gradients over the ranks that hold the same weights.

Replicas of a stage sum in float32, in buckets, each started as soon as its gradients are there,
so that it travels while the rest of the backward pass computes. Tied embeddings are held by the
first and the last stage: their gradient sums over both, and counts once in the norm.

Where replicas divide the optimizer (``shards``), each gets the sums of the weights that it owns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import mlx.core as mx
import numpy as np

from shardmlx.distributed.exchanges import Exchange
from shardmlx.distributed.messages import new_buffer
from shardmlx.distributed.sum_parts import parts_by_speed
from shardmlx.distributed.sums import Sums
from shardmlx.distributed.transport import Transport
from shardmlx.engine.buffers import BUCKET_BYTES
from shardmlx.engine.shards import Shards
from shardmlx.engine.stage import Stage
from shardmlx.pipeline.plan import Plan


@dataclass(frozen=True, slots=True)
class _Bucket:
    stage: Stage
    names: Sequence[str]
    total: mx.array
    sum: Exchange


class GradientReducer:
    """The sums that one rank takes part in, for its own stages. Methods are collective."""

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        stages: Sequence[Stage],
        sums: Sums,
        shards: Shards,
        links: Sequence[float] | None = None,
        *,
        keeps_errors: bool = False,
    ) -> None:
        self._transport = transport
        self._keeps_errors = keeps_errors
        self._errors: dict[str, mx.array] = {}
        self._links = links
        self._sums = sums
        self._shards = shards
        replica, pipeline_rank = plan.mesh.coordinates(transport.rank)
        self._replicas = plan.mesh.replicas_of(pipeline_rank)
        self._replica = replica
        ends = {plan.stage_map.placement[0], plan.stage_map.placement[-1]}
        self._holders = tuple(sorted(rank for end in ends for rank in plan.mesh.replicas_of(end)))
        self._stages = stages
        self._shared = sorted(
            {name for stage in stages for name in stage.names if stage.part.shares(name)}
        )
        self._buckets: list[_Bucket] = []
        self._own: dict[tuple[Stage, str], mx.array] = {}
        self._who = transport.name(transport.rank)

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
        if stage.reduces_each:
            # At most one bucket is there besides the new one.
            self._finish_buckets(lambda: f"{self._who}, summing gradients")
        # What one replica owns stands together.
        names.sort(key=self._shards.owner)
        total = mx.concatenate([stage.gradients[name].reshape(-1) for name in names])
        mx.eval(total)
        for name in names:
            del stage.gradients[name]  # the bucket holds it now: it exists once
        errors = self._errors_of(names[0], total.size)
        if self._shards.divides:
            sizes = [0] * len(self._replicas)
            for name in names:
                sizes[self._shards.owner(name)] += stage.part[name].size
            ends = [0, *accumulate(sizes)]
            started = self._sums.reduce_scatter(total, self._replicas, ends, errors)
        else:
            speeds = [1.0 if self._links is None else self._links[rank] for rank in self._replicas]
            ends = parts_by_speed(total.size, speeds)
            started = self._sums.all_reduce(total, self._replicas, ends, errors)
        self._buckets.append(_Bucket(stage, names, total, started))

    def _errors_of(self, name: str, size: int) -> mx.array | None:
        """Return what was rounded off of a sum, by its first weight; zeros at first."""
        if not self._keeps_errors:
            return None
        if name not in self._errors:
            self._errors[name] = new_buffer((size,), mx.float32)
        return self._errors[name]

    def forget_errors(self) -> None:
        """Forget what was rounded off of sums, of which one was not finite."""
        self._errors.clear()

    def finish(self, what: Callable[[], str], *, ends_update: bool = True) -> None:
        """Wait for all sums. Where the step ``ends_update``, ``stage.gradients`` then hold those of
        all its steps, of the weights that this replica updates."""
        self._finish_buckets(what)
        if not ends_update:
            return
        self._sum_shared(what)
        for stage, name in self._own:
            stage.gradients[name] = self._own[stage, name]
        self._own.clear()

    def _finish_buckets(self, what: Callable[[], str]) -> None:
        """End all sums, and keep those of the weights that this replica updates."""
        for bucket in self._buckets:
            self._sums.wait(bucket.sum, what)
            for name, part in self._mine_of(bucket):
                key = bucket.stage, name
                if key in self._own:
                    part = self._own[key] + part
                    mx.eval(part)
                elif bucket.stage.reduces_each:
                    # A part refers to the whole bucket, which goes.
                    part = mx.array(np.array(part))
                self._own[key] = part
        self._buckets.clear()

    def _mine_of(self, bucket: _Bucket) -> Iterator[tuple[str, mx.array]]:
        """Yield the sums of a bucket whose weights this replica updates."""
        offset = 0
        for name in bucket.names:
            shape = bucket.stage.part[name].shape
            size = math.prod(shape)
            if self._shards.is_mine(name):
                yield name, bucket.total[offset : offset + size].reshape(shape)
            offset += size

    def _sum_shared(self, what: Callable[[], str]) -> None:
        """Sum each shared weight's gradient over all stages that hold it, this rank's first."""
        for name in self._shared:
            holders = [stage for stage in self._stages if name in stage.gradients]
            total = holders[0].gradients[name]
            for stage in holders[1:]:
                total = total + stage.gradients[name]
            shape, total = total.shape, mx.contiguous(total.reshape(-1))
            mx.eval(total)
            errors = self._errors_of(name, total.size)
            self._sums.wait(self._sums.all_reduce(total, self._holders, None, errors), what)
            for stage in holders:
                stage.gradients[name] = total.reshape(shape)
                if not self._shards.is_mine(name):
                    del stage.gradients[name]

    def norm(self, spoiled: bool = False) -> float:
        """Return the global gradient norm: of the whole model, each weight counted once.

        It is the same on all ranks, to the bit whoever holds what: the squares of all weights are
        added as if without rounding. It is not a number if any rank is ``spoiled``.
        """
        # Row by row: on the CPU MLX adds one number after the other, and a float32 sum of all the
        # 58 million squares of one large matrix would be wrong by a sixth.
        squares = [
            mx.square(gradient).sum(axis=-1).sum()
            for stage in self._stages
            for name, gradient in stage.gradients.items()
            if name not in self._shared or stage.part.is_first
        ]
        # Where replicas hold the same gradients one of them counts.
        counts = self._shards.divides or self._replica == 0
        mine = [math.nan] if spoiled else []
        if squares and counts:
            mine += np.array(mx.stack(squares)).tolist()
        everyone = self._transport.all_gather(mine, "summing the gradient norm")
        return math.sqrt(math.fsum(square for theirs in everyone for square in theirs))
