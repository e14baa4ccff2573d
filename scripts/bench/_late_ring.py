"""``_late_ring.py MILLISECONDS COMMAND...``: ``shardmlx COMMAND`` on one core of each host, with a
relay before the ring of tensor shares."""

from __future__ import annotations

import shardmlx.common.prepared

import atexit
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from generation import own_core

from shardmlx.distributed import mlx_group
from shardmlx.distributed.transport import Transport
from shardmlx.main import main

RELAY = Path(__file__).with_name("_relay.py")
HERE = "127.0.0.1"


def late(milliseconds: float) -> None:
    """Let ranks reach each other through relays; without a delay, as they are."""
    reached = mlx_group._reached

    def relayed(
        transport: Transport, peers: Sequence[int], offers: Sequence[mlx_group.Offer]
    ) -> dict[int, str]:
        own_core(transport.rank)
        found = reached(transport, peers, offers)
        for peer in peers if milliseconds else ():
            port = str(offers[peer].port)
            words = (RELAY, port, found[peer], port, str(milliseconds / 1000))
            relay = subprocess.Popen([sys.executable, *map(str, words)])
            atexit.register(relay.kill)
            found[peer] = HERE
        return found

    mlx_group._reached = relayed


if __name__ == "__main__":
    late(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
