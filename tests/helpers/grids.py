"""Grids of actions, written as they print."""

from __future__ import annotations

import re

from shardmlx.pipeline.actions import Action, Grid, Kind


def parse_grid(text: str) -> Grid:
    """Return the actions of a line a rank; empty lines are ignored."""
    return tuple(
        tuple(
            Action(int(stage), Kind(kind), int(microbatch))
            for stage, kind, microbatch in re.findall(r"(\d+)([A-Z_]+)(\d+)", line)
        )
        for line in text.splitlines()
        if line.strip()
    )
