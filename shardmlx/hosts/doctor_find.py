"""Finds machines that announce ssh on the network, and the network that joins them fastest.

A Mac with Remote Login announces ``_ssh._tcp`` by itself (Bonjour, RFC 6763), Linux does it with
Avahi. Open MPI is used over IPv4: of IPv6 nothing is asked. No MLX, no MPI.
"""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from shardmlx.distributed.networks import own_addresses
from shardmlx.errors import LOCAL_NETWORK, UserError, refusing
from shardmlx.hosts.host_facts import ETHERNET, THUNDERBOLT, VIRTUAL, WIFI, Interface
from shardmlx.hosts.reachability import at_once
from shardmlx.planning.facts.hostfile import same_host

SERVICE = "_ssh._tcp.local."
SECONDS_TO_HEAR = 3.0  # the library asks four times
SECONDS_TO_ADDRESS = 1.5  # for answers that came without one

_FASTEST_FIRST = (THUNDERBOLT, ETHERNET, WIFI, VIRTUAL, None)

_NAME = re.compile(r"\w[\w-]*\.local", re.ASCII)
"""Names that may stand in a command line: anybody on the network may announce any."""


def find_others(progress: Callable[[str], None]) -> dict[str, str]:
    """Return an IPv4 address of each other machine that announces ssh, by name, within 5 seconds.

    ``UserError`` if there is none, or no network. ``progress`` is told once Ctrl-C ends the search
    without a word.
    """
    remedy = "see whether it is up, and which program has its port (lsof -i udp:5353)"
    with refusing("cannot ask the network", remedy):
        announced = _listen(progress)
    others = others_of(announced, {str(each.ip) for _, each in own_addresses()})
    if not others:
        raise UserError(
            f"no other machine has announced ssh within {SECONDS_TO_HEAR:g} s",
            "turn on Remote Login there (System Settings, General, Sharing), or avahi-daemon; "
            + LOCAL_NETWORK,
        )
    return others


def _listen(progress: Callable[[str], None]) -> dict[str, list[str]]:
    """Return the IPv4 addresses of the machines that announce ssh, by name."""
    # Only this needs it, and takes as long to import as all of doctor.
    from zeroconf import IPVersion, ServiceBrowser, Zeroconf

    # It prints a traceback for each interface that macOS hides.
    logging.getLogger("zeroconf").setLevel(logging.CRITICAL)
    heard: set[str] = set()

    def note(*, name: str, **_: object) -> None:
        heard.add(name)

    with Zeroconf(ip_version=IPVersion.V4Only) as network:
        progress(f"listening for {SECONDS_TO_HEAR:g} s to machines that announce ssh")
        with ServiceBrowser(network, SERVICE, handlers=[note]):
            time.sleep(SECONDS_TO_HEAR)
        ask = partial(network.get_service_info, SERVICE, timeout=int(1000 * SECONDS_TO_ADDRESS))
        found = at_once({name: partial(ask, name) for name in heard}, 2 * SECONDS_TO_ADDRESS)
    known = filter(None, found.values())
    return {
        (each.server or "").rstrip("."): each.parsed_addresses(IPVersion.V4Only) for each in known
    }


def others_of(announced: Mapping[str, Sequence[str]], own: set[str]) -> dict[str, str]:
    """Return an address by name, or by itself if the name cannot be typed, without this machine,
    whose addresses are all its ``own``."""
    me = socket.gethostname()
    return {
        name if _NAME.fullmatch(name) else addresses[0]: addresses[0]
        for name, addresses in sorted(announced.items())
        if not own.issuperset(addresses) and not same_host(name, me)
    }


def fastest_links(hosts: Sequence[Sequence[Interface]]) -> tuple[Interface, ...]:
    """Return an interface of each host, all in the fastest network that they share; none if they
    share none. The slowest medium counts."""
    if len(hosts) < 2:
        return ()
    shared = []
    for network in dict.fromkeys(each.network for each in hosts[0] if not each.is_loopback):
        inside = [[each for each in host if each.network == network] for host in hosts]
        if all(inside):
            links = tuple(min(each, key=_slowness) for each in inside)
            # Bridges of virtual machines have one address on all hosts.
            if len({each.address for each in links}) == len(hosts):
                shared.append(links)
    return min(shared, key=lambda links: max(map(_slowness, links)), default=())


def _slowness(interface: Interface) -> int:
    return _FASTEST_FIRST.index(interface.medium)
