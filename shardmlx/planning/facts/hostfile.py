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
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmlx.common.units import BYTES, DECIMAL, split_quantity
from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.errors import UserError, file_access
from shardmlx.planning.facts.ring import Ring


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
    backend: str | None = None
    """The backend of MLX there, as a rank says: metal, cuda or cpu."""
    where: str = field(default="", compare=False)
    """File and line of the entry, for messages."""
    login: str = field(default="", compare=False)
    """The host as ssh is told it, perhaps with a user."""
    port: int | None = field(default=None, compare=False)
    """Port of ssh there, if the file gives one."""
    python: str | None = field(default=None, compare=False)
    """Whole path of the Python of ranks there, if the file gives one."""

    @property
    def entry(self) -> str:
        """Words of a hostfile with which mpirun starts ranks there."""
        port = "" if self.port is None else f" port={self.port}"
        return f"{self.login or self.host} slots={self.slots}{port}"


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
    names = ("memory", "wired", "flops")
    groups = [machines[first : first + size] for first in range(0, len(machines), size)]
    return tuple(
        replace(group[0], **{name: _together(group, name) for name in names}) for group in groups
    )


def _together(group: Sequence[Machine], name: str) -> Any:
    """Return the sum of a number of machines; None if one of them does not know it."""
    values = [getattr(each, name) for each in group]
    return None if None in values else sum(values)


_COMMENT = re.compile("#|//")

_STRANGE_SPACE = re.compile(r"[^\S \t\f\v]|[\0-\x08\x1c-\x1f\x7f\u200b-\u200f\u2060\ufeff]")
"""Characters that look like a space, or like nothing, and are neither to mpirun."""

_SETTINGS = {
    "slots": "slots",
    "port": "port",
    **dict.fromkeys(("username", "user-name", "user_name"), "username"),
    **dict.fromkeys(("max_slots", "max-slots"), "max_slots"),
}
"""Keys of a host, as mpirun reads them, and the main name of each."""

_MPIRUN_WORDS = frozenset(
    {*_SETTINGS, "cpu", "count", "slots-max", "slots_max", "cpu-max", "cpu_max", "max-cpu"}
    | {"max_cpu", "count-max", "count_max", "max-count", "max_count", "rank", "slot", "boards"}
    | {"sockets", "sockets_per_board", "sockets-per-board", "cores", "cores_per_socket"}
    | {"cores-per-socket"}
)
"""Words that mpirun reads as its own, wherever they stand."""

_LAST_PORT = 65535

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

KEYS = (*_QUANTITIES, "kind", "python")
"""The keys of a comment; a kind is any name, and a Python a whole path."""

_PYTHON = re.compile(r"/[\w@%+=,./-]*/bin/[\w.-]+", re.ASCII)
"""Paths that mpirun passes on to other hosts as they are."""


def _machine(line: str, where: str) -> Machine | None:
    """Return what a line says of a host; None if it names none."""
    if "\r" in line:
        raise UserError(
            f"{where}: mpirun reads no Windows line ends", "save the file with Unix ones"
        )
    text, *comment = _COMMENT.split(line, maxsplit=1)
    if space := _STRANGE_SPACE.search(text):
        name = unicodedata.name(space[0], "a control character").lower()
        raise UserError(
            f"{where}: {name} (U+{ord(space[0]):04X}), which mpirun does not read",
            "write plain spaces between words",
        )
    words = _words(text)
    if not words:
        return None
    user, host = _user_and_host(words[0], where)
    settings = _settings(words[1:], host, where)
    slots = settings.get("slots")
    if slots is None:
        raise UserError(
            f"{where}: host {host!r} has no slots, and mpirun would start as many ranks there as "
            "it has cores",
            f"write {host} slots=1",
        )
    if int(settings.get("max_slots", slots)) < int(slots):
        raise UserError(f"{where}: max_slots is less than slots", "omit max_slots")
    user = settings.get("username", user)  # mpirun takes the later one
    port = settings.get("port")
    facts = _facts(comment, where)
    memory = facts.get("memory")
    wired = facts.get("wired")
    if memory is not None and wired is not None and wired > memory:
        raise UserError(f"{where}: host {host!r} wires more memory than it has", "give wired less")
    return Machine(
        host=host,
        slots=int(slots),
        where=where,
        login=host if user is None else f"{user}@{host}",
        port=None if port is None else int(port),
        **facts,
    )


def _user_and_host(word: str, where: str) -> tuple[str | None, str]:
    """Return the user, if there is one, and the host that the first word of a line names."""
    user, at, host = word.rpartition("@")
    if "%" in host and _address(host):
        raise UserError(
            f"{where}: host {host!r}: mpirun takes no address with an interface",
            "write the name or the IPv4 address of that machine",
        )
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]*", host, re.ASCII) and host not in _MPIRUN_WORDS
    is_address = _address(host) is not None and not {":", "."} <= set(host)
    if not (named or is_address) or host.isdecimal():
        raise UserError(
            f"{where}: host {word!r}", "write a name or an address, like mac-mini.local"
        )
    if at:
        _check_user(user, host, where)
    return (user if at else None), host


def _check_user(user: str, host: str, where: str) -> None:
    """Refuse the names of users that mpirun refuses, or passes over in silence."""
    is_taken = re.fullmatch(r"[A-Za-z0-9][\w-]*", user, re.ASCII) and user not in _MPIRUN_WORDS
    if not is_taken or user.isdecimal():
        raise UserError(
            f"{where}: mpirun does not take the user {user!r}",
            f"omit the user here, and write two lines into ~/.ssh/config: 'Host {host}' and "
            f"'User {user}'",
        )


def _settings(words: Iterable[str], host: str, where: str) -> dict[str, str]:
    """Return the settings of a host, by mpirun's main name of each; all are checked."""
    found: dict[str, str] = {}
    for word in words:
        given, equals, value = word.partition("=")
        key = _SETTINGS.get(given)
        if key is None or key in found or not equals:
            raise UserError(f"{where}: {word!r}", "write 'name slots=1', and all else after a #")
        if key == "username":
            _check_user(value, host, where)
        elif not re.fullmatch("0*[1-9][0-9]{0,5}", value):
            raise UserError(f"{where}: {key} is {value!r}", "give a whole number from 1")
        if key == "port" and int(value) > _LAST_PORT:
            raise UserError(f"{where}: port is {value!r}", f"give a number up to {_LAST_PORT}")
        found[key] = value
    return found


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
        if key == "python" and not _PYTHON.fullmatch(value):
            remedy = (
                "give its whole path, in a bin, without spaces: python=/opt/shardmlx/bin/python"
            )
            raise UserError(f"{where}: python is {value!r}", remedy)
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
