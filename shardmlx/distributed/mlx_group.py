"""A group of ranks whose arrays MLX adds up itself, in the middle of a layer's graph.

MPI introduces its ranks to each other: addresses and free ports go over our messages, so that there
is no second launcher. Each group is a world of its own for MLX: over RDMA (``jaccl``) where a
Thunderbolt cable links each two of its ranks, else on a ring of sockets. Ranks that hang in it,
since one has stopped, are ended by the heartbeat.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import IPv4Interface, ip_address, ip_network
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import psutil

from shardmlx.common.reporter import Reporter
from shardmlx.distributed.agreement import on_all_ranks
from shardmlx.distributed.messages import PeerLost
from shardmlx.distributed.networks import INCLUDE, is_included, own_addresses
from shardmlx.distributed.tags import GATHER_TAG, LOSS_TAG
from shardmlx.distributed.times import HURRY, SECONDS_TO_FIND
from shardmlx.distributed.transport import Transport
from shardmlx.errors import EngineError, UserError, one_line

SECONDS_TO_CONNECT = 2.0

_HERE = "127.0.0.1"

WHAT = "joining the group of its tensor shares"


class Offer(NamedTuple):
    """A rank as it tells the others of itself: its addresses, a free port, and the RDMA devices of
    the networks that it is in."""

    addresses: list[str]
    port: int
    devices: Mapping[str, str]

    def device_to(self, other: Offer) -> str | None:
        """Return the RDMA device in a network with another rank, if there is one."""
        is_here = other.addresses == self.addresses
        for network, device in self.devices.items():
            reaches = any(ip_address(each) in ip_network(network) for each in other.addresses)
            if reaches and not is_here:
                return device
        return None


def join_group(
    transport: Transport, members: Sequence[int], reporter: Reporter
) -> Callable[[mx.array], mx.array]:
    """Join MLX's group of this rank with the other ``members``, in their order; return its lazy
    sum. All ranks must call it, those of other groups with theirs. Raises ``AgreedError``."""
    number = members.index(transport.rank)
    interfaces = _interfaces()
    with socket.create_server(("", 0), backlog=len(members)) as server:
        addresses = [str(interface.ip) for _, interface in interfaces]
        offer = Offer(addresses, server.getsockname()[1], _rdma_devices(interfaces))
        offers = transport.all_gather(offer, WHAT)
        peers = [member for member in members if member != transport.rank]
        reach = partial(_reached, transport, peers, offers)
        reached = on_all_ranks(transport, WHAT, reach)
    transport.barrier(WHAT)  # no rank of the ring finds these servers any more
    mesh = mesh_of([offers[each] for each in members])
    if mesh:
        reporter.say("Tensor shares are summed over RDMA (jaccl)")
    # The ring listens at its own address, and connects to the others'.
    hosts = [[f"{reached.get(each, '0.0.0.0')}:{offers[each].port}"] for each in members]

    def join() -> mx.distributed.Group:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "ranks.json"
            file.write_text(json.dumps(mesh or hosts))
            # MLX reads them at this call alone; it keeps one group a process.
            read = "MLX_IBV_DEVICES" if mesh else "MLX_HOSTFILE"
            variables = {"MLX_RANK": str(number), read: str(file)}
            os.environ.update(variables)
            try:
                if mesh:
                    factory = partial(_side_channel, transport, members)
                    group = mx.distributed.init(True, "jaccl", all_gather_factory=factory)
                else:
                    group = mx.distributed.init(True, "ring")
            except (RuntimeError, ValueError) as error:
                problem = f"MLX makes no group: {one_line(error)}"
                if mesh:  # others wait for this rank in it: no rank can go on
                    raise EngineError(f"{problem}; {INCLUDE} may leave Thunderbolt out") from error
                raise UserError(problem) from None
            finally:
                for name in variables:
                    del os.environ[name]
        if (group.rank(), group.size()) != (number, len(members)):
            raise UserError("this process is in another group of MLX", "start a new one")
        return group

    return partial(mx.distributed.all_sum, group=on_all_ranks(transport, WHAT, join))


def mesh_of(offers: Sequence[Offer]) -> list[list[str | None]] | None:
    """Return the RDMA devices that link each rank of a group to each other one, as MLX reads them;
    None where one is missing."""
    mesh = [[None if one is other else one.device_to(other) for other in offers] for one in offers]
    return mesh if all(row.count(None) == 1 for row in mesh) else None


def _side_channel(
    transport: Transport, members: Sequence[int], number: int, size: int
) -> Callable[[bytes, int], bytes]:
    """Return a gather of bytes over a group, with which MLX's ranks tell each other of RDMA."""
    peers = [member for member in members if member != transport.rank]

    def all_gather(mine: bytes, nbytes: int) -> bytes:
        parts = []
        for teller in members:  # each in its turn
            if teller != transport.rank:
                parts.append(transport.receive_object(teller, WHAT, GATHER_TAG))
                continue
            parts.append(mine)
            for peer in peers:
                transport.send_object(mine, peer, WHAT, GATHER_TAG)
        return b"".join(parts)

    return all_gather


@contextmanager
def losses_named(
    transport: Transport, members: Sequence[int], what: Callable[[], str]
) -> Iterator[None]:
    """Raise ``PeerLost`` with the name of the rank whose loss MLX has met in the block, which says
    no more than that a connection broke."""
    try:
        yield
    except RuntimeError as error:
        if not any(name in str(error) for name in ("[ring]", "[jaccl]")):
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


def _reached(transport: Transport, peers: Sequence[int], offers: Sequence[Offer]) -> dict[int, str]:
    """Return an address of each peer that takes a connection. Raises ``UserError``."""
    found = {}
    for peer in peers:
        addresses, port, _ = offers[peer]
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


def _interfaces() -> list[tuple[str, IPv4Interface]]:
    """Return this host's interfaces, the fastest link first; those alone that MPI may use."""
    speeds = {name: each.speed for name, each in psutil.net_if_stats().items() if each.isup}
    named = [
        (name, each) for name, each in own_addresses() if name in speeds and not each.is_loopback
    ]
    named.sort(key=lambda each: -speeds[each[0]])
    include = os.environ.get(INCLUDE)
    return [each for each in named if is_included(each[0], str(each[1].ip), include)] or named


def _rdma_devices(interfaces: Sequence[tuple[str, IPv4Interface]]) -> dict[str, str]:
    """Return this Mac's RDMA devices by the networks of their interfaces; none without RDMA."""
    listed = ""
    if mx.distributed.is_available("jaccl"):
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["ibv_devices"], capture_output=True, text=True, timeout=10.0)
            listed = done.stdout
    networks = [str(interface.network) for _, interface in interfaces]
    return {
        network: f"rdma_{name}"
        for network, (name, _) in zip(networks, interfaces, strict=True)
        # A network of two interfaces does not tell where a cable leads.
        if f"rdma_{name}" in listed.split() and networks.count(network) == 1
    }
