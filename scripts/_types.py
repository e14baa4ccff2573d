"""The table of mlx-lm's model types, by what can be done with them.

Tests keep tiny configurations of all types; the code of each, run over stand-ins, gives its row.
"""

from __future__ import annotations

from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import read_shape
from testbed.family_configs import CONFIGS
from testbed.further_configs import FURTHER
from testbed.undeclared_configs import UNDECLARED

UNKNOWN = {"phi3small"}
"""Types whose code ends the process on a CPU."""


KINDS = {
    name: config
    for name, config in {**CONFIGS, **UNDECLARED, **FURTHER}.items()
    if name not in UNKNOWN
}


def abilities(name: str) -> str:
    """Return what can be done with a type."""
    try:
        return read_shape(KINDS[name]).abilities
    except UserError:
        return "cannot run; `inspect` says why"


def types(only: str = "") -> str:
    """Return the table as Markdown."""
    rows: dict[str, list[str]] = {}
    for name in KINDS:
        rows.setdefault(abilities(name), []).append(f"`{name}`")
    lines = [
        f"| {what} | {', '.join(sorted(names, key=lambda name: name.strip('`').lower()))} |"
        for what, names in sorted(rows.items(), key=lambda row: -len(row[1]))
    ]
    return "\n".join(["| can | `model_type` |", "|---|---|", *lines, ""])
