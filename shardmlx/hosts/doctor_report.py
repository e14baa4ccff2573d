"""Shows the findings of ``shardmlx.doctor``: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shardmlx
from shardmlx.common.formatting import columns, gibibytes
from shardmlx.common.reporter import check_writable
from shardmlx.common.units import GIB, MIB
from shardmlx.config.doctor import STDOUT
from shardmlx.errors import UserError
from shardmlx.hosts.findings import Examination, Finding, Host, Link, open_routes
from shardmlx.hosts.host_facts import HostFacts

UNKNOWN = "unknown"

SYSTEM_BYTES = 4 * GIB
SYSTEM_PART = 8
"""Memory left to macOS by the wired limit that we suggest: the larger of these bytes and a part."""


def progress(line: str) -> None:
    """Print progress on stderr; stdout is for the findings."""
    print(f"doctor: {line}", file=sys.stderr, flush=True)


def check_json(target: str | None) -> None:
    """Raise ``UserError`` if the file of ``--json`` cannot be written."""
    if target not in (None, STDOUT):
        check_writable(Path(str(target)), "--json")


def show(tables: str, content: Mapping[str, Any], target: str | None) -> None:
    """Print the tables, and write the content as JSON to a file; or to stdout instead."""
    as_json = json.dumps(content, indent=1)
    if target == STDOUT:
        print(as_json, flush=True)
        return
    print(tables, flush=True)
    if target is not None:
        write(target, as_json + "\n", target)


def write(path: str, content: str, json_target: str | None) -> None:
    """Write a file, or raise ``UserError``; say so on stdout, unless JSON goes there."""
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    print(f"Wrote {path}", file=sys.stderr if json_target == STDOUT else sys.stdout, flush=True)


def text(examination: Examination, findings: Sequence[Finding]) -> str:
    """Return a table of hosts, one of links, and a line for each finding."""
    hosts, links = examination.hosts, examination.links
    parts = [columns(("host", *(host.name for host in hosts)), _rows(hosts))]
    if links:
        header = ("link", "over", "latency", "there", "back")
        parts.append(columns(header, [_link_line(link) for link in links]))
    notes = [note for host in hosts for note in _notes(host)]
    if notes:
        parts.append("\n".join(notes))
    parts.append(warnings(findings))
    return "\n\n".join(parts)


def warnings(findings: Sequence[Finding]) -> str:
    """Return one line for each finding."""
    return "\n".join(f"warning: {each}" for each in findings) or "nothing to warn of"


def content(examination: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all findings, for JSON; unknown values are null.

    Units are as in ``examination``: bytes, seconds, FLOP/s, bytes a second.
    """
    return {
        "shardmlx": shardmlx.__version__,
        "hosts": [{**asdict(host), "versions": host.versions} for host in examination.hosts],
        "links": [asdict(link) for link in examination.links],
        "warnings": [asdict(each) for each in findings],
    }


def _rows(hosts: Sequence[Host]) -> list[tuple[str, ...]]:
    def row(label: str, cell: Callable[[Host], str | None]) -> tuple[str, ...]:
        return label, *(cell(host) or UNKNOWN for host in hosts)

    def version(package: str) -> tuple[str, ...]:
        return row(package, lambda host: host.versions.get(package))

    packages = dict.fromkeys(package for host in hosts for package in host.versions)
    dtypes = dict.fromkeys(dtype for host in hosts for dtype in host.flops)
    return [
        row("ranks", lambda host: " ".join(map(str, host.ranks))),
        *map(version, packages),
        row("system", lambda host: host.facts.system),
        row("chip", lambda host: host.facts.chip),
        row("cores", lambda host: str(host.facts.cores or "")),
        row("computes on", lambda host: host.device),
        row("matrix library", lambda host: host.blas),
        *(row(f"matmul {dtype}", _speed_of(dtype)) for dtype in dtypes),
        row("memory", lambda host: _bytes(host.facts.memory)),
        row("free memory", lambda host: _bytes(host.facts.memory_free)),
        row("memory limit", lambda host: _limit(host.facts)),
        row("wired limit", _wired_limit),
        row("free disk", lambda host: _bytes(host.facts.disk_free)),
        row("arrays to MPI", lambda host: "copied" if host.copies else "no copy"),
    ]


def _bytes(count: int | None) -> str | None:
    return None if count is None else gibibytes(count)


def _limit(facts: HostFacts) -> str:
    if facts.memory_limit is None:
        return "the machine's"
    return f"{gibibytes(facts.memory_limit)}, {facts.memory_limit_reason}"


def _speed_of(dtype: str) -> Callable[[Host], str | None]:
    def cell(host: Host) -> str | None:
        flops = host.flops.get(dtype)
        if flops is None:
            return None
        return f"{flops / 1e12:.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:.1f} GFLOP/s"

    return cell


def _wired_limit(host: Host) -> str | None:
    if not host.facts.is_mac:
        return "not applicable"
    limit = host.facts.wired_limit
    if limit == 0:
        return "left to macOS" + (f": {gibibytes(host.working_set)}" if host.working_set else "")
    return _bytes(limit)


def _notes(host: Host) -> Iterable[str]:
    """Yield optional improvements."""
    facts = host.facts
    if facts.is_mac and facts.wired_limit == 0 and facts.memory:
        left = facts.memory - max(SYSTEM_BYTES, facts.memory // SYSTEM_PART)
        if left > facts.memory // 2:
            yield (
                f"{host.name}: if a model needs more memory on the GPU than the system allows: "
                f"sudo sysctl iogpu.wired_limit_mb={left // MIB} (until the next start)"
            )


def _link_line(link: Link) -> tuple[str, ...]:
    routes = ", ".join(map(str, open_routes(link.there))) or UNKNOWN
    if link.speed is None:
        return (link.name, routes, UNKNOWN, UNKNOWN, UNKNOWN)
    return (
        link.name,
        routes,
        latency(link.speed.latency),
        bandwidth(link.speed.there),
        bandwidth(link.speed.back),
    )


def latency(seconds: float) -> str:
    """Return seconds for people."""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"


def bandwidth(bytes_per_second: float) -> str:
    """Return a speed for people, in bits as networks are sold."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
