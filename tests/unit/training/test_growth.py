"""What grows until a run ends of it is named before, and once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardmlx.common.units import GIB, MIB
from shardmlx.engine.batches import MOST_WIDTHS
from shardmlx.planning.memory.limits import MemoryBudget, MemoryLimits, PlannedMemory
from shardmlx.training.growth import REPORTS, TIMES, Growth

HOSTS = ("mac-studio", "mac-mini")


def growth(backend: str = "metal") -> Growth:
    limits = [
        MemoryLimits(MemoryBudget(host, 2 * GIB, "", 2 * GIB), PlannedMemory(GIB, GIB), backend)
        for host in HOSTS
    ]
    return Growth(HOSTS, limits)


def warnings(watch: Growth, *active: Sequence[int], shapes: int = 1) -> list[str]:
    """What the watch says at reports of these bytes on each rank, every ten steps."""
    found: list[str] = []
    for number, each in enumerate(active, start=1):
        found += watch.observe(10 * number, shapes, each)
    return found


@pytest.mark.parametrize("gradients", [0, 90 * MIB])
def test_memory_that_keeps_growing_is_named_once_with_the_steps_that_are_left(
    gradients: int,
) -> None:
    """By 2 MiB a step, beside gradients that every fourth report is without."""
    numbers = range(2 * REPORTS * TIMES)
    grown = [GIB + number * 20 * MIB + (number % 4) * gradients for number in numbers]
    (warning,) = warnings(growth(), *((GIB, each) for each in grown))
    assert warning.startswith(f"step {10 * REPORTS * TIMES}: ")
    assert "rank 1 on mac-mini" in warning
    assert "2.0 MiB a step" in warning
    left = (GIB - 20 * MIB * REPORTS * (TIMES - 1)) // (2 * MIB)
    assert f"{left} more steps" in warning


@pytest.mark.parametrize(
    "active",
    [
        pytest.param([GIB] * 40, id="the same"),
        pytest.param([GIB + i % 7 * 90 * MIB for i in range(40)], id="up and down"),
        pytest.param([GIB + i * MIB // 10 for i in range(40)], id="up by little"),
        pytest.param([GIB + i * 90 * MIB for i in range(REPORTS * TIMES - 1)], id="not for long"),
        pytest.param([GIB + min(i, 9) * 90 * MIB for i in range(40)], id="until it settles"),
    ],
)
def test_memory_that_may_settle_is_not(active: list[int]) -> None:
    assert warnings(growth(), *zip(active, active, strict=True)) == []


@pytest.mark.parametrize(("backend", "count"), [("metal", 1), ("cpu", 0)])
def test_more_shapes_than_widths_are_named_once_where_each_is_a_graph(
    backend: str, count: int
) -> None:
    many, still = MOST_WIDTHS + 1, [(GIB, GIB)] * 3
    assert warnings(growth(backend), *still, shapes=MOST_WIDTHS) == []
    found = warnings(growth(backend), *still, shapes=many)
    assert len(found) == count
    assert all(f"{many} shapes" in each and "--micro-batch-size" in each for each in found)
