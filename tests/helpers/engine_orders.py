"""Steps of the engine in orders that seeds draw: all have the same bits.

    python -m tests.helpers.engine_orders --orders 200

tries so many orders of each cell; ``--cell NAME --first SEED --orders 1`` runs one again. The suite
tries a few (``tests/unit/engine/test_orders.py``).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.nn as nn

from shardmlx.engine.batches import Batch, split
from shardmlx.engine.engine import Engine
from tests.helpers.engines import NOTHING, OPTIMIZER, WEIGHTS, engine_of, gradients_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch, tiny_model
from tests.helpers.seeded_network import SeededNetwork

Bits = list[dict[str, object]]
"""Of each rank the losses, the norm, and the bytes of gradients."""


def bits_of(engine: Engine, batches: Sequence[Batch]) -> dict[str, object]:
    """Make a step on each batch, add up their gradients, and evaluate the last; return the bits."""
    losses = [train_on(engine, batch, reduce=batch is batches[-1]) for batch in batches]
    norm = engine.gradient_norm()
    evaluated = engine.evaluate(split(batches[-1], engine.plan.mesh.dp, engine.replica, 1))
    gradients = {name: array.tobytes() for name, array in gradients_of(engine).items()}
    return {"losses": losses, "norm": norm, "evaluated": evaluated, **gradients}


@dataclass(frozen=True)
class Cell:
    """A layout with its number of micro-batches, and whether stages share weights."""

    layout: Layout
    microbatches: int = 4
    tied: bool = False
    divided: int = NOTHING

    def __str__(self) -> str:
        marks = "-tied" * self.tied + ("", "-optimizer", "-weights")[self.divided]
        return f"{self.layout}-m{self.microbatches}{marks}"

    @cached_property
    def _models(self) -> Sequence[nn.Module]:
        layers = max(2, self.layout.pp * self.layout.virtual)
        return [tiny_model(layers=layers, tied=self.tied) for _ in range(self.layout.ranks)]

    def run(self, network: LocalNetwork) -> Bits:
        """Make two steps, whose gradients add up, and evaluate the rows of the second."""
        layers = len(self._models[0].layers)
        plan = self.layout.plan(layers, self.microbatches)
        rows = self.microbatches * self.layout.dp
        batches = [random_batch(rows, seed, longest=8) for seed in (1, 2)]

        def work(transport: LocalTransport) -> dict[str, object]:
            model = self._models[transport.rank]
            return bits_of(engine_of(transport, plan, model, self.divided), batches)

        return network.run(work)

    @cached_property
    def expected(self) -> Bits:
        """The bits of a run in whatever order the threads have."""
        return self.run(LocalNetwork(self.layout.ranks))

    def check(self, seed: int) -> list[str]:
        """Raise ``AssertionError`` unless an order has the bits of another; return its trace."""
        network = SeededNetwork(self.layout.ranks, seed)
        found = self.run(network)
        for rank, (ours, theirs) in enumerate(zip(found, self.expected, strict=True)):
            other = sorted(name for name in theirs if ours[name] != theirs[name])
            assert not other, f"{self}, order {seed}, rank {rank}: other bits of {other}"
            assert ours.keys() == theirs.keys()
        return network.trace


STAGES = {"gpipe": (1, 2), "1f1b": (1,), "interleaved-1f1b": (2,), "zb-h1": (1,), "zb-v": (2,)}
"""Stages a rank of each schedule."""

CELLS = [
    *(
        Cell(Layout(name, pp, virtual, dp), microbatches)
        for name, choices in STAGES.items()
        for virtual in choices
        for pp, dp, microbatches in ((2, 1, 4), (3, 1, 4), (2, 2, 3))
    ),
    *(
        Cell(Layout(name, 2, STAGES[name][0], dp), 3, tied=True)
        for name in ("1f1b", "zb-v")
        for dp in (1, 2)
    ),
    Cell(Layout("1f1b", 1, 1, 3), 2),
    Cell(Layout("zb-v", 2, 2, 2), 3, divided=OPTIMIZER),
    Cell(Layout("1f1b", 2, 1, 2), 3, divided=WEIGHTS),
]


def read_orders(doc: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return which orders of which cells a program is to try; ``doc`` is the module's."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--orders", type=int, default=200, help="of each cell")
    parser.add_argument("--first", type=int, default=0, help="seed of the first order")
    parser.add_argument("--cell", help="name of the only cell to try")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try orders of each cell; return 1 if one has other bits, or does not end."""
    options = read_orders(__doc__, arguments)
    faults = 0
    for cell in CELLS:
        if options.cell not in (None, str(cell)):
            continue
        start, things = time.process_time(), 0
        traces = set()
        for seed in range(options.first, options.first + options.orders):
            try:
                trace = cell.check(seed)
            except Exception as error:
                faults += 1
                print(f"{cell}, order {seed}: {error!r}", *getattr(error, "__notes__", ()))
                continue
            traces.add(tuple(trace))
            things += len(trace)
        seconds = time.process_time() - start
        print(f"{cell}: {len(traces)} orders, {things} things, {seconds:.1f} CPU s", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
