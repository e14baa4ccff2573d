"""``python -m scripts.bench.message_ranks link|actions NUMBER ...``, under mpirun: ranks that send.

``link ROUNDS SIZE ...``, on two ranks: raw mpi4py and ``Transport`` on one link, by turns. Rank 0
prints, as JSON, for each size in bytes and each of the two, the seconds of a message in each round:
one way, in flows of several at a time, and half of there and back, one at a time. Buffers are MLX's
in both, so only the way to MPI differs.

``actions ROUNDS STEPS MICROBATCHES``, on one rank or two: the engine with stages that do nothing.
Rank 0 prints, as JSON, how many actions it has in a round of so many steps, and the seconds of each
round. Messages hold 256 bytes. GPipe: no action waits for an answer to the one before.
"""

from __future__ import annotations

import shardmlx.common.prepared

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import buffer_of, new_buffer
from shardmlx.distributed.run_ranks import connect
from shardmlx.distributed.tags import FIRST_ENGINE_TAG
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.engine import Engine
from shardmlx.engine.stage import Stage
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import Partition, StageMap

FLOW_BYTES = 128 << 20
"""Bytes of a measurement one way, in as many messages as they fill, at most ``MOST_MESSAGES``."""

MOST_MESSAGES = 2000

AT_A_TIME_BYTES = 64 << 20
"""Bytes that are under way at once: at least two messages, at most ``AT_A_TIME``."""

AT_A_TIME = 16

TAG = FIRST_ENGINE_TAG


class Way(Protocol):
    """The way of messages to and from the other rank."""

    def send(self, arrays: Sequence[mx.array]) -> None: ...
    def receive(self, arrays: Sequence[mx.array]) -> None: ...


class Raw:
    def __init__(self, peer: int) -> None:
        from mpi4py import MPI  # set up by connect

        self._world, self._peer = MPI.COMM_WORLD, peer
        self._byte, self._wait_all = MPI.BYTE, MPI.Request.Waitall

    def send(self, arrays: Sequence[mx.array]) -> None:
        if len(arrays) == 1:
            self._world.Send([buffer_of(arrays[0]), self._byte], self._peer, TAG)
            return
        requests = [
            self._world.Isend([buffer_of(array), self._byte], self._peer, TAG) for array in arrays
        ]
        self._wait_all(requests)

    def receive(self, arrays: Sequence[mx.array]) -> None:
        if len(arrays) == 1:
            self._world.Recv([buffer_of(arrays[0]), self._byte], self._peer, TAG)
            return
        requests = [
            self._world.Irecv([buffer_of(array), self._byte], self._peer, TAG) for array in arrays
        ]
        self._wait_all(requests)


class Ours:
    def __init__(self, transport: Transport, peer: int) -> None:
        self._transport, self._peer = transport, peer

    def send(self, arrays: Sequence[mx.array]) -> None:
        handles = [self._transport.send(array, self._peer, TAG) for array in arrays]
        for handle in handles:
            self._transport.wait(handle, lambda: "sending")

    def receive(self, arrays: Sequence[mx.array]) -> None:
        handles = [self._transport.receive(array, self._peer, TAG) for array in arrays]
        for handle in handles:
            self._transport.wait(handle, lambda: "receiving")


def flow(way: Way, arrays: Sequence[mx.array], passes: int, is_sender: bool) -> float:
    """Return the seconds of a message, one way."""
    acknowledgement = [new_buffer((1,), mx.float32)]
    start = time.perf_counter()
    for _ in range(passes):
        if is_sender:
            way.send(arrays)
        else:
            way.receive(arrays)
    if is_sender:
        way.receive(acknowledgement)
    else:
        way.send(acknowledgement)
    return (time.perf_counter() - start) / (passes * len(arrays))


def ping_pong(way: Way, array: mx.array, times: int, is_first: bool) -> float:
    """Return the seconds of a message there or back."""
    start = time.perf_counter()
    for _ in range(times):
        if is_first:
            way.send([array])
            way.receive([array])
        else:
            way.receive([array])
            way.send([array])
    return (time.perf_counter() - start) / (2 * times)


def link(transport: Transport, rounds: int, *sizes: int) -> Any:
    """Return what each way took for each size, on rank 0."""
    peer, is_first = 1 - transport.rank, transport.rank == 0
    ways: dict[str, Way] = {"raw": Raw(peer), "transport": Ours(transport, peer)}
    results: list[dict[str, Any]] = []
    for size in sizes:
        at_a_time = min(max(2, AT_A_TIME_BYTES // size), AT_A_TIME)
        arrays = [new_buffer((size // 4,), mx.float32) for _ in range(at_a_time)]
        passes = max(1, min(FLOW_BYTES // size, MOST_MESSAGES) // at_a_time)
        times = max(2, min(FLOW_BYTES // size, MOST_MESSAGES) // 2)
        for name in ways:
            result: dict[str, Any] = {"bytes": size, "way": name, "flow": [], "ping_pong": []}
            results.append(result)
        for turn in range(rounds + 1):
            for result, way in zip(results[-2:], ways.values(), strict=True):
                transport.barrier()
                one_way = flow(way, arrays, passes, is_first)
                transport.barrier()
                there_and_back = ping_pong(way, arrays[0], times, is_first)
                if turn > 0:  # the first opens the connection
                    result["flow"].append(one_way)
                    result["ping_pong"].append(there_and_back)
    return results


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
        self.needs_input_gradient = True  # else no rank waits for its message
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

    def sum_partial_gradients(self) -> None:
        """Do nothing: there are no gradients."""

    def backward_weight_in_parts(self, j: int, parts: Sequence[Any]) -> Iterator[Any]:
        return iter(())


def actions(transport: Transport, rounds: int, steps: int, count: int) -> Any:
    """Return the actions of a round, and the seconds of each."""
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
    return {"actions": steps * len(plan.actions[0]), "seconds": seconds}


PROGRAMS: dict[str, Callable[..., Any]] = {"link": link, "actions": actions}


def main() -> None:
    with connect() as transport:
        found = PROGRAMS[sys.argv[1]](transport, *map(int, sys.argv[2:]))
        if transport.rank == 0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
