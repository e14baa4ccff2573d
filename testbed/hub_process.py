"""A hub as a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


def started_hub(
    path: Path,
    islands: Sequence[str],
    *options: str,
    port: int = 0,
    env: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[str], int]:
    """Start ``shardmlx hub`` for islands with these names; return it, and its port, once it
    listens. The caller ends it."""
    words = ["hub", "--path", str(path), "--islands", ",".join(islands), "--port", str(port)]
    command = [sys.executable, "-m", "shardmlx", *words, *options]
    hub = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True
    )
    assert hub.stdout is not None
    said = hub.stdout.readline()
    found = re.search(r":(\d+)(?=[;/ ])", said)
    assert found is not None, f"the hub said {said!r}"
    threading.Thread(target=hub.stdout.read, daemon=True).start()
    return hub, int(found[1])
