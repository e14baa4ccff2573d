"""Predict the messages between ranks in a step, and the time that they take replicas. No MLX, no
MPI.

Bytes are those of whole arrays: each of n members sends (n - 1) / n of them, and an owner of more
than an nth sends more in proportion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.divided import divided
from shardmlx.planning.memory.stages import StageMemory
from shardmlx.planning.memory.training_setup import FLOAT32, TrainingSetup
from shardmlx.planning.time.parts import Seconds

ROOMS = 2
"""Layers that a replica buffers: the next pass, in the other direction, begins with them."""

HANDLING_SECONDS = {"cpu": 1e-9, "metal": 0.0}
"""Seconds of computing that a byte gathered between hosts costs at each end, since a sending core
does not compute. Measured on an x86 server; a GPU is assumed to compute meanwhile."""

ROUNDING_SECONDS = {"bfloat16": 4.2e-9, "int8": 5e-9}
"""Seconds to round and widen a gradient, by sum_dtype: measured on an x86 core."""


class StageGathers(NamedTuple):
    """Mean bytes of a micro-batch at a stage of divided weights: of the ``first`` layer, gathered
    while nothing computes, of the other layers in F and in B, of matrices at its ``ends``, and of
    gradients sent to their owners."""

    first: float
    forward: float
    backward: float
    ends: float
    gradients: float


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of a step; ``stages`` are the bytes of each stage."""

    plan: Plan
    workload: Workload
    cluster: Cluster
    stages: Mapping[int, StageMemory]

    @property
    def message(self) -> int:
        """Bytes of the hidden states of a micro-batch."""
        return max(each.message for each in self.stages.values())

    def gathers(self, start: int, stop: int) -> StageGathers:
        """Return the bytes that replicas with divided weights gather of layers.

        The backward pass gathers layers down to the lowest that computes then; trained layers are
        gathered anew after an update. A matrix at an end of the model stays until then, unless the
        stage has another one.
        """
        workload = self.workload
        microbatches = self.plan.microbatches
        tune = workload.fine_tune
        sizes = workload.weight_sizes
        shape = workload.shape
        layers = sizes.layers[start:stop]
        has_both = start == 0 and stop == shape.num_layers
        at_ends = (sizes if has_both else workload.held_sizes).total(start, stop) - sum(layers)
        gathered = at_ends
        if shape.tied or not has_both:
            gathered = at_ends / microbatches if tune.unfreeze_all else 0.0
        trained = 0.0
        if tune.is_full:
            trained = sum(sizes.layers[max(start, workload.first_trained_layer) : stop])
            trained += at_ends * tune.unfreeze_all
        lowest = max(start, workload.first_trained)
        comes_down = tune.train and lowest == start
        stays = (1 - tune.is_full / microbatches) * comes_down
        first = layers[0] * (1 - stays)
        return StageGathers(
            first=first,
            forward=sum(layers) - stays * sum(layers[:ROOMS]) - first,
            backward=sum(sizes.layers[lowest : max(lowest, stop - ROOMS)]),
            ends=gathered,
            gradients=workload.sum_bytes(round(trained) // workload.dtype_bytes * FLOAT32),
        )

    def with_gathers(self, stage: Seconds, rank: int, ends: tuple[int, int]) -> Seconds:
        """Return the times of a stage, with gathers of divided weights and sends of gradients."""
        dp = self.plan.mesh.dp
        seconds = partial(self._exchange_seconds, rank)
        handling = partial(self._handling_seconds, rank)
        if dp == 1 or not self.workload.fine_tune.divides_weights:
            return stage
        moved = self.gathers(*ends)
        setup = TrainingSetup(workload=self.workload, rows=1, length=1, dp=dp)
        largest = divided(setup, *ends, ()).part
        # A matrix at an end has one owner, which sends all of it.
        gathering = seconds(moved.forward, largest) + seconds(moved.ends, 1.0)
        forward = max(stage.forward, gathering) + seconds(moved.first, largest)
        forward += handling(moved.first + moved.forward + moved.ends)
        backward = stage.input_gradient + stage.weight_gradient
        if not backward:
            return replace(stage, forward=forward)
        received = moved.backward + moved.gradients
        backward = max(backward, seconds(received, largest)) + handling(received)
        if stage.input_gradient:
            return Seconds(forward, backward, 0.0, stage.update)
        return Seconds(forward, 0.0, backward, stage.update)

    def sum_seconds(self) -> float:
        """Return an upper bound of summing the slowest stage's gradients; 0 for divided weights."""
        mesh = self.plan.mesh
        tune = self.workload.fine_tune
        times = []
        if mesh.dp == 1 or tune.divides_weights:
            return 0.0
        for rank in range(mesh.pp):
            gradients = sum(self.stages[i].gradients for i in self.plan.stage_map.stages_of(rank))
            numbers = gradients // FLOAT32
            ways = 2
            # Gradients go there, and these or updated weights come back.
            there = back = self.workload.sum_bytes(gradients)
            if tune.divides_optimizer and tune.is_full:
                back = numbers * self.workload.dtype_bytes
                ways = 1
            seconds = numbers * ROUNDING_SECONDS.get(tune.sum_dtype, 0.0)
            rounding = ways * seconds * (mesh.dp - 1) / mesh.dp
            by_host = not tune.divides_optimizer and tune.sum_dtype == "float32"
            times.append(self._exchange_seconds(rank, there + back, by_host=by_host) + rounding)
        return max(times)

    def _handling_seconds(self, rank: int, nbytes: float) -> float:
        """Return the seconds in which a rank handles gathers of so many bytes."""
        if not self._exchange_seconds(rank, nbytes):
            return 0.0  # within a host
        dp = self.plan.mesh.dp
        sent_and_received = 2 * nbytes * (dp - 1) / dp
        return sent_and_received * HANDLING_SECONDS[self.cluster.backend]

    def _exchange_seconds(
        self, rank: int, nbytes: float, largest: float = 0.0, *, by_host: bool = False
    ) -> float:
        """Return the seconds in which each replica of a pipeline rank sends the others its part of
        these bytes, or receives theirs; ``largest`` is the largest owner's part. Where each host
        has equally many, they are added up there first, ``by_host``."""
        group = self.plan.mesh.replicas_of(rank)
        slowest_link = max(
            self.cluster.link_seconds(a, b, nbytes)
            for a, b in zip(group, (*group[1:], group[0]), strict=True)
        )
        members = len(group)
        on_hosts = Counter(self.cluster.machines[each].host for each in group).values()
        # The largest part of an array that a host of the group sends to the others.
        part = max(count * (members - count) / members for count in on_hosts)
        if by_host and len({*on_hosts}) == 1:
            part = (len(on_hosts) - 1) / len(on_hosts)
        return part * max(members * largest, 1.0) * slowest_link
