"""Read Open MPI hostfiles whose comments say what each machine has. No MLX, no MPI.

::

    mac-studio.local slots=1  # memory=64GiB flops=27T link=40Gbps latency=30us, in the office

``mpirun`` ignores the comment. Every key=value word in it is for the planner and must have a key of
``KEYS``; all other words, and comments on lines of their own, are prose. The rest of the line is
parsed as in mpirun 5 (PRRTE's ``hostfile.c``), but words that mpirun guesses at or silently drops
are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmlx.common.units import BYTES, DECIMAL, split_quantity
from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.errors import UserError


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
    link: float | None = None
    """Bytes a second to other machines, each way."""
    latency: float | None = None
    """Seconds, one way."""
    kind: str | None = None
    """Name shared by identical machines: a measurement of one holds for all."""
    where: str = field(default="", compare=False)
    """File and line of the entry, for messages."""
    login: str = field(default="", compare=False)
    """The host as the file writes it, perhaps with a user."""


def read_hostfile(path: str | Path) -> tuple[Machine, ...]:
    """Return the machines of a hostfile in mpirun's order; raise ``UserError`` for a bad line.

    The error names file, line and value. A host listed n times without slots has n of them.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read hostfile {path}: {error.strerror or error}") from None
    try:
        lines = content.decode().split("\n")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {number}: byte {content[error.start]:#04x} is no UTF-8 text",
            "is it a hostfile?",
        ) from None
    entries = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        entry = _entry(line, where)
        if entry is None:
            continue
        entries.append(entry)
        if number == len(lines) and _COMMENT.search(line):
            raise UserError(f"{where}: mpirun reads no comment without a line end", "add one")
    machines = _merged(entries)
    if not machines:
        raise UserError(f"{path}: no hosts", "write one 'name slots=1' a line")
    return machines


def machine_of_each_rank(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    """Return one entry a slot, in the order in which mpirun gives out ranks.

    Memory and FLOP/s are divided among the slots of a machine; its link is shared.
    """
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


_COMMENT = re.compile("#|//")
_SLOTS = ("slots", "count", "cpu")
_MAX_SLOTS = tuple(
    f"{a}{joint}{b}" for what in _SLOTS for a, b in (("max", what), (what, "max")) for joint in "-_"
)
_PASSED_OVER = ("port", "username", "user-name", "user_name")

UNITS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "memory": BYTES,
        "wired": BYTES,
        "flops": {
            f"{prefix}{unit}": size
            for unit in ("", "FLOPS", "FLOP/s")
            for prefix, size in DECIMAL.items()
        },
        "link": {f"{unit}/s": size for unit, size in BYTES.items()}
        | {
            f"{prefix}{unit}": size / 8
            for unit in ("bps", "bit/s")
            for prefix, size in DECIMAL.items()
        },
        "latency": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    }
)
"""The units of each key of a comment, in bytes, FLOP/s, bytes a second and seconds."""

_KIND = "kind"

KEYS = (*UNITS, _KIND)
"""The keys of a comment; a kind is any name."""

_PLAUSIBLE = {
    "memory": ("1MiB", "64GiB", "1PB"),
    "wired": ("1MiB", "48GiB", "1PB"),
    "flops": ("1M", "27T", "1000P"),
    "link": ("1kB/s", "40Gbps", "1PB/s"),
    "latency": ("1ns", "30us", "1000s"),
}
"""The least plausible value of each key, an example, and the most; others are typing errors."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the file; ``slots`` is None if it names none."""

    where: str
    login: str
    host: str
    slots: int | None
    facts: Mapping[str, Any]


def _entry(line: str, where: str) -> _Entry | None:
    if "\r" in line:
        raise UserError(
            f"{where}: mpirun reads no Windows line ends", "save the file with Unix ones"
        )
    text, *comment = _COMMENT.split(line, maxsplit=1)
    if "/*" in text:
        raise UserError(f"{where}: '/*'", "write comments with #")
    words = _words(text)
    if not words:
        return None
    host = _host(words[0], where)
    slots = maximum = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key in _SLOTS and equals and slots is None:
            slots = _count(key, value, where)
        elif key in _MAX_SLOTS and equals:
            maximum = _count(key, value, where)
        elif not (key in _PASSED_OVER and equals):
            raise UserError(f"{where}: {word!r}", _what_to_write(key, equals))
    if slots is None:
        slots = maximum
    elif maximum is not None and maximum < slots:
        raise UserError(f"{where}: {slots} slots, but {maximum} at most", "give no more than that")
    return _Entry(where, words[0], host, slots, _facts(comment, where))


def _words(text: str) -> list[str]:
    """Return the words of a line, with spaces around = removed."""
    return re.sub(r"\s*=\s*", "=", text).split()


def _host(word: str, where: str) -> str:
    """Return the name without its user."""
    host = word.rpartition("@")[2]
    if _address(host):
        return host
    name, colon, count = host.partition(":")
    if colon:
        raise UserError(f"{where}: host {word!r}", f"write {name} slots={count or 1}")
    if not re.fullmatch(r"(\w[\w-]*@)?\w[\w.-]*", word, re.ASCII):
        raise UserError(
            f"{where}: host {word!r}", "write a name or an address, like mac-mini.local"
        )
    return host


def is_unnamed(host: str) -> bool:
    """Return whether a host is an address, or a name that every machine has for itself."""
    return host == "localhost" or _address(host) is not None


def host_key(host: str) -> str:
    """Return the key under which two names of a host are equal: without domain, in lower case.

    Addresses are kept whole.
    """
    return _address(host) or _node(host).casefold()


def _node(host: str) -> str:
    """Return the name by which mpirun knows a host: without its domain, unless it is an address."""
    return host if _address(host) else host.split(".")[0]


def same_host(a: str, b: str) -> bool:
    """Return whether two names or addresses denote one host."""
    return host_key(a) == host_key(b)


def kind_key(kind: str) -> str:
    """Return a kind of machine as one word of a hostfile: ``Apple M2`` is ``apple-m2``."""
    return re.sub(r"[\s=]+", "-", kind.strip()).strip(",;.").casefold()


def _address(host: str) -> str | None:
    """Return an IP address as it is usually written; None for a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def _count(key: str, value: str, where: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,5}", value):
        raise UserError(f"{where}: {key} is {value!r}", "give a whole number from 1")
    return int(value)


def _what_to_write(key: str, equals: str) -> str:
    if key in UNITS and equals:
        return f"mpirun does not know {key}: write it after a #"
    if key in _SLOTS and equals:
        return "slots are given already: give them once"
    return did_you_mean(key, _SLOTS + _MAX_SLOTS) or "write 'name slots=1', and all else after a #"


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
        if key != _KIND:
            facts[key] = _quantity(key, value, where)
        elif value:
            facts[key] = value
        else:
            raise UserError(f"{where}: {_KIND} has no name", f"give one, like {_KIND}=m2-ultra")
    return facts


def _quantity(key: str, value: str, where: str) -> float:
    least, example, most = _PLAUSIBLE[key]
    try:
        number, unit = split_quantity(value)
    except ValueError:
        raise UserError(f"{where}: {key} is {value!r}", f"give a number, like {example}") from None
    if unit not in UNITS[key]:
        said = f"has the unknown unit {unit!r}" if unit else "has no unit"
        some = [each for each in UNITS[key] if each[:1] in ("M", "G", "T", "u", "m")]
        raise UserError(f"{where}: {key}={value} {said}", f"use one of {', '.join(some)}")
    size = number * UNITS[key][unit]
    if not _plain(key, least) <= size <= _plain(key, most):
        remedy = f"give {least} to {most}, like {example}"
        raise UserError(f"{where}: {key} is {value!r}", remedy)
    return size


def _plain(key: str, value: str) -> float:
    """Return a quantity in bytes, FLOP/s, bytes a second or seconds."""
    number, unit = split_quantity(value)
    return number * UNITS[key][unit]


def _merged(entries: Iterable[_Entry]) -> tuple[Machine, ...]:
    """Return hosts in the order of their first lines; further lines of a host add a slot each."""
    nodes: dict[str, list[_Entry]] = {}
    for entry in entries:
        nodes.setdefault(host_key(entry.host), []).append(entry)
    return tuple(map(_machine, nodes.values()))


def _machine(entries: list[_Entry]) -> Machine:
    first, *others = entries
    facts = dict(first.facts)
    for entry in others:
        if _node(entry.host) != _node(first.host):
            raise UserError(
                f"{entry.where}: host {entry.host!r} is {first.host!r} of {first.where}, but for "
                "mpirun another host",
                "write both alike",
            )
        if entry.slots is not None:
            raise UserError(
                f"{entry.where}: host {entry.host!r} is the host of {first.where}",
                "mpirun takes either one line with slots, or one line for each slot without",
            )
        for key, size in entry.facts.items():
            if facts.setdefault(key, size) != size:
                raise UserError(
                    f"{entry.where}: {key} of {entry.host!r} differs from that in {first.where}",
                    "give it once",
                )
    if first.slots is None and not others:
        raise UserError(
            f"{first.where}: host {first.host!r} has no slots, and mpirun would start as many "
            "ranks there as it has cores",
            f"write {first.host} slots=1",
        )
    memory, wired = facts.get("memory"), facts.get("wired")
    if memory is not None and wired is not None and wired > memory:
        raise UserError(
            f"{first.where}: host {first.host!r} wires more memory than it has", "give wired less"
        )
    facts |= {key: round(facts[key]) for key in ("memory", "wired") if key in facts}
    slots = (first.slots or 1) + len(others)
    return Machine(host=first.host, slots=slots, where=first.where, login=first.login, **facts)
