"""How long planning takes at sizes that nobody has: python scripts/bench/planning.py

Schedules with 256 stages and 1024 micro-batches, made, lowered and validated; ``hetero`` for 100
layers on 16 machines, all different in the given order, and of four kinds in any order.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

from shardmlx.common.formatting import columns
from shardmlx.partitioners import LayerCosts, Problem, hetero
from shardmlx.pipeline.lowering import lower, validate
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions, get_schedule

STAGES, MICROBATCHES = 256, 1024
LAYERS, MACHINES, KINDS = 100, 16, 4


def seconds(work: Callable[[], object]) -> str:
    start = time.perf_counter()
    work()
    return f"{time.perf_counter() - start:.2f} s"


def plan(name: str) -> None:
    """Make, lower and validate a schedule, as every run does."""
    schedule = get_schedule(name)
    pp = STAGES // schedule.default_virtual
    grid = compute_actions(name, pp, MICROBATCHES)
    placement = schedule.placement(pp, schedule.default_virtual)
    validate(lower(grid, placement), placement)


def divide(kinds: int) -> None:
    """``hetero`` with machines of unequal speed and memory."""
    draw = random.Random(0)
    speeds = [draw.uniform(1, 8) for _ in range(kinds)]
    layers = [draw.uniform(0.9, 1.1) for _ in range(LAYERS)]
    costs = [
        LayerCosts(tuple(layer / speeds[i % kinds] for layer in layers), head=1 / speeds[i % kinds])
        for i in range(MACHINES)
    ]
    hetero(
        Problem(
            placement=tuple(range(MACHINES)),
            costs=tuple(costs),
            sizes=LayerCosts((1.0,) * LAYERS),
            capacity=tuple(3 * speeds[i % kinds] + 8 for i in range(MACHINES)),
            microbatches=32,
        )
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    lines = [
        (f"{name}, {STAGES} stages x {MICROBATCHES} micro-batches", seconds(partial(plan, name)))
        for name in SCHEDULES
    ]
    for kinds in (MACHINES, KINDS):
        what = f"hetero, {LAYERS} layers on {MACHINES} machines of {kinds} kinds"
        lines.append((what, seconds(partial(divide, kinds))))
    print(columns(("what", "time"), lines))


if __name__ == "__main__":
    main()
