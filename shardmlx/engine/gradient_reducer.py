"""Sum gradients over the ranks that hold the same weights.

Replicas of a stage sum in float32, in buckets, each started as soon as its gradients are there,
so that it travels while the rest of the backward pass computes. Tied embeddings are held by the
first and the last stage: their gradient sums over both, and counts once in the norm.

With a divided optimizer (``shards``), each replica gets the sums of the weights that it owns. A
bucket of one large matrix goes to one replica and leaves other links idle: such buckets wait for
buckets of other owners, and travel with them.

Rounding errors of a rank's contribution are added to its next one for the same weight (error
feedback: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014). Nothing is lost for
good, unless a gradient overflows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import mlx.core as mx
import numpy as np

from shardmlx.distributed.exchanges import Exchange
from shardmlx.distributed.host_sums import HostSums, levels_of
from shardmlx.distributed.messages import buffer_of, new_buffer
from shardmlx.distributed.sums import Sums
from shardmlx.distributed.transport import Transport
from shardmlx.engine.buffers import BUCKET_BYTES, in_buckets
from shardmlx.engine.divided_weights import Shards
from shardmlx.engine.stage import Stage
from shardmlx.pipeline.plan import Plan

MOST_UNEVEN = 1.25
"""Share of a sum that one replica may get, as a multiple of the mean."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    stage: Stage
    sizes: Mapping[str, int]
    ends: Sequence[int]  # the end of each replica's part, where each updates its own
    total: mx.array
    errors: mx.array | None


class GradientReducer:
    """The sums that one rank takes part in, for its own stages. Methods are collective.

    ``errors`` are the rounding errors of its gradients on the wire.
    """

    def __init__(
        self, plan: Plan, transport: Transport, stages: Sequence[Stage], sums: Sums, shards: Shards
    ) -> None:
        self._transport = transport
        self._sums = sums
        self._shards = shards
        replica, pipeline_rank = plan.mesh.coordinates(transport.rank)
        self._share = share = plan.mesh.share(transport.rank)
        self._replicas = plan.mesh.replicas_of(pipeline_rank, share)
        self._replica = replica
        levels = levels_of(transport.rank, self._replicas, transport.hosts)
        self._by_host: HostSums | None = None
        if levels is not None and not shards.divides and not sums.wire.is_shorter:
            self._by_host = HostSums(sums, transport.rank, levels)
        ends = {plan.stage_map.placement[0], plan.stage_map.placement[-1]}
        self._holders = tuple(
            sorted(rank for end in ends for rank in plan.mesh.replicas_of(end, share))
        )
        self._stages = stages
        self._shared = sorted(
            {name for stage in stages for name in stage.names if stage.part.shares(name)}
        )
        groups = {name: self._replicas for stage in stages for name in stage.names}
        groups |= dict.fromkeys(self._shared, self._holders)
        self.errors = RoundingErrors(transport.rank, groups if sums.wire.keeps_errors else {})
        self._held: list[_Bucket] = []
        self._started: list[tuple[Exchange, Sequence[_Bucket]]] = []
        self._own: dict[tuple[Stage, str], mx.array] = {}
        self._who = transport.name(transport.rank)

    def doing(self) -> str:
        """Return how messages name this rank's wait for a sum."""
        return f"{self._who}, summing gradients"

    def parts(self, stage: Stage) -> list[list[str]]:
        """Divide the stage's trained weights into buckets, in the order in which gradients come."""
        if len(self._replicas) == 1:
            return [list(stage.names)]
        return in_buckets(stage.names, lambda name: stage.part[name].size, BUCKET_BYTES)

    def start(self, stage: Stage, names: Sequence[str]) -> None:
        """Start to sum evaluated gradients, but for those of weights that several stages share."""
        names = [name for name in names if name not in self._shared]
        if len(self._replicas) == 1 or not names:
            return
        if stage.reduces_each:
            # At most one bucket is held besides the new one.
            self._finish_buckets()
        # An owner's weights are contiguous.
        names.sort(key=self._shards.owner)
        total = _in_one([stage.gradients.pop(name) for name in names])
        sizes = {name: stage.part[name].size for name in names}
        errors = self.errors.take(sizes)
        owned = [0] * len(self._replicas)
        for name, size in sizes.items():
            owned[self._shards.owner(name)] += size
        bucket = _Bucket(stage, sizes, [0, *accumulate(owned)], total, errors)
        if not self._shards.divides:
            if self._by_host is not None:
                started = self._by_host.all_reduce(total)
            else:
                started = self._sums.all_reduce(total, self._replicas, errors)
            self._started.append((started, [bucket]))
            return
        self._held.append(bucket)
        if stage.reduces_each or self._keeps_all_busy():
            self._start_held()

    def _keeps_all_busy(self) -> bool:
        """Tell whether the held buckets keep all links busy: each replica gets about as much, or
        they are so many that more would not help."""
        parts = [[stop - start for start, stop in pairwise(each.ends)] for each in self._held]
        gets = list(map(sum, zip(*parts, strict=True)))
        is_even = max(gets) * len(gets) <= MOST_UNEVEN * sum(gets)
        return is_even or sum(gets) >= len(gets) * max(map(sum, parts))

    def _start_held(self) -> None:
        if self._held:
            started = self._sums.reduce_scatter(
                [each.total for each in self._held],
                self._replicas,
                [each.ends for each in self._held],
                [each.errors for each in self._held if each.errors is not None],
            )
            self._started.append((started, tuple(self._held)))
            self._held.clear()

    def forget(self) -> None:
        """Drop sums, one of which was not finite, and their rounding errors."""
        self._own.clear()
        self.errors.forget()

    def finish(self, *, ends_update: bool = True) -> None:
        """Wait for all sums. If the step ``ends_update``, ``stage.gradients`` then hold the sums of
        all its steps, for the weights that this replica updates."""
        self._finish_buckets()
        if not ends_update:
            return
        self._sum_shared()
        for stage, name in self._own:
            stage.gradients[name] = self._own[stage, name]
        self._own.clear()
        for stage in self._stages:
            stage.sum_partial_gradients()

    def _finish_buckets(self) -> None:
        """End all sums, and keep those of the weights that this replica updates."""
        self._start_held()
        for started, buckets in self._started:
            self._sums.wait(started, self.doing)
            for bucket in buckets:
                self.errors.keep(bucket.sizes, bucket.errors)
                self._keep(bucket)
        self._started.clear()

    def _keep(self, bucket: _Bucket) -> None:
        """Add a bucket's sums to those of the same weights, if this replica updates them."""
        offset = 0
        for name, size in bucket.sizes.items():
            start, offset = offset, offset + size
            if not self._shards.is_mine(name):
                continue
            part = bucket.total[start:offset].reshape(bucket.stage.part[name].shape)
            key = bucket.stage, name
            if key in self._own:
                part = self._own[key] + part
                mx.eval(part)
            elif bucket.stage.reduces_each:
                # Copied, since a part would keep the whole bucket in memory.
                part = mx.array(np.array(part))
            self._own[key] = part

    def _sum_shared(self) -> None:
        """Sum each shared weight's gradient over all stages that hold it, this rank's first."""
        for name in self._shared:
            holders = [stage for stage in self._stages if name in stage.gradients]
            total = holders[0].gradients[name]
            for stage in holders[1:]:
                total = total + stage.gradients[name]
            shape, total = total.shape, mx.contiguous(total.reshape(-1))
            mx.eval(total)
            sizes = {name: total.size}
            errors = self.errors.take(sizes)
            self._sums.wait(self._sums.all_reduce(total, self._holders, errors), self.doing)
            self.errors.keep(sizes, errors)
            for stage in holders:
                stage.gradients[name] = total.reshape(shape)
                if not self._shards.is_mine(name):
                    del stage.gradients[name]

    def norm(self, spoiled: bool = False) -> float:
        """Return the global gradient norm of the whole model, each weight counted once.

        All ranks get the same bits, whoever holds the weights, since squares are added as if
        without rounding. The norm is not a number if any rank is ``spoiled``.
        """
        mine = [math.nan] if spoiled else []
        # One of the replicas that hold the same gradients counts.
        if self._shards.divides or self._replica == 0:
            mine += self._squares()
        everyone = self._transport.all_gather(mine, "summing the gradient norm")
        return math.sqrt(math.fsum(square for theirs in everyone for square in theirs))

    def _squares(self) -> list[float]:
        """Return the squared norm of each gradient that counts for this rank's stages."""
        counted = [
            gradient
            for stage in self._stages
            for name, gradient in stage.gradients.items()
            if (name not in self._shared or stage.part.is_first)
            and (self._share == 0 or name in stage.part.pieces)
        ]
        squares: list[float] = []
        # One bucket at a time: the squares of all gradients would exist together.
        for bucket in in_buckets(counted, lambda gradient: gradient.size, BUCKET_BYTES):
            # Row by row: MLX on a CPU adds numbers one by one, and a float32 sum of the 58 million
            # squares of one large matrix would be off by a sixth.
            sums = [mx.square(gradient).sum(axis=-1).sum() for gradient in bucket]
            squares += np.array(mx.stack(sums)).tolist()
        return squares


def _in_one(gradients: list[mx.array]) -> mx.array:
    """Return evaluated gradients in one array, and empty ``gradients``."""
    flat = []
    while gradients:
        # Gradients of matrices are transposed. All at once, they would exist three times.
        flat.append(gradients.pop(0).reshape(-1))
        mx.eval(flat[-1])
    total = mx.concatenate(flat)
    mx.eval(total)
    return total


class RoundingErrors:
    """The errors of one rank, an array in float32 for each weight that it has summed.

    ``groups`` are the ranks that sum each weight, this one among them; without any, no errors are
    kept. Checkpoints name an error ``WEIGHT.MEMBER``, by the rank's place in the group.
    """

    def __init__(self, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
        self._rank = rank
        self._groups = groups
        self._errors: dict[str, mx.array] = {}

    def take(self, sizes: Mapping[str, int]) -> mx.array | None:
        """Return the errors of weights of these ``sizes`` in a row, for a sum to change; zeros at
        first. The array is a copy, since a checkpoint may still refer to the original."""
        if not self._groups:
            return None
        errors = new_buffer((sum(sizes.values()),), mx.float32)
        buffer, start = buffer_of(errors), 0
        for name, size in sizes.items():
            stop = start + errors.itemsize * size
            if name in self._errors:
                buffer[start:stop] = buffer_of(self._errors.pop(name))
            start = stop
        return errors

    def keep(self, sizes: Mapping[str, int], errors: mx.array | None) -> None:
        """Keep the ``errors`` that a sum has left."""
        if errors is not None:
            ends = accumulate(sizes.values(), initial=0)
            kept = [errors[start:stop] for start, stop in pairwise(ends)]
            mx.eval(kept)
            self._errors.update(zip(sizes, kept, strict=True))

    def forget(self) -> None:
        """Start again without errors."""
        self._errors.clear()

    def state(self) -> dict[str, mx.array]:
        """Return the state for a checkpoint, in arrays that do not change."""
        return {
            f"{name}.{self._groups[name].index(self._rank)}": error
            for name, error in self._errors.items()
        }

    def takes(self, key: str) -> bool:
        """Tell whether this rank restores the error ``key``. If fewer ranks go on, some take the
        errors of several: nothing is lost."""
        name, _, member = key.rpartition(".")
        group = self._groups.get(name, ())
        return len(group) > 1 and group[int(member) % len(group)] == self._rank

    def restore(self, key: str, error: mx.array) -> None:
        """Add the error ``key`` of a checkpoint."""
        name = key.rpartition(".")[0]
        if name in self._errors:
            error = self._errors[name] + error
            mx.eval(error)
        self._errors[name] = error
