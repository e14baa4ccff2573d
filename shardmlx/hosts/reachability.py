"""Asks hosts at once, through ssh, whether they can run ranks. No MLX, no MPI.

On other machines it needs only a login without a password, and a Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from shardmlx.hosts import login_faults, probe_script
from shardmlx.hosts.findings import Finding, version_skew
from shardmlx.hosts.host_faults import (
    Answer,
    HostCheck,
    fault_outside,
    missing_file,
    together,
    why_not,
)
from shardmlx.hosts.remote_login import Login, RemoteLogin
from shardmlx.planning.facts.hostfile import same_host

SECONDS_TO_CLOSE = 1.0
SECONDS_TO_RESOLVE = 5.0

T = TypeVar("T")


class Probe:
    """A probe that was started with ``command``. Raises ``OSError`` if it cannot be run."""

    def __init__(self, command: Sequence[str]) -> None:
        self._reading = threading.Lock()
        self._said: list[str] = []
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # its children end with it
        )
        self._write("\n")  # for a login script that reads a line
        self.send(Path(probe_script.__file__).read_text(encoding="utf-8"))

    def send(self, value: object) -> None:
        """Send one line. A missing answer reveals a probe that has gone."""
        self._write(json.dumps(value) + "\n")

    def _write(self, text: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(text)
                self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer; None once there are no more."""
        with self._reading:
            for line in self._process.stdout or ():
                # Login scripts and ssh may say other things, perhaps without a line end.
                _, mark, answer = line.partition(probe_script.MARK)
                if mark:
                    with contextlib.suppress(ValueError):
                        return dict(json.JSONDecoder().raw_decode(answer)[0])
                self._said.append(line)
        return None

    def ended(self) -> tuple[int | None, str]:
        """Return the exit status, None if it still runs, and all that was said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_CLOSE)
        return self._process.poll(), "".join(self._said)

    def close(self) -> None:
        """End the probe, with all its children."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        # A process outside the group may hold the other end: then a thread reads for ever.
        if self._reading.acquire(timeout=SECONDS_TO_CLOSE):
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._reading.release()


def at_once(work: Mapping[str, Callable[[], T]], seconds: float) -> dict[str, T]:
    """Run each on a thread of its own; return the results, without those that take longer."""
    results: dict[str, T] = {}

    def run(name: str) -> None:
        results[name] = work[name]()

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(results)


def is_local(host: str) -> bool:
    """Return whether a name or address is this machine's. A name is, if one of its addresses is:
    DHCP may rename a Mac at any time, and a name may be an alias. Names alone are compared where
    the name has no address."""
    own = socket.gethostname()
    names = ("localhost", own.casefold(), own.partition(".")[0].casefold())
    if host.casefold() in names:
        return True
    found = at_once({host: partial(_addresses, host)}, SECONDS_TO_RESOLVE).get(host)
    if not found:
        return same_host(host, own)
    return any(_is_own(*each) for each in found)


def local_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return those of ``hosts`` that are this machine; all are looked up at once."""
    looks = {host: partial(is_local, host) for host in hosts}
    found = at_once(looks, 2 * SECONDS_TO_RESOLVE)
    return frozenset(host for host, is_own in found.items() if is_own)


def _addresses(host: str) -> list[tuple[int, Any]]:
    """Return the addresses of a host, each with its family."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
        return [(family, address) for family, _, _, _, address in found]
    return []


def _is_own(family: int, address: Any) -> bool:
    # Only a machine's own addresses can be bound.
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as test:
        test.bind(address)
        return True
    return False


def check_hosts(logins: Mapping[str, Login], remote: RemoteLogin) -> HostCheck:
    """Return what keeps hosts from running ranks, by host, and what mpirun must know of them. This
    machine is asked too, first where it is none of them: mpirun runs here."""
    own = local_hosts(logins)
    asked = {host: None if host in own else login for host, login in logins.items()}
    here = socket.gethostname()
    is_outside = None not in asked.values()
    if is_outside:
        asked = {here: None, **asked}
    findings: dict[str, Finding] = {}
    with probing(asked, remote) as (_, answers):
        for host, answer in answers.items():
            if is_outside and host == here:  # it runs no rank
                found = fault_outside(host, answer, remote.to(host))
            else:
                found = why_not(host, answer, remote.to(host))
            if found is not None:
                findings[host] = found
    known = {host: each for host, each in answers.items() if not isinstance(each, Finding)}
    checked = together(known, asked)
    first = next(iter(logins))
    if first in known and (found := missing_file(first, known[first], remote)):
        findings.setdefault(first, found)
    launchers = {host: {"openmpi": each["versions"].get("openmpi")} for host, each in known.items()}
    return replace(
        checked,
        findings={**checked.findings, **findings},
        notes=(*checked.notes, *version_skew(launchers)),
    )


@contextlib.contextmanager
def probing(
    logins: Mapping[str, Login | None], remote: RemoteLogin
) -> Iterator[tuple[dict[str, Probe], dict[str, Answer | Finding]]]:
    """Ask all hosts at once; yield the probes, which end with the block, and the answers."""
    probes: dict[str, Probe] = {}
    answers: dict[str, Answer | Finding] = {}
    with contextlib.ExitStack() as stack:
        for host, login in logins.items():
            try:
                probes[host] = Probe(remote.to(host).command(login))
            except OSError as error:
                what, flag = (
                    (remote.agent[0], "ssh-command")
                    if login
                    else (remote.to(host).python, "python")
                )
                problem = f"cannot run {what} ({error.strerror})"
                answers[host] = Finding(host, problem, f"see --{flag}")
            else:
                stack.callback(probes[host].close)
        receive = {host: probe.receive for host, probe in probes.items()}
        heard = at_once(receive, login_faults.SECONDS_TO_ANSWER)
        silent = {host: logins[host] for host in probes if not heard.get(host)}
        answers |= {host: answer for host, answer in heard.items() if answer is not None}
        answers |= _why_silent(silent, probes, heard, remote)
        yield probes, {host: answers[host] for host in logins}


def _why_silent(
    logins: Mapping[str, Login | None],
    probes: Mapping[str, Probe],
    heard: Collection[str],
    remote: RemoteLogin,
) -> dict[str, Finding]:
    """Return why hosts have not answered; those that were ``heard`` have come to an end."""
    ends = {host: probes[host].ended() if host in heard else (None, "") for host in logins}
    trials = at_once(
        {
            host: partial(login_faults.try_login, login, remote.to(host))
            for host, login in logins.items()
            if login is not None and remote.is_ssh and login_faults.asks_for_a_trial(*ends[host])
        },
        login_faults.SECONDS_FOR_TRIALS + SECONDS_TO_CLOSE,
    )
    found = {}
    for host, (status, said) in ends.items():
        login = logins[host] or Login(host)
        trial = trials.get(host)
        its = remote.to(host)
        if host in heard:
            ended = status if status is not None else 0
            found[host] = login_faults.login_problem(host, ended, said, login, its, trial)
        else:
            found[host] = login_faults.silence(host, login, its, trial)
    return found
