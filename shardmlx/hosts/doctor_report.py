"""Shows the findings of ``shardmlx.doctor``: tables for people, JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardmlx.common.formatting import columns, gibibytes
from shardmlx.common.json_output import plain
from shardmlx.common.units import GIB, MIB
from shardmlx.errors import file_access
from shardmlx.hosts.findings import Examination, Finding, Host, Link, open_routes

T = TypeVar("T")

UNKNOWN = "unknown"

SYSTEM_BYTES, SYSTEM_PART = 4 * GIB, 8
"""Memory left to macOS by the wired limit that we suggest: the larger of these bytes and a part."""


def progress(line: str) -> None:
    """Print progress on stderr; stdout is for the findings."""
    print(f"doctor: {line}", file=sys.stderr, flush=True)


def write(path: str, content: str) -> None:
    """Write a file, or raise ``UserError``; say so on stdout."""
    with file_access("write", path):
        Path(path).write_text(content, encoding="utf-8")
    print(f"Wrote {path}", flush=True)


def text(examination: Examination, findings: Sequence[Finding]) -> str:
    """Return a table of hosts, one of links, and a line for each finding."""
    hosts, links = examination.hosts, examination.links
    parts = [host_table((host.name for host in hosts), hosts, _cells(hosts))]
    if links:
        header = ("link", "over", "latency", "there", "back")
        parts.append(columns(header, [_link_line(link) for link in links]))
    parts.append("\n".join(filter(None, map(_advice, hosts))))
    parts.append(warnings(findings))
    return "\n\n".join(filter(None, parts))


def warnings(findings: Sequence[Finding]) -> str:
    """Return one line for each finding."""
    return "\n".join(f"warning: {each}" for each in findings) or "nothing to warn of"


def as_json(examination: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all that ranks have found; unknown values are None."""
    return {
        "hosts": [{**plain(host), "versions": host.versions} for host in examination.hosts],
        "links": examination.links,
        "warnings": findings,
    }


def host_table(
    names: Iterable[str], hosts: Sequence[T], cells: Iterable[tuple[str, Callable[[T], str | None]]]
) -> str:
    """Return a table with a column a host: the label of each line, and what its cells say."""
    lines = [(label, *(cell(host) or UNKNOWN for host in hosts)) for label, cell in cells]
    return columns(("host", *names), lines)


def _cells(hosts: Sequence[Host]) -> Iterator[tuple[str, Callable[[Host], str | None]]]:
    yield "ranks", lambda host: " ".join(map(str, host.ranks))
    for package in dict.fromkeys(package for host in hosts for package in host.versions):
        yield package, partial(_version, package)
    yield "mpirun", lambda host: host.facts.mpirun
    yield "system", lambda host: host.facts.system
    yield "chip", lambda host: host.facts.chip
    yield "cores", lambda host: str(host.facts.cores or "")
    yield "computes on", lambda host: host.device
    yield "matrix library", lambda host: host.blas
    for dtype in dict.fromkeys(dtype for host in hosts for dtype in host.flops):
        yield f"matmul {dtype}", partial(_speed, dtype)
    yield "memory", lambda host: size(host.facts.memory)
    yield "free memory", lambda host: size(host.facts.memory_free)
    yield "memory limit", lambda host: size(host.facts.memory_limit) or "the machine's"
    yield "wired limit", _wired_limit
    if any(host.gpu_memory is not None for host in hosts):
        yield "GPU memory", lambda host: size(host.gpu_memory) or "the machine's"
    yield "free disk", lambda host: size(host.facts.disk_free)
    for kind in dict.fromkeys(kind for host in hosts for kind in host.self_test):
        yield kind, partial(_apart, kind)


def _apart(kind: str, host: Host) -> str | None:
    apart = host.self_test.get(kind)
    return None if apart is None else f"within {apart:.0e} of the CPU"


def _version(package: str, host: Host) -> str | None:
    return host.versions.get(package)


def size(count: int | None) -> str | None:
    """Return bytes for people; None where they are unknown."""
    return None if count is None else gibibytes(count)


def _speed(dtype: str, host: Host) -> str | None:
    flops = host.flops.get(dtype)
    if flops is None:
        return None
    return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.1f} GFLOP/s"


def _wired_limit(host: Host) -> str | None:
    if not host.facts.is_mac:
        return "not applicable"
    limit = host.facts.wired_limit
    if limit == 0:
        return "left to macOS" + (f": {gibibytes(host.working_set)}" if host.working_set else "")
    return size(limit)


def _advice(host: Host) -> str | None:
    """Return how the GPU of a Mac may wire more."""
    memory = host.facts.memory or 0
    left = memory - max(SYSTEM_BYTES, memory // SYSTEM_PART)
    if not host.facts.is_mac or host.facts.wired_limit != 0 or left <= memory // 2:
        return None
    return (
        f"{host.name}: if a model needs more memory on the GPU than the system allows: "
        f"sudo sysctl iogpu.wired_limit_mb={left // MIB} (until the next start)"
    )


def _link_line(link: Link) -> tuple[str, ...]:
    routes = ", ".join(map(str, open_routes(link.there))) or UNKNOWN
    if link.speed is None:
        return (link.name, routes, UNKNOWN, UNKNOWN, UNKNOWN)
    there, back = bandwidth(link.speed.there), bandwidth(link.speed.back)
    return (link.name, routes, latency(link.speed.latency), there, back)


def latency(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def bandwidth(bytes_per_second: float) -> str:
    """Return a speed for people, in bits as networks are sold."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
