"""Start a hub and islands, each a process with one BLAS thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _compare import environment
from _training import as_flags

from shardmlx.islands.client import TOKEN

TRAIN = ("-m", "shardmlx", "train")


@contextmanager
def running_hub(path: Path, names: Sequence[str], **terms: object) -> Iterator[int]:
    """Run a hub for islands with these names, and yield its port."""
    words = as_flags({"path": path, "islands": ",".join(names), "port": 0, **terms})
    command = [sys.executable, "-m", "shardmlx", "hub", *words]
    env = {**os.environ, **environment()}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout is not None
            address, _, _ = hub.stdout.readline().partition(";")
            yield int(address.rpartition(":")[2])
        finally:
            hub.terminate()


def train_islands(
    hub: Path,
    ports: dict[str, int],
    flags: dict[str, dict[str, object]],
    program: Sequence[object] = TRAIN,
) -> None:
    """Train islands, each with flags of its own, by a hub's ports. SystemExit if one fails."""
    islands = []
    for name, own in flags.items():
        address = {"island": f"http://127.0.0.1:{ports[name]}", "name": name}
        command = [sys.executable, *map(str, program), *as_flags({**own, **address})]
        token = {TOKEN: (hub / "tokens" / name).read_text()}
        islands.append(subprocess.Popen(command, env={**os.environ, **environment(), **token}))
    if any(status != 0 for status in [island.wait() for island in islands]):
        raise SystemExit("an island failed")
