"""Asks the hosts of a hostfile whether they can run a job, before mpirun does: ``doctor --ssh``.

Every host is asked at once, through ssh, with ``probe_script``. It needs neither MLX nor MPI.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shardmlx.costmodel.hostfile import read_hostfile
from shardmlx.errors import UserError
from shardmlx.hosts import probe_script
from shardmlx.hosts.findings import Finding, connection_remedy, version_skew
from shardmlx.hosts.mpirun import find_mpirun
from shardmlx.hosts.probe_client import Talk, at_once, probe_command
from shardmlx.hosts.reachability import (
    SECONDS_TO_ANSWER,
    RemoteLogin,
    addresses_of,
    is_local,
    login_problem,
    no_daemon,
    silence,
)

SECONDS_TO_RESOLVE = 5.0
SECONDS_FOR_CONNECTIONS = probe_script.SECONDS_TO_CONNECT + 5.0

OLDEST_PYTHON = (3, 11)


@dataclass(slots=True)
class Asked:
    """A host and its known facts so far. ``login`` is how the hostfile writes it."""

    name: str
    login: str
    is_local: bool
    address: str | None = None
    said: Mapping[str, Any] | None = None
    complaint: Finding | None = None
    errors: dict[str, str | None] = field(default_factory=dict)
    """Reasons why it cannot connect to each host that it tried; None where it can."""

    @property
    def versions(self) -> dict[str, str | None]:
        return dict(self.said["versions"]) if self.said else {}

    @property
    def reached(self) -> str | None:
        """The address at which it was reached: by its name, or according to sshd."""
        return self.address or next(iter(self.ssh_connection[2:]), None)

    @property
    def ssh_connection(self) -> list[str]:
        """Client address and port, server address and port, according to sshd; or nothing."""
        words = str((self.said or {}).get("ssh", "")).split()
        return words if len(words) == 4 else []


@dataclass(frozen=True, slots=True)
class Visit:
    """The hosts of a hostfile, asked for one interpreter's path, and their faults."""

    python: str
    hosts: tuple[Asked, ...]
    findings: tuple[Finding, ...]


def visit(hostfile: str, agent: str | None, python: str) -> Visit:
    """Ask all hosts of the hostfile, and this machine if it is none of them.

    ``agent`` replaces ssh.
    """
    hosts = _hosts_of(hostfile)
    findings = []
    try:
        daemon = str(find_mpirun().with_name("prted"))
    except UserError as error:
        findings.append(Finding(None, error.problem, error.remedy))
        daemon = str(Path(python).with_name("prted"))
    remote = RemoteLogin(tuple(shlex.split(agent or "ssh")), python, daemon)
    found = at_once({host.name: partial(_look_up, host.name) for host in hosts}, SECONDS_TO_RESOLVE)
    for host in hosts:
        host.address = found.get(host.name)
    _ask(hosts, remote)
    return Visit(python, tuple(hosts), (*findings, *find(hosts, remote)))


def _hosts_of(hostfile: str) -> list[Asked]:
    machines = read_hostfile(hostfile)
    logins = addresses_of(Path(hostfile).read_text("utf-8")).values()
    hosts = [
        Asked(machine.host, login, is_local(machine.host))
        for machine, login in zip(machines, logins, strict=True)
    ]
    if not any(host.is_local for host in hosts):
        # mpirun starts here, and its daemons connect back.
        name = socket.gethostname()
        hosts.insert(0, Asked(name, name, is_local=True))
    return hosts


def _look_up(name: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    return None


def _ask(hosts: Sequence[Asked], remote: RemoteLogin) -> None:
    with contextlib.ExitStack() as stack:
        talks: dict[str, Talk] = {}
        for host in hosts:
            try:
                talk = Talk(probe_command(remote, None if host.is_local else host.login))
            except OSError as error:
                host.complaint = _cannot_start(host, remote, error)
            else:
                stack.callback(talk.close)
                talks[host.name] = talk
        heard = at_once({name: talk.hear for name, talk in talks.items()}, SECONDS_TO_ANSWER)
        for host in hosts:
            host.said = heard.get(host.name)
            if host.name in talks and host.said is None:
                host.complaint = _silent(host, talks[host.name], host.name in heard, remote)
        _connect([host for host in hosts if host.said is not None], talks)


def _cannot_start(host: Asked, remote: RemoteLogin, error: OSError) -> Finding:
    what, flag = (remote.python, "--python") if host.is_local else (remote.agent[0], "--agent")
    return Finding(host.name, f"cannot run {what} ({error.strerror})", f"see {flag}")


def _silent(host: Asked, talk: Talk, ended: bool, remote: RemoteLogin) -> Finding:
    if not ended:
        return silence(host.name, SECONDS_TO_ANSWER, host.login, remote)
    return login_problem(host.name, *talk.ended(), host.login, remote)


def _connect(hosts: Sequence[Asked], talks: Mapping[str, Talk]) -> None:
    """Let every host connect to every other, as ranks and mpirun's daemons will."""
    tried: dict[str, list[str]] = {}
    for host in hosts:
        targets = {
            other.name: (address, (other.said or {})["port"])
            for other in hosts
            if other is not host and (address := address_of(other, host)) is not None
        }
        tried[host.name] = list(targets)
        talks[host.name].say(list(targets.values()))
    hear = {host.name: talks[host.name].hear for host in hosts}
    heard = at_once(hear, SECONDS_FOR_CONNECTIONS)
    for host in hosts:
        answer = heard.get(host.name)
        if answer is not None:
            host.errors = dict(zip(tried[host.name], answer["errors"], strict=True))


def address_of(host: Asked, seen_by: Asked) -> str | None:
    """Return the IPv4 address at which ``seen_by`` finds a host; None if it is unknown."""
    if host.is_local:
        came = seen_by.ssh_connection[:1]
        found = came[0] if came else seen_by.address and _source_address(seen_by.address)
    else:
        found = host.reached
    return found if found and ":" not in found else None


def _source_address(target: str) -> str | None:
    """Return the address from which this machine reaches another. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as test:
        test.connect((target, 9))
        return str(test.getsockname()[0])
    return None


def find(hosts: Sequence[Asked], remote: RemoteLogin) -> Iterator[Finding]:
    """Yield the faults of hosts that were asked."""
    for host in hosts:
        if host.complaint is not None:
            yield host.complaint
        if host.said is not None:
            yield from _lacks(host, host.said["daemon"] == [True], remote)
    yield from version_skew({host.name: host.versions for host in hosts if host.said})
    for host in hosts:
        for other, error in host.errors.items():
            if error is not None:
                problem = f"cannot connect to {other} ({error})"
                yield Finding(host.name, problem, connection_remedy([error], other))


def _lacks(host: Asked, has_daemon: bool, remote: RemoteLogin) -> Iterator[Finding]:
    version = host.versions["Python"] or ""
    if tuple(map(int, version.split(".")[:2])) < OLDEST_PYTHON:
        yield Finding(
            host.name,
            f"{remote.python} is Python {version}",
            f"install {'.'.join(map(str, OLDEST_PYTHON))} or newer at the same path on all hosts",
        )
        return
    missing = [name for name in probe_script.NEEDED if host.versions.get(name) is None]
    if missing:
        yield Finding(
            host.name,
            f"{remote.python} has no {', '.join(missing)}",
            f"copy the project there, and in its directory: {remote.python} -m pip install .",
        )
    if not has_daemon:
        yield no_daemon(host.name, remote)
