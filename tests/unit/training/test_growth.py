"""What grows until a run ends of it is named before, and once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardmlx.common.units import GIB, MIB
from shardmlx.costmodel.memory_limits import MemoryBudget, MemoryLimits, PlannedMemory
from shardmlx.engine.batches import MOST_WIDTHS
from shardmlx.training.growth import REPORTS_IN_A_ROW, Growth

HOSTS = ("mac-studio", "mac-mini")
REPORTS = 2 * REPORTS_IN_A_ROW


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


def test_memory_that_grows_at_every_report_is_named_once_with_the_steps_that_are_left() -> None:
    reports = [(GIB, GIB + number * 20 * MIB) for number in range(REPORTS)]
    (warning,) = warnings(growth(), *reports)
    step = 10 * (REPORTS_IN_A_ROW + 1)
    # 1024 MiB are left at the first report, and each step takes 2 of them.
    for part in (
        f"step {step}:",
        "rank 1 on mac-mini",
        "2.0 MiB a step",
        f"{512 - step + 10} more",
    ):
        assert part in warning


@pytest.mark.parametrize(
    "active",
    [
        pytest.param([GIB] * REPORTS, id="the same"),
        pytest.param(
            [GIB + (i % 4) * 90 * MIB + i * MIB for i in range(REPORTS)], id="up and down"
        ),
        pytest.param([GIB + i * MIB // 10 for i in range(REPORTS)], id="up by little"),
        pytest.param([GIB + i * 90 * MIB for i in range(REPORTS_IN_A_ROW)], id="not often"),
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
