"""Asks all hosts of a hostfile through ssh whether they can run a job. No MLX, no MPI."""

from __future__ import annotations

import contextlib
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import shardmlx
from shardmlx.common.cli import run_command
from shardmlx.common.environment import launched_rank
from shardmlx.common.http_listener import source_address
from shardmlx.config.doctor import LINE
from shardmlx.costmodel.hostfile import read_hostfile
from shardmlx.errors import UserError
from shardmlx.hosts import probe_script
from shardmlx.hosts.doctor_report import check_json, host_table, progress, show, warnings
from shardmlx.hosts.findings import Finding, connection_remedy, foreign_mpirun, version_skew
from shardmlx.hosts.mpirun import is_of_wheel, mpirun_path
from shardmlx.hosts.probe_client import Probe, at_once
from shardmlx.hosts.reachability import (
    Answer,
    RemoteLogin,
    is_local,
    probing,
    problems,
)

SECONDS_TO_RESOLVE = 5.0
SECONDS_FOR_CONNECTIONS = probe_script.SECONDS_TO_CONNECT + 5.0


@dataclass(slots=True)
class ProbedHost:
    """A host and its known facts so far. ``login`` is how the hostfile writes it."""

    name: str
    login: str
    is_local: bool
    address: str | None = None
    answer: Answer | Finding | None = None
    errors: dict[str, str | None] = field(default_factory=dict)
    """Reasons why it cannot connect to each host that it tried; None where it can."""

    @property
    def facts(self) -> Answer | None:
        return None if isinstance(self.answer, Finding) else self.answer

    @property
    def versions(self) -> dict[str, str | None]:
        return dict(self.facts["versions"]) if self.facts else {}

    @property
    def reached(self) -> str | None:
        """The address at which it was reached: by its name, or according to sshd."""
        return self.address or next(iter(self.ssh_connection[2:]), None)

    @property
    def ssh_connection(self) -> list[str]:
        """Client address and port, server address and port, according to sshd; or nothing."""
        words = str((self.facts or {}).get("ssh", "")).split()
        return words if len(words) == 4 else []


@dataclass(frozen=True, slots=True)
class SshReport:
    """The hosts of a hostfile, asked for one interpreter's path, and their faults. ``mpirun`` is
    this machine's."""

    python: str
    mpirun: Path | None
    hosts: tuple[ProbedHost, ...]
    findings: tuple[Finding, ...]


def run(words: Sequence[str]) -> int | None:
    """Ask the hosts with ssh; return the exit status, or None without ``--ssh``: ranks look."""
    if "--ssh" not in words:
        return None
    return run_command(lambda: _run(words)) if launched_rank() == 0 else 0  # one asks for all


def _run(words: Sequence[str]) -> int:
    options = LINE.load(words)
    check_json(options.json)
    progress(f"asking the hosts of {options.hostfile} with {options.ssh_command or 'ssh'}")
    found = probe_hosts(str(options.hostfile), options.ssh_command, options.python)
    show(report_text(found), report_content(found), options.json)
    return 1 if options.strict and found.findings else 0


def probe_hosts(hostfile: str, agent: str | None, python: str) -> SshReport:
    """Ask all hosts of the hostfile, and this machine if it is none of them."""
    known = read_hostfile(hostfile)
    hosts = [ProbedHost(each.host, each.login, is_local(each.host)) for each in known]
    if not any(host.is_local for host in hosts):
        # mpirun starts here, and its daemons connect back.
        name = socket.gethostname()
        hosts.insert(0, ProbedHost(name, name, is_local=True))
    findings, mpirun = [], None
    try:
        mpirun = mpirun_path()
        daemon = str(mpirun.with_name("prted"))
        if not is_of_wheel(mpirun):
            findings.append(foreign_mpirun(None, sys.executable))
    except UserError as error:
        findings.append(Finding(None, error.problem, error.remedy))
        daemon = str(Path(python).with_name("prted"))
    remote = RemoteLogin(tuple(shlex.split(agent or "ssh")), python, daemon)
    found = at_once({host.name: partial(_look_up, host.name) for host in hosts}, SECONDS_TO_RESOLVE)
    logins = {host.name: None if host.is_local else host.login for host in hosts}
    with probing(logins, remote) as (probes, answers):
        for host in hosts:
            host.address = found.get(host.name)
            host.answer = answers[host.name]
        _connect([host for host in hosts if host.facts is not None], probes)
    return SshReport(python, mpirun, tuple(hosts), (*findings, *find(hosts, remote)))


def _look_up(name: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    return None


def _connect(hosts: Sequence[ProbedHost], probes: Mapping[str, Probe]) -> None:
    """Let every host connect to every other, as ranks and mpirun's daemons will."""
    tried: dict[str, list[str]] = {}
    for host in hosts:
        targets = {
            other.name: (address, (other.facts or {})["port"])
            for other in hosts
            if other is not host and (address := address_of(other, host)) is not None
        }
        tried[host.name] = list(targets)
        probes[host.name].send(list(targets.values()))
    hear = {host.name: probes[host.name].receive for host in hosts}
    heard = at_once(hear, SECONDS_FOR_CONNECTIONS)
    for host in hosts:
        if answer := heard.get(host.name):
            host.errors = dict(zip(tried[host.name], answer["errors"], strict=True))


def address_of(host: ProbedHost, seen_by: ProbedHost) -> str | None:
    """Return the IPv4 address at which ``seen_by`` finds a host; None if it is unknown."""
    found = host.reached
    if host.is_local:
        source = seen_by.address and source_address(seen_by.address)
        found = next(iter(seen_by.ssh_connection), source)
    return found if found and ":" not in found else None


def find(hosts: Sequence[ProbedHost], remote: RemoteLogin) -> Iterator[Finding]:
    """Yield the faults of hosts that were asked."""
    for host in hosts:
        if host.answer is not None:
            yield from problems(host.name, host.answer, remote)
    yield from version_skew({host.name: host.versions for host in hosts if host.facts})
    for host in hosts:
        for other, error in host.errors.items():
            if error is not None:
                problem = f"cannot connect to {other} ({error})"
                yield Finding(host.name, problem, connection_remedy([error], other))


def report_text(report: SshReport) -> str:
    """Return a table of the hosts, and a line for each finding."""
    names = [host.name for host in report.hosts]
    table = host_table(names, report.hosts, _cells(report.hosts))
    mpirun = report.mpirun or "mpirun"
    python = f"{mpirun} starts ranks with the same Python on all hosts: {report.python}"
    return "\n\n".join([table, python, warnings(report.findings)])


def _cells(
    hosts: Sequence[ProbedHost],
) -> Iterator[tuple[str, Callable[[ProbedHost], str | None]]]:
    yield "address", lambda host: "this machine" if host.is_local else host.reached
    answers = {True: "here", False: "without a password"}
    yield "answers", lambda host: answers[host.is_local] if host.facts else "no"
    for package in dict.fromkeys(package for host in hosts for package in host.versions):
        yield package, partial(_version, package)
    yield "system", lambda host: str(host.facts["system"]) if host.facts else None
    yield "connects to", _connects


def _version(package: str, host: ProbedHost) -> str | None:
    return (host.versions.get(package) or "none") if host.facts else None


def _connects(host: ProbedHost) -> str | None:
    found = [other for other, error in host.errors.items() if error is None]
    return " ".join(found) or ("none" if host.errors else None)


def report_content(report: SshReport) -> dict[str, Any]:
    """Return the findings of ``doctor --ssh``, for JSON."""
    return {
        "shardmlx": shardmlx.__version__,
        "python": report.python,
        "mpirun": report.mpirun and str(report.mpirun),
        "hosts": [
            {
                "name": host.name,
                "login": host.login,
                "address": host.reached,
                "answers": host.facts is not None,
                "versions": host.versions,
                "system": host.facts and host.facts["system"],
                "connection_errors": host.errors,
            }
            for host in report.hosts
        ],
        "warnings": [asdict(each) for each in report.findings],
    }
