"""Steps of the engine on ranks that share tensors, with messages that come late: the same bits.

    python -m tests.helpers.share_orders --orders 200

tries so many orders of each cell on four ranks; the suite tries a few
(``tests/mpi/test_tensor_shares.py``). Such ranks are processes, for MLX has one group a process. A
seed draws for which time each message is held back, and where a rank pauses. So messages of other
senders, receivers or tags overtake each other while MLX sums shares in the middle of a graph. What
comes first depends on the machine, too: a seed makes similar orders, and not the same.
"""

from __future__ import annotations

import heapq
import itertools
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from shardmlx.distributed.messages import Array, Handle
from shardmlx.distributed.mpi import MPITransport
from shardmlx.distributed.transport import Transport
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.slice import Slice, Sum
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.pipeline.mesh import Mesh
from testbed.tiny_models import build, tiny_config
from tests.helpers.engine_orders import STAGES, bits_of, read_orders
from tests.helpers.models_and_batches import Layout, random_batch
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import close_pools, run_in_pool

DELAYS = (0.0, 0.0, 0.0, 2e-4, 1e-3)
"""Seconds for which a message is held back; five times as many on a slow link."""

PAUSES = (0.0,) * 19 + (1e-3,)
"""Seconds for which a rank pauses at a call of the transport."""

ACROSS = 2
"""Ranks that share tensors."""


class HeldMessage(Handle):
    """A send that MPI does not know before its time: until then its array must stay as it is."""

    __slots__ = ("begun", "key")

    def __init__(self, array: Array, key: tuple[int, int]) -> None:
        super().__init__(array)
        self.key = key
        self.begun: Handle | None = None


class LateTransport(MPITransport):
    """A rank of mpirun that holds back what it sends, as a seed draws; at first nothing."""

    def __init__(self) -> None:
        self._random: Random | None = None
        self._due: list[tuple[float, int, HeldMessage]] = []
        self._numbers = itertools.count()
        self._last: dict[tuple[int, int], float] = {}
        self._slow: frozenset[int] = frozenset()
        self._changed = threading.Condition()
        super().__init__(timeout=20.0)
        threading.Thread(target=self._send_in_time, daemon=True).start()

    def draw(self, seed: int | None) -> None:
        """Hold back from now on as ``seed`` draws; nothing with None."""
        self._random = None if seed is None else Random(f"{seed} {self.rank}")
        if self._random is not None:
            slow = [peer for peer in range(self.size) if self._random.random() < 0.2]
            self._slow = frozenset(slow)

    def send(self, array: Array, peer: int, tag: int) -> Handle:
        if self._random is None:
            return super().send(array, peer, tag)
        self._pause()
        message = HeldMessage(array, (peer, tag))
        delay = self._random.choice(DELAYS) * (5 if peer in self._slow else 1)
        with self._changed:
            # Messages of one tag keep their order.
            due = max(time.monotonic() + delay, self._last.get(message.key, 0.0))
            self._last[message.key] = due
            heapq.heappush(self._due, (due, next(self._numbers), message))
            self._changed.notify()
        return message

    def receive(self, array: Array, peer: int, tag: int) -> Handle:
        self._pause()
        return super().receive(array, peer, tag)

    def progress(self, handle: Handle, seconds: float) -> bool:
        self._pause()
        if not isinstance(handle, HeldMessage):
            return super().progress(handle, seconds)
        end = time.monotonic() + seconds
        with self._changed:
            self._changed.wait_for(lambda: handle.begun is not None, seconds)
        if handle.begun is None:
            return False
        handle.done = super().progress(handle.begun, max(0.0, end - time.monotonic()))
        return handle.done

    def _pause(self) -> None:
        if self._random is not None:
            time.sleep(self._random.choice(PAUSES))

    def _send_in_time(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                if not self._due or self._due[0][0] > now:
                    self._changed.wait(self._due[0][0] - now if self._due else None)
                    continue
                _, _, message = heapq.heappop(self._due)
                message.begun = super().send(message.array, *message.key)
                self._changed.notify_all()


@dataclass(frozen=True)
class SharedCell:
    """A layout each of whose stages two ranks share, unequally, with its micro-batches."""

    layout: Layout
    microbatches: int

    def __str__(self) -> str:
        return f"{self.layout}-tp{ACROSS}-m{self.microbatches}"

    def bits(self, transport: Transport, all_sum: Sum) -> dict[str, object]:
        """Return this rank's bits of two steps, whose gradients add up."""
        layout, config = self.layout, tiny_config(layers=4)
        mesh = Mesh(layout.dp, layout.pp, ACROSS)
        plan = replace(layout.plan(4, self.microbatches), mesh=mesh)
        model, shape, shares = build(config), read_shape(config), TensorShares((2, 1))
        slices = [Slice(model, start, stop) for start, stop in plan.stage_map.partition.ranges]
        own = plan.stages_of(transport.rank)
        for index in own:
            take_share(slices[index], shape, shares, mesh.share(transport.rank), all_sum)
        rows = self.microbatches * layout.dp
        batches = [random_batch(rows, seed, longest=8) for seed in (1, 2)]
        return bits_of(Engine(plan, transport, build_stages(slices, own)), batches)


CELLS: Sequence[SharedCell] = (
    *(SharedCell(Layout(name, 2, stages[0]), 3) for name, stages in STAGES.items()),
    SharedCell(Layout("1f1b", 1, 1, 2), 2),
)
"""On four ranks."""


def faults_of(
    cells: Sequence[SharedCell], first: int, orders: int, timeout: float = 120.0
) -> dict[str, list[str]]:
    """Return of each cell what differs in so many orders, on ranks that stand already."""
    words = (str(first), str(orders), *map(str, cells))
    job = run_in_pool(4, PROGRAMS / "share_orders.py", *words, timeout=timeout)
    faults: dict[str, list[str]] = json.loads(job.well().stdout)
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Try orders of each cell; return 1 if one has other bits. Raises if one does not end."""
    options = read_orders(__doc__, arguments)
    differs = False
    for cell in CELLS:
        if options.cell not in (None, str(cell)):
            continue
        seconds = 300 + 60.0 * options.orders
        (others,) = faults_of([cell], options.first, options.orders, seconds).values()
        print(
            f"{cell}: {options.orders} orders, {len(others)} with other bits", *others, flush=True
        )
        differs = differs or bool(others)
    close_pools()
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
