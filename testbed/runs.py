"""Files that a run reads, and files that it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def in_file(path: Path, **options: Any) -> tuple[str, Path]:
    """Write options into a YAML file, and return the words that name it."""
    path.write_text(yaml.safe_dump(options))
    return "-c", path


def events(metrics: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, or those that tell of one kind of event."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [event for event in lines if name is None or event["event"] == name]
