"""Divide layers among stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap, write_stage_map


def even(total: int, parts: int) -> tuple[int, ...]:
    """Numbers that differ by one at most, larger ones first."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def write_split(schedule: str, sizes: Sequence[int], ranks: int, path: Path) -> Path:
    """Write a stage map for ``shardmlx.train``."""
    placement = get_schedule(schedule).placement(ranks, len(sizes) // ranks)
    write_stage_map(StageMap.from_sizes(sizes, placement), path)
    return path
