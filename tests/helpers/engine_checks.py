"""Steps of the engine on a few layouts, each compared with one process.

``tests/unit/engine/test_engine.py`` runs the grid on threads, and all that is of one rank; here a
chosen few meet real messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardmlx.distributed.transport import Transport
from tests.helpers.engines import Expected, Outcome, check_outcome, run_engine
from tests.helpers.models_and_batches import Layout, random_batch, tiny_model
from tests.helpers.transport_checks import Check

LAYERS = 8


@dataclass(frozen=True)
class Case:
    """A step: its model, its layout, and its micro-batches."""

    layout: Layout
    microbatches: int = 4
    rows: int | None = None  # of a replica; by default one row a micro-batch
    tied: bool = False
    longest: int = 60
    model: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [str(self.layout), f"m{self.microbatches}"]
        parts += ["uneven"] if self.rows else []
        parts += ["tied"] if self.tied else []
        parts += [f"{key}={value}" for key, value in self.model.items()]
        return "-".join(parts)

    def __call__(self, transport: Transport) -> None:
        rows = self.rows or self.microbatches
        plan = self.layout.plan(LAYERS, rows, -(-rows // self.microbatches))
        assert plan.microbatches == self.microbatches
        batch = random_batch(rows * self.layout.dp, longest=self.longest)
        make = partial(tiny_model, layers=LAYERS, tied=self.tied, **self.model)
        outcome = run_engine(transport, plan, make(), batch)
        outcomes = transport.all_gather(outcome)
        if transport.rank == 0:
            expected = Expected(plan, make(), batch)
            for rank, each in enumerate(outcomes):
                check_outcome(each, expected, rank)
            check_replicas(outcomes)


def check_replicas(outcomes: Sequence[Outcome]) -> None:
    """Gradients have the same bits wherever the same weights are: else copies would drift apart."""
    everywhere: dict[str, set[bytes]] = {}
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            everywhere.setdefault(name, set()).add(gradient.tobytes())
    assert {name for name, bits in everywhere.items() if len(bits) > 1} == set()
    assert len({outcome.norm for outcome in outcomes}) == 1


# Hidden states of half a megabyte a micro-batch: Open MPI sends those in another way.
_WIDE = {"hidden_size": 256}

_CASES = [
    Case(Layout("interleaved-1f1b", 2, 4)),
    Case(Layout("zb-v", 2, 2), microbatches=5),
    Case(Layout("1f1b", 1, 1, dp=2), microbatches=3),
    Case(Layout("zb-h1", 2), microbatches=2, longest=300, model=_WIDE),
    Case(Layout("gpipe", 4), microbatches=6),
    Case(Layout("1f1b", 2, 1, dp=2), microbatches=2, rows=3),
    Case(Layout("zb-v", 2, 2, dp=2), microbatches=2, longest=300, model=_WIDE),
    Case(Layout("zb-v", 2, 2, dp=2), tied=True),
]


def checks(size: int) -> Mapping[str, Check]:
    return {str(case): case for case in _CASES if case.layout.ranks == size}
