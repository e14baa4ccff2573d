"""Read Open MPI hostfiles whose comments say what each machine has. No MLX, no MPI.

::

    mac-studio.local slots=1  # memory=64GiB flops=27T link=40Gbps latency=30us, in the office

``mpirun`` ignores the comment. Every key=value word in it is for the planner and must have a key of
``KEYS``; all other words, and comments on lines of their own, are prose. The rest of the line is
parsed as in mpirun 5 (PRRTE's ``hostfile.c``), but a host has one line, with ``slots=``, and words
that mpirun guesses at or silently drops are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmlx.common.units import BYTES, DECIMAL, split_quantity
from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.costmodel.ring import Ring
from shardmlx.errors import UserError, file_access


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host; unknown values are None."""

    host: str
    slots: int = 1
    """Ranks that mpirun starts there before the next host."""
    memory: int | None = None
    """Bytes of the whole machine."""
    wired: int | None = None
    """Bytes that macOS lets the GPU wire: Metal's recommended working set."""
    flops: float | None = None
    """FLOP/s of the whole machine."""
    bandwidth: float | None = None
    """Bytes a second from memory, of which each generated token needs all weights."""
    link: float | None = None
    """Bytes a second to other machines, each way."""
    latency: float | None = None
    """Seconds, one way."""
    rdma: float | None = None
    """Seconds of a sum over RDMA with other machines that have it."""
    ring: Ring | None = None
    """The links of the ranks for which it stands, if they compute layers together."""
    kind: str | None = None
    """Name shared by identical machines: a measurement of one holds for all."""
    where: str = field(default="", compare=False)
    """File and line of the entry, for messages."""
    login: str = field(default="", compare=False)
    """The host as the file writes it, perhaps with a user."""


def read_hostfile(path: str | Path) -> tuple[Machine, ...]:
    """Return the machines in mpirun's order; ``UserError`` names file, line and value."""
    with file_access("read hostfile", path):
        lines = Path(path).read_bytes().decode(errors="replace").split("\n")
    machines: dict[str, Machine] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        machine = _machine(line, where)
        if machine is None:
            continue
        before = machines.setdefault(host_key(machine.host), machine)
        if before is not machine:
            raise UserError(
                f"{where}: host {machine.host!r} is the host of {before.where}",
                "give it one line, with slots=2 for two ranks",
            )
        if number == len(lines) and _COMMENT.search(line):
            raise UserError(f"{where}: mpirun reads no comment without a line end", "add one")
    if not machines:
        raise UserError(f"{path}: no hosts", "write one 'name slots=1' a line")
    return tuple(machines.values())


def machine_of_each_rank(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    """Return an entry a slot, in mpirun's order, each with its part of all but the link."""
    return tuple(
        replace(
            machine,
            slots=1,
            memory=None if machine.memory is None else machine.memory // machine.slots,
            wired=None if machine.wired is None else machine.wired // machine.slots,
            flops=None if machine.flops is None else machine.flops / machine.slots,
        )
        for machine in machines
        for _ in range(machine.slots)
    )


def as_groups(machines: Sequence[Machine], size: int) -> tuple[Machine, ...]:
    """Return a machine for each group of ``size`` ranks, with what all of them have together."""

    def together(group: Sequence[Machine], name: str) -> Any:
        values = [getattr(each, name) for each in group]
        return None if None in values else sum(values)

    names = ("memory", "wired", "flops")
    groups = [machines[first : first + size] for first in range(0, len(machines), size)]
    return tuple(
        replace(group[0], **{name: together(group, name) for name in names}) for group in groups
    )


_COMMENT = re.compile("#|//")

_PASSED_OVER = ("port", "username", "user-name", "user_name", "max_slots", "max-slots")

_FLOPS = {
    f"{prefix}{unit}": size for unit in ("", "FLOPS", "FLOP/s") for prefix, size in DECIMAL.items()
}
_LINK = {f"{unit}/s": size for unit, size in BYTES.items()} | {
    f"{prefix}{unit}": size / 8 for unit in ("bps", "bit/s") for prefix, size in DECIMAL.items()
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_QUANTITIES: Mapping[str, tuple[Mapping[str, float], str, str, str]] = MappingProxyType(
    {
        "memory": (BYTES, "1MiB", "64GiB", "1PB"),
        "wired": (BYTES, "1MiB", "48GiB", "1PB"),
        "flops": (_FLOPS, "1M", "27T", "1000P"),
        "bandwidth": (_LINK, "1MB/s", "400GB/s", "1PB/s"),
        "link": (_LINK, "1kB/s", "40Gbps", "1PB/s"),
        "latency": (_SECONDS, "1ns", "30us", "1000s"),
        "rdma": (_SECONDS, "1ns", "30us", "1s"),
    }
)
"""The keys of a comment: units, the least plausible value, an example, the most plausible one."""

KEYS = (*_QUANTITIES, "kind")
"""The keys of a comment; a kind is any name."""


def _machine(line: str, where: str) -> Machine | None:
    """Return what a line says of a host; None if it names none."""
    if "\r" in line:
        raise UserError(
            f"{where}: mpirun reads no Windows line ends", "save the file with Unix ones"
        )
    text, *comment = _COMMENT.split(line, maxsplit=1)
    words = _words(text)
    if not words:
        return None
    host = words[0].rpartition("@")[2]
    if not _address(host) and not re.fullmatch(r"(\w[\w-]*@)?\w[\w.-]*", words[0], re.ASCII):
        raise UserError(
            f"{where}: host {words[0]!r}", "write a name or an address, like mac-mini.local"
        )
    slots = 0
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key in _PASSED_OVER and equals:
            continue
        if key != "slots" or slots or not equals:
            raise UserError(f"{where}: {word!r}", "write 'name slots=1', and all else after a #")
        if not re.fullmatch("0*[1-9][0-9]{0,5}", value):
            raise UserError(f"{where}: slots is {value!r}", "give a whole number from 1")
        slots = int(value)
    if not slots:
        raise UserError(
            f"{where}: host {host!r} has no slots, and mpirun would start as many ranks there as "
            "it has cores",
            f"write {host} slots=1",
        )
    facts = _facts(comment, where)
    memory, wired = facts.get("memory"), facts.get("wired")
    if memory is not None and wired is not None and wired > memory:
        raise UserError(f"{where}: host {host!r} wires more memory than it has", "give wired less")
    return Machine(host=host, slots=slots, where=where, login=words[0], **facts)


def _words(text: str) -> list[str]:
    """Return the words of a line, with spaces around = removed."""
    return re.sub(r"\s*=\s*", "=", text).split()


def is_unnamed(host: str) -> bool:
    """Return whether a host is an address, or a name that every machine has for itself."""
    return host == "localhost" or _address(host) is not None


def host_key(host: str) -> str:
    """Return the key of a host's names: without domain, in lower case; addresses stay whole."""
    return _address(host) or host.split(".")[0].casefold()


def same_host(a: str, b: str) -> bool:
    """Return whether two names or addresses denote one host."""
    return host_key(a) == host_key(b)


def kind_key(kind: str) -> str:
    """Return a kind of machine as one word of a hostfile: ``Apple M2`` is ``apple-m2``."""
    return re.sub(r"[\s=]+", "-", kind.strip()).strip(",;.").casefold()


def _address(host: str) -> str | None:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _facts(comment: Iterable[str], where: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for word in _words(" ".join(comment)):
        match = re.fullmatch(r"([A-Za-z_-]+)=(.*?)[,;.]?", word)
        if match is None:
            continue
        key, value = match.groups()
        if key not in KEYS:
            known = f"the planner knows {', '.join(KEYS)}; prose goes without ="
            raise UserError(f"{where}: unknown key {key!r}", did_you_mean(key, KEYS) or known)
        if key in facts:
            raise UserError(f"{where}: {key} is given twice", "give it once")
        if key in _QUANTITIES:
            facts[key] = _quantity(key, value, where)
        elif value:
            facts[key] = value
        else:
            raise UserError(f"{where}: {key} has no name", f"give one, like {key}=m2-ultra")
    return facts


def _quantity(key: str, value: str, where: str) -> float:
    units, least, example, most = _QUANTITIES[key]
    with suppress(KeyError, ValueError):
        size, low, high = (
            number * units[unit] for number, unit in map(split_quantity, (value, least, most))
        )
        if low <= size <= high:
            return round(size) if units is BYTES else size
    raise UserError(f"{where}: {key} is {value!r}", f"give {least} to {most}, like {example}")
