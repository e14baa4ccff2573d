"""``fake_rdma.py``: join a group of two ranks, where MLX is a stand-in with RDMA.

First both ranks have a device, then rank 0 alone. Each prints a JSON list of what MLX was given.
"""

import shardmlx.common.prepared

import json
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import psutil

from shardmlx.common.reporter import Reporter
from shardmlx.distributed import mlx_group
from shardmlx.distributed.mpi import MPITransport

VARIABLES = ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_HOSTFILE")

transport = MPITransport(timeout=60.0)
rank = transport.rank
found: list[Any] = []


def init(strict: bool, backend: str, **how: Any) -> Any:
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    files = [
        json.loads(Path(file).read_text()) for name, file in given.items() if "RANK" not in name
    ]
    gathered = ""
    if "all_gather_factory" in how:
        gather = how["all_gather_factory"](rank, 2)
        gathered = "".join(gather(each, len(each)).decode() for each in (b"abc"[rank:], b"de"))
    found.append([backend, *given, files, gathered])
    return SimpleNamespace(rank=lambda: rank, size=lambda: 2)


def joined(listed: str) -> None:
    address = SimpleNamespace(
        family=socket.AF_INET, address=f"10.77.0.{1 + rank}", netmask="255.255.255.252"
    )
    with (
        patch.object(psutil, "net_if_addrs", lambda: {f"en{5 + rank}": [address]}),
        patch.object(
            psutil,
            "net_if_stats",
            lambda: {f"en{5 + rank}": SimpleNamespace(isup=True, speed=40_000)},
        ),
        patch.object(subprocess, "run", lambda *_, **how: SimpleNamespace(stdout=listed)),
        patch.object(mx.distributed, "is_available", lambda backend: True),
        patch.object(mx.distributed, "init", init),
    ):
        mlx_group.join_group(transport, (0, 1), Reporter(quiet=rank > 0))


joined("device  node GUID\nrdma_en5  8096a9d9edbaac05\nrdma_en6  8196a9d9edbaac05\n")
joined("device  node GUID\nrdma_en5  8096a9d9edbaac05\n")
print(json.dumps(found))
transport.close()
