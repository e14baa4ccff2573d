"""Write a hostfile of measurements of ``shardmlx.doctor``, annotated for the planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardmlx.common.units import GIB, MIB
from shardmlx.costmodel.hostfile import Machine, host_key, is_unnamed, kind_key
from shardmlx.hosts.findings import Examination, Host

_HEADER = """\
# Measured by shardmlx doctor{date}, for shardmlx plan; mpirun passes over it.
# flops is what square matrix products reach, and less than what is published for a chip, of which
# shardmlx plan counts on 60% of it; shardmlx profile measures what training reaches.
"""


def machines_of(examination: Examination, known: Sequence[Machine] = ()) -> tuple[Machine, ...]:
    """Return the measured machines, in the order of ``known`` ones, then of the ranks.

    A known machine keeps its name, slots and unmeasured facts; one without ranks stays unchanged. A
    host's link is its fastest: between two hosts, the planner takes the slower speed and the longer
    latency.
    """
    left = list(examination.hosts)
    machines = []
    for machine in known:
        host = next((host for host in left if _is(host, machine)), None)
        if host is None:
            machines.append(machine)
            continue
        left.remove(host)
        machines.append(_measured(host, examination, machine))
    for host in left:
        name = host.facts.node or host.name
        machines.append(_measured(host, examination, Machine(host=name, slots=len(host.ranks))))
    return tuple(machines)


def _is(host: Host, machine: Machine) -> bool:
    """Return whether a host is a machine: by name, by address, or as the host of mpirun itself."""
    if machine.host == "localhost":
        return 0 in host.ranks
    if is_unnamed(machine.host):
        return machine.host in {each.address for each in host.facts.interfaces}
    names = {host_key(name) for name in (host.name, host.facts.node) if name is not None}
    return host_key(machine.host) in names


def _measured(host: Host, examination: Examination, machine: Machine) -> Machine:
    speeds = [
        link.speed
        for link in examination.links
        if host.name in (link.first, link.second) and link.speed is not None
    ]
    memory = host.facts.memory_limit or host.facts.memory
    flops = host.flops.get("bf16") or host.flops.get("fp32")
    kind = kind_key(host.facts.chip or "")
    memory = memory or machine.memory
    wired = host.working_set or machine.wired
    return replace(
        machine,
        memory=memory,
        wired=min(wired, memory) if wired and memory else wired,
        flops=flops or machine.flops,
        link=max((each.slower for each in speeds), default=machine.link),
        latency=min((each.latency for each in speeds), default=machine.latency),
        kind=machine.kind or kind or None,
    )


def hostfile_text(machines: Iterable[Machine], date: str = "") -> str:
    """Return a hostfile that ``read_hostfile`` reads as these machines, to five digits."""
    lines = [f"{_line(machine)}\n" for machine in machines]
    return _HEADER.format(date=date and f" on {date}") + "".join(lines)


def _line(machine: Machine) -> str:
    facts = {
        "memory": machine.memory and _memory(machine.memory),
        "wired": machine.wired and _memory(machine.wired),
        "flops": machine.flops and _scaled(machine.flops, _FLOPS),
        "link": machine.link and _scaled(8 * machine.link, _BITS),
        "latency": machine.latency and _scaled(machine.latency, _SECONDS),
        "kind": machine.kind,
    }
    words = [f"{key}={value}" for key, value in facts.items() if value]
    comment = f"  # {' '.join(words)}" if words else ""
    return f"{machine.login or machine.host} slots={machine.slots}{comment}"


_FLOPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_BITS = ((1e9, "Gbps"), (1e6, "Mbps"), (1e3, "kbps"))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def _memory(nbytes: int) -> str:
    return f"{nbytes // GIB}GiB" if nbytes % GIB == 0 else f"{nbytes // MIB}MiB"


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((each for each in units if number >= each[0]), units[-1])
    return f"{number / size:.5g}{unit}"
