"""Asks hosts, listed or found, through ssh whether they can run a job. No MLX, no MPI."""

from __future__ import annotations

import contextlib
import datetime
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from shardmlx.common.cli import run_command
from shardmlx.common.environment import launched_rank
from shardmlx.common.formatting import plural
from shardmlx.common.http_listener import source_address
from shardmlx.common.json_output import JsonOutput
from shardmlx.config.doctor import LINE
from shardmlx.errors import UserError
from shardmlx.hosts import probe_script
from shardmlx.hosts.doctor_find import fastest_links, find_others
from shardmlx.hosts.doctor_hostfile import found_hostfile
from shardmlx.hosts.doctor_report import UNKNOWN, host_table, progress, size, warnings, write
from shardmlx.hosts.findings import (
    Finding,
    connection_remedy,
    foreign_mpirun,
    many_libraries,
    shared_network,
    version_skew,
)
from shardmlx.hosts.host_facts import HostFacts, Interface, facts_from
from shardmlx.hosts.host_faults import Answer, own_interfaces, problems, together, why_not
from shardmlx.hosts.mpirun import is_of_wheel, mpirun_path
from shardmlx.hosts.reachability import Probe, at_once, check_hosts, local_hosts, probing
from shardmlx.hosts.remote_login import Login, RemoteLogin
from shardmlx.planning.facts.hostfile import read_hostfile

SECONDS_TO_RESOLVE = 5.0
SECONDS_FOR_CONNECTIONS = probe_script.SECONDS_TO_CONNECT + 5.0
SECONDS_FOR_FACTS = 15.0  # some tools of the system, each of which may hang


@dataclass(slots=True)
class ProbedHost:
    """A host and its known facts so far. ``login`` is how the hostfile writes it, ``announced`` its
    address according to the network; ``python`` is that of its ranks, if the hostfile names one."""

    name: str
    login: str
    is_local: bool
    port: int | None = None
    announced: str | None = None
    python: str | None = None
    address: str | None = None
    answer: Answer | Finding | None = None
    machine: HostFacts | None = None
    link: Interface | None = None
    """Interface in the fastest network that all hosts share, if they were found."""
    able: bool = False
    """True if ranks can run there, together with those of this machine."""
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
    def ssh_login(self) -> Login | None:
        return None if self.is_local else Login(self.login, self.port)

    @property
    def own_addresses(self) -> list[str]:
        """The IPv4 addresses of its interfaces, as far as it has told them."""
        return [str(each.ip) for each in own_interfaces(self.facts)] if self.facts else []

    @property
    def ssh_connection(self) -> list[str]:
        """Client address and port, server address and port, according to sshd; or nothing."""
        words = str((self.facts or {}).get("ssh", "")).split()
        return words if len(words) == 4 else []


def run(words: Sequence[str]) -> int | None:
    """Ask the hosts with ssh; return the exit status, or None if ranks are to look."""
    if not {"--ssh", "--find"} & set(words):
        return None
    return run_command(lambda: _run(words)) if launched_rank() == 0 else 0  # one asks for all


def _run(words: Sequence[str]) -> int:
    options = LINE.load(words)
    written = {"--write-hostfile": options.write_hostfile}
    output = JsonOutput(options.json, LINE.command, written)
    hosts = _search(options.write_hostfile) if options.find else listed_hosts(str(options.hostfile))
    progress(f"asking {plural(len(hosts), 'host')} with {options.ssh_command or 'ssh'}")
    mpirun, findings = _own_mpirun(options.python)
    pythons = {host.name: host.python for host in hosts if host.python is not None}
    remote = RemoteLogin.of(options.ssh_command, options.python, mpirun, pythons=pythons)
    asked, faults = probe_hosts(hosts, remote, found=options.find)
    findings += faults
    with output:
        print(report_text(asked, findings, mpirun, remote), flush=True)
        found = {"mpirun": mpirun, "python": options.python}
        output.write(found | as_json(asked, findings))
        if options.write_hostfile is not None:
            write(options.write_hostfile, _hostfile(asked))
    return 1 if options.strict and findings else 0


def as_json(hosts: Sequence[ProbedHost], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return all that hosts have told; unknown values are None."""
    return {
        "hosts": [
            {
                "name": host.name,
                "login": host.login,
                "python": host.python,
                "port": host.port,
                "is_local": host.is_local,
                "address": host.reached,
                "answers": host.facts is not None,
                "versions": host.versions,
                "facts": host.machine,
                "over": host.link,
                "connection_errors": host.errors,
            }
            for host in hosts
        ],
        "warnings": findings,
    }


def _own_mpirun(python: str) -> tuple[Path, list[Finding]]:
    """Return the mpirun of this machine, or where it would be, and what is wrong with it."""
    try:
        mpirun = mpirun_path()
    except UserError as error:
        missing = Finding(None, error.problem, error.remedy)
        return Path(python).with_name("mpirun"), [missing]
    return mpirun, [] if is_of_wheel(mpirun) else [foreign_mpirun(None, sys.executable)]


def listed_hosts(hostfile: str) -> list[ProbedHost]:
    """Return the hosts of a hostfile, not yet asked."""
    machines = read_hostfile(hostfile)
    own = local_hosts([each.host for each in machines])
    return [
        ProbedHost(each.host, each.login, each.host in own, each.port, python=each.python)
        for each in machines
    ]


def _search(target: str | None) -> list[ProbedHost]:
    """Return the hosts on the network; ``UserError`` if the hostfile to be written is there."""
    if target is not None and Path(target).exists():
        raise UserError(f"--write-hostfile {target} exists", "remove it, or give another name")
    return [
        ProbedHost(name, name, is_local=False, announced=address)
        for name, address in find_others(progress).items()
    ]


def _hostfile(hosts: Sequence[ProbedHost]) -> str:
    """Return a hostfile of those that can run ranks; ``UserError`` if only this machine can."""
    able = [host for host in hosts if host.able]
    if all(host.is_local for host in able):
        raise UserError("no other machine can run ranks", "see the warnings, then try again")
    remarks = {host.login: " over ".join(filter(None, (host.name, _over(host)))) for host in able}
    machines = {host.login: host.machine for host in able}
    return found_hostfile(machines, remarks, datetime.date.today().isoformat())


def probe_hosts(
    hosts: Sequence[ProbedHost], remote: RemoteLogin, *, found: bool = False
) -> tuple[Sequence[ProbedHost], list[Finding]]:
    """Ask hosts, and this machine, which comes first if it is none of them; return them and their
    faults. Hosts that were ``found`` are joined by ``join_hosts``."""
    if not any(host.is_local for host in hosts):
        # mpirun starts here, and its daemons connect back.
        name = socket.gethostname()
        hosts = [ProbedHost(name, name, is_local=True), *hosts]
    look_up = {host.name: partial(_look_up, host.name) for host in hosts}
    addresses = at_once(look_up, SECONDS_TO_RESOLVE)
    for host in hosts:
        host.address = addresses.get(host.name)
        if host.address is None and host.announced is not None:
            host.address = host.login = host.announced
    logins = {host.name: host.ssh_login for host in hosts}
    before = {host.name: host.login for host in hosts}
    with probing(logins, remote) as (probes, answers):
        for host in hosts:
            host.answer = answers[host.name]
            fault = why_not(host.name, host.answer, remote.to(host.name))
            host.able = host.is_local or fault is None
        answered = [host for host in hosts if host.facts is not None]
        heard = _heard({host.name: None for host in answered}, probes, SECONDS_FOR_FACTS)
        for host in answered:
            if answer := heard.get(host.name):
                host.machine = facts_from(answer["machine"])
        if found:
            join_hosts([host for host in answered if host.able])
        _connect(answered, probes)
    # ssh may know their keys by name alone.
    moved = {host.login: Login(host.login) for host in hosts if host.login != before[host.name]}
    refused = check_hosts(moved, remote).findings.values() if moved else ()
    return hosts, [*find(hosts, remote), *refused]


def _look_up(name: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeError):
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    return None


def _heard(
    requests: Mapping[str, object], probes: Mapping[str, Probe], seconds: float
) -> dict[str, dict[str, Any] | None]:
    """Send hosts their requests; return their answers, as far as they come in time."""
    for name, request in requests.items():
        probes[name].send(request)
    return at_once({name: probes[name].receive for name in requests}, seconds)


def join_hosts(hosts: Sequence[ProbedHost]) -> None:
    """Give hosts their links in the fastest network that all share. If one has another network, or
    a name that is unknown here, all go by their addresses on that one: launch keeps to it."""
    interfaces = [host.machine.interfaces if host.machine else () for host in hosts]
    networks = {each.network for own in interfaces for each in own if not each.is_loopback}
    by_address = len(networks) > 1 or any(host.login != host.name for host in hosts)
    for host, link in zip(hosts, fastest_links(interfaces), strict=False):  # they may share none
        host.link = link
        if by_address:
            host.login = host.address = link.address


def _connect(hosts: Sequence[ProbedHost], probes: Mapping[str, Probe]) -> None:
    """Let every host connect to every other, as ranks and mpirun's daemons will."""
    targets = {
        host.name: {
            other.name: [(address, (other.facts or {})["port"]) for address in addresses]
            for other in hosts
            if other is not host and (addresses := addresses_of(other, host))
        }
        for host in hosts
    }
    requests = {name: list(chain(*each.values())) for name, each in targets.items()}
    heard = _heard(requests, probes, SECONDS_FOR_CONNECTIONS)
    for host in hosts:
        if answer := heard.get(host.name):
            errors = iter(answer["errors"])
            for name, tried in targets[host.name].items():
                of_each = list(islice(errors, len(tried)))
                host.errors[name] = None if None in of_each else of_each[0]


def addresses_of(host: ProbedHost, seen_by: ProbedHost) -> list[str]:
    """Return the IPv4 addresses at which ``seen_by`` may find a host: the one by which they know
    each other, or all that the host has, if that is of something between them, as of a ProxyJump.
    """
    if host.link is not None and seen_by.link is not None:
        return [host.link.address]
    found = host.reached
    if host.is_local:
        source = seen_by.address and source_address(seen_by.address)
        found = next(iter(seen_by.ssh_connection), source)
    if found and ":" in found:
        found = None  # Open MPI uses IPv4
    own = [each for each in host.own_addresses if each not in seen_by.own_addresses]
    if found is None or found in own or not own:
        return [found] if found else []
    return own


def find(hosts: Sequence[ProbedHost], remote: RemoteLogin) -> Iterator[Finding]:
    """Yield the faults of hosts that were asked."""
    for host in hosts:
        if host.answer is not None:
            its = remote.to(host.name)
            yield from problems(host.name, host.answer, its)
            libraries = [] if host.facts is None else host.facts["mlx_libraries"]
            if len(libraries) > 1:
                yield many_libraries(host.name, libraries, its.python)
    yield from version_skew({host.name: host.versions for host in hosts if host.facts})
    for host in hosts:
        for other, error in host.errors.items():
            if error is not None:
                problem = f"cannot connect to {other} ({error})"
                yield Finding(host.name, problem, connection_remedy([error], other))
    checked = together(
        {host.name: host.facts for host in hosts if host.facts is not None},
        {host.name: host.ssh_login for host in hosts},
    )
    yield from checked.notes
    yield from checked.findings.values()
    for network, names in checked.shared_networks.items():
        yield shared_network(network, names)


def report_text(
    hosts: Sequence[ProbedHost], findings: Sequence[Finding], mpirun: Path, remote: RemoteLogin
) -> str:
    """Return a table of the hosts, and a line for each finding."""
    # On a network there may be many that are not the user's.
    shown = [host for host in hosts if host.announced is None or host.facts is not None]
    table = host_table([host.name for host in shown], shown, _cells(shown))
    pythons = {host.name: remote.to(host.name).python for host in shown}
    if len(set(pythons.values())) > 1:
        each = ", ".join(f"{python} on {host}" for host, python in pythons.items())
        said = f"launch lets {mpirun.name} start ranks with the Python of each host: {each}"
    else:
        said = f"{mpirun} starts ranks with the same Python on all hosts: {remote.python}"
    return "\n\n".join([table, said, warnings(findings)])


def _cells(hosts: Sequence[ProbedHost]) -> Iterator[tuple[str, Callable[[ProbedHost], str | None]]]:
    yield "address", lambda host: "this machine" if host.is_local else host.reached
    answers = {True: "here", False: "without a password"}
    yield "answers", lambda host: answers[host.is_local] if host.facts else "no"
    for package in dict.fromkeys(package for host in hosts for package in host.versions):
        yield package, partial(_version, package)
    yield "system", lambda host: str(host.facts["system"]) if host.facts else None
    yield "chip", lambda host: host.machine.chip if host.machine else None
    yield "memory", lambda host: size(host.machine.memory) if host.machine else None
    if any(host.link for host in hosts):
        yield "over", _over
    yield "connects to", _connects


def _version(package: str, host: ProbedHost) -> str | None:
    return (host.versions.get(package) or "none") if host.facts else None


def _over(host: ProbedHost) -> str | None:
    return f"{host.link.name} ({host.link.medium or UNKNOWN})" if host.link else None


def _connects(host: ProbedHost) -> str | None:
    found = [other for other, error in host.errors.items() if error is None]
    return " ".join(found) or ("none" if host.errors else None)
