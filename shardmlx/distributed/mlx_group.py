"""A group of ranks whose arrays MLX adds up itself, in the middle of a layer's graph.

MPI introduces its ranks to each other: addresses and free ports go over our messages, so that there
is no second launcher. Each group is a world of its own for MLX, on a ring of sockets. Ranks that
hang in it, since one has stopped, are ended by the heartbeat.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import psutil

from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.fate import HURRY
from shardmlx.distributed.messages import LOSS_TAG, PeerLost
from shardmlx.distributed.networks import INCLUDE, is_included
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError, one_line

SECONDS_TO_CONNECT = 2.0

SECONDS_TO_FIND = 3.0  # more than MPI, or the heartbeat, takes to see that a rank has died

_HERE = "127.0.0.1"


def join_group(transport: Transport, members: Sequence[int]) -> mx.distributed.Group:
    """Return MLX's group of this rank with the other ``members``, in their order. All ranks must
    call it, those of other groups with theirs. Raises ``AgreedError``."""
    what = "joining the group of its tensor shares"
    number = members.index(transport.rank)
    with socket.create_server(("", 0), backlog=len(members)) as server:
        offers = transport.all_gather((_addresses(), server.getsockname()[1]), what)
        peers = [member for member in members if member != transport.rank]
        reach = partial(_reached, transport, peers, offers)
        reached = on_all_ranks(transport, what, reach)
    transport.barrier(what)  # no rank of the ring finds these servers any more
    # The ring listens at its own address, and connects to the others'.
    hosts = [[f"{reached.get(each, '0.0.0.0')}:{offers[each][1]}"] for each in members]

    def join() -> mx.distributed.Group:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "ring.json"
            file.write_text(json.dumps(hosts))
            # MLX reads them at this call alone; it keeps one group a process.
            variables = {"MLX_RANK": str(number), "MLX_HOSTFILE": str(file)}
            os.environ.update(variables)
            try:
                group = mx.distributed.init(strict=True, backend="ring")
            except (RuntimeError, ValueError) as error:
                raise UserError(f"MLX makes no group: {one_line(error)}") from None
            finally:
                for name in variables:
                    del os.environ[name]
        if (group.rank(), group.size()) != (number, len(members)):
            raise UserError("this process is in another group of MLX", "start a new one")
        return group

    return on_all_ranks(transport, what, join)


@contextmanager
def losses_named(
    transport: Transport, members: Sequence[int], what: Callable[[], str]
) -> Iterator[None]:
    """Raise ``PeerLost`` with the name of the rank whose loss MLX has met in the block, which says
    no more than that a connection broke."""
    try:
        yield
    except RuntimeError as error:
        if "[ring]" not in str(error):
            raise
        others = [member for member in members if member != transport.rank]
        # A message that never comes: MPI says who will not send it.
        awaited = [transport.receive(np.zeros(1), each, LOSS_TAG) for each in others]
        end = time.monotonic() + SECONDS_TO_FIND
        with transport.activity.waiting_for(what):
            while time.monotonic() < end:
                transport.activity.check(what)
                for handle in awaited:
                    try:
                        transport.progress(handle, 0.0)
                    except PeerLost as lost:
                        raise PeerLost(f"{what()}: {lost}") from error
                time.sleep(HURRY)
        raise


def _reached(
    transport: Transport, peers: Sequence[int], offers: Sequence[tuple[list[str], int]]
) -> dict[int, str]:
    """Return an address of each peer that takes a connection. Raises ``UserError``."""
    found = {}
    for peer in peers:
        addresses, port = offers[peer]
        if transport.hosts[peer] == transport.hosts[transport.rank]:
            addresses = [_HERE, *addresses]
        for address in addresses:
            with suppress(OSError):
                socket.create_connection((address, port), SECONDS_TO_CONNECT).close()
                found[peer] = address
                break
        else:
            raise UserError(
                f"--tensor-parallel: {transport.name(transport.rank)} cannot connect to "
                f"{transport.name(peer)} at {', '.join(addresses)}",
                "let shardmlx doctor look at the network",
            )
    return found


def _addresses() -> list[str]:
    """Return this host's addresses, the fastest link's first; those alone that MPI may use."""
    speeds = {name: each.speed for name, each in psutil.net_if_stats().items() if each.isup}
    named = [
        (name, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name in speeds and each.family == socket.AF_INET and each.address != _HERE
    ]
    named.sort(key=lambda each: -speeds[each[0]])
    include = os.environ.get(INCLUDE)
    allowed = [address for name, address in named if is_included(name, address, include)]
    return allowed or [address for _, address in named]
