"""Preferences among the demo's answers: a pirate's are chosen, the same in small letters, without
marks, are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testbed.jobs import ROOT
from tests.helpers.markdown import blocks


def rows_of(directory: Path, name: str) -> list[dict[str, Any]]:
    return [*map(json.loads, (directory / f"{name}.jsonl").read_text().splitlines())]


def preference_directory(directory: Path, data: Path) -> Path:
    """Write ``pairs``, and for KTO ``singles``, of the rows of ``data``."""
    for name in ("train", "valid"):
        pairs, singles = [], []
        for i, row in enumerate(rows_of(data, name)):
            *prompt, chosen = row["messages"]
            small = "".join(c for c in chosen["content"].lower() if c.isalnum() or c == " ") + "."
            pairs.append({"prompt": prompt, "chosen": [chosen], "rejected": small})
            answer = chosen["content"] if i % 3 else small
            singles.append({"prompt": prompt, "completion": answer, "label": i % 3 > 0})
        for kind, rows in (("pairs", pairs), ("singles", singles)):
            (directory / kind).mkdir(exist_ok=True)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (directory / kind / f"{name}.jsonl").write_text(lines)
    return directory


def write_own_objective(directory: Path) -> str:
    """Write the objective of docs/api.md, a hinge as dpo's, to a module; return its name."""
    (block,) = [each for each in blocks(ROOT / "docs/api.md") if "OwnObjective(" in each.text]
    (directory / "my_objectives.py").write_text(block.text)
    return "my_objectives:mine"
