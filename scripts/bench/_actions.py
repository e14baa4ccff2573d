"""``mpirun -n 1|2 _actions.py ROUNDS STEPS MICROBATCHES``: the engine with stages that do nothing.

Rank 0 prints, as JSON, how many actions it has in a round of so many steps, and the seconds of each
round. Messages hold 256 bytes. GPipe: no action waits for an answer to the one before.
"""

from __future__ import annotations

import shardmlx.common.prepared

import json
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import new_buffer
from shardmlx.distributed.mpi import MPITransport
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.engine import Engine
from shardmlx.engine.stage import Stage
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import Partition, StageMap

WIDTH = 64


class Idle:
    """A stand-in for ``Stage`` that computes nothing: its answers are there already."""

    def __init__(self, index: int, count: int, microbatches: int) -> None:
        self.index = index
        self.part = SimpleNamespace(
            is_first=index == 0, is_last=index == count - 1, hidden_size=WIDTH, dtype=mx.float32
        )
        self.names: tuple[str, ...] = ()
        self.gradients: dict[str, mx.array] = {}
        self.is_trained = True
        self.reduces_each = False
        self.needs_input_gradient = index > 0
        shape = () if self.part.is_last else (1, 1, WIDTH)
        self._out = new_buffer(shape, mx.float32)
        self._gradient = new_buffer((1, 1, WIDTH), mx.float32)
        self._cotangents = [new_buffer((1, 1, WIDTH), mx.float32) for _ in range(microbatches)]

    def forward(self, *given: Any, **more: Any) -> mx.array:
        return self._out

    def cotangent(self, j: int) -> mx.array:
        return self._cotangents[j]

    def backward_input(self, j: int) -> mx.array:
        return self._gradient

    def backward_weight_in_parts(self, j: int, parts: Sequence[Any]) -> Iterator[Any]:
        return iter(())


def main() -> None:
    rounds, steps, count = map(int, sys.argv[1:])
    transport = MPITransport()
    pp = transport.size
    plan = Plan(
        mesh=Mesh(1, pp),
        stage_map=StageMap(Partition.from_sizes([1] * pp), tuple(range(pp))),
        schedule="gpipe",
        rows=count,
        micro_batch_rows=1,
        trainable=(True,) * pp,
    )
    stage = cast(Stage, Idle(transport.rank, pp, count))
    engine = Engine(plan, transport, [stage])
    microbatch = MicroBatch(np.zeros((1, 2), np.int32), np.array([[0, 1]], np.int32), 0)
    seconds = []
    for turn in range(rounds + 1):
        transport.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            engine.train_step([microbatch] * count, scale=1.0)
        if turn > 0:
            seconds.append(time.perf_counter() - start)
        engine.recorder.take()
    if transport.rank == 0:
        print(json.dumps({"actions": steps * len(plan.actions[0]), "seconds": seconds}))
    transport.close()


if __name__ == "__main__":
    main()
