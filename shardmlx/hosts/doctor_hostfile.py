"""Write a hostfile of what ``shardmlx.doctor`` measured or found, annotated for the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from shardmlx.common.units import GIB
from shardmlx.errors import UserError
from shardmlx.hosts.findings import Examination, Host
from shardmlx.hosts.host_facts import HostFacts
from shardmlx.planning.facts import chips
from shardmlx.planning.facts.hostfile import Machine, host_key, is_unnamed, kind_key
from shardmlx.planning.facts.ring import RDMA_SUM_SECONDS

_HEADER = """\
# Measured by shardmlx doctor{date}, for shardmlx plan; mpirun passes over it.
# flops is what square matrix products reach, and less than what is published for a chip, of which
# shardmlx plan counts on 60% of it; shardmlx profile measures what training reaches.
"""

_FOUND = """\
# Found by shardmlx doctor --find on {date}. The first host runs rank 0. flops is what is published
# of the chip's largest GPU; shardmlx launch --hostfile F doctor measures it, and the links.
"""


def machines_of(examination: Examination, known: Sequence[Machine] = ()) -> tuple[Machine, ...]:
    """Return the measured machines: ``known`` ones, which keep their unmeasured facts, come first.
    A host's link is its fastest: of two hosts, the planner takes the slower speed."""
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
    known = _with_facts(machine, host.facts, host.working_set or machine.wired)
    return replace(
        known,
        memory=min(filter(None, (known.memory, host.gpu_memory)), default=None),
        flops=host.flops.get("bf16") or host.flops.get("fp32") or machine.flops,
        link=max((each.slower for each in speeds), default=machine.link),
        latency=min((each.latency for each in speeds), default=machine.latency),
    )


def _with_facts(machine: Machine, facts: HostFacts, wired: int | None) -> Machine:
    memory = facts.memory_limit or facts.memory or machine.memory
    return replace(
        machine,
        memory=memory,
        wired=min(wired, memory) if wired and memory else wired,
        rdma=machine.rdma or (RDMA_SUM_SECONDS if facts.has_rdma else None),
        kind=machine.kind or kind_key(facts.chip or "") or None,
    )


def found_hostfile(
    found: Mapping[str, HostFacts | None], remarks: Mapping[str, str], date: str
) -> str:
    """Return a hostfile of hosts, with what is known of them and of their chips, and remarks."""
    lines = [_line(_published(host, facts), remarks[host]) for host, facts in found.items()]
    return _FOUND.format(date=date) + "".join(lines)


def _published(host: str, facts: HostFacts | None) -> Machine:
    machine = Machine(host=host)
    if facts is None:
        return machine
    if gpu := chips.gpu_of(facts.chip or ""):
        machine = replace(machine, flops=gpu.flops.half)
    with suppress(UserError):  # the chip is in no list
        (mac,) = chips.machines_of(f"{facts.chip} {(facts.memory or 0) // GIB}GB")
        machine = replace(machine, flops=mac.flops)
    return _with_facts(machine, facts, facts.wired_limit or None)


def hostfile_text(machines: Iterable[Machine], date: str = "") -> str:
    """Return a hostfile that ``read_hostfile`` reads as these machines, to five digits."""
    return _HEADER.format(date=date and f" on {date}") + "".join(map(_line, machines))


def _line(machine: Machine, remark: str = "") -> str:
    facts = {
        "memory": machine.memory and f"{machine.memory / GIB:.6g}GiB",
        "wired": machine.wired and f"{machine.wired / GIB:.6g}GiB",
        "flops": machine.flops and f"{machine.flops / 1e12:.5g}T",
        "bandwidth": machine.bandwidth and f"{machine.bandwidth / 1e9:.5g}GB/s",
        "link": machine.link and f"{8 * machine.link / 1e9:.5g}Gbps",
        "latency": machine.latency and f"{1e6 * machine.latency:.5g}us",
        "rdma": machine.rdma and f"{1e6 * machine.rdma:.5g}us",
        "kind": machine.kind,
        "python": machine.python,
    }
    words = [f"{key}={value}" for key, value in facts.items() if value]
    said = ", ".join(filter(None, (" ".join(words), remark)))
    comment = f"  # {said}" if said else ""
    return f"{machine.entry}{comment}\n"
