"""Several hosts on this machine, out of network namespaces: mpirun crosses a real TCP link between
them, which a test can cut. Each has its own name, address and temporary directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

NETWORK = "10.77.0"
PREFIX = "shxlab"
"""Of the namespaces and the links, so that what a killed run has left is found."""

_ENTER = Path(__file__).with_name("enter.py")

_AGENT = """#!/bin/sh
# In the place of ssh: HOST COMMAND...
host=$1
shift
exec "{python}" "{enter}" "$host" "{directory}/$host" sh -c "$*"
"""


def missing() -> str | None:
    """What this machine lacks, if anything."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    return f"needs {' and '.join(absent)}: apt-get install iproute2 util-linux" if absent else None


def require() -> None:
    """Skip the test where there can be no hosts."""
    lacks = missing()
    if lacks is None and _ip("netns", "add", f"{PREFIX}-try", check=False):
        lacks = "this machine allows no network namespaces"
    _ip("netns", "del", f"{PREFIX}-try", check=False)
    if lacks:
        pytest.skip(lacks)


class Lab:
    """Two hosts, ``mac1`` and ``mac2``, and the link between them."""

    hosts = ("mac1", "mac2")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.agent = directory / "agent"
        self.agent.write_text(
            _AGENT.format(
                python=sys.executable,
                enter=Path(__file__).with_name("enter.py"),
                directory=directory,
            )
        )
        self.agent.chmod(0o755)
        self.hostfile = directory / "hostfile"
        self.hostfile.write_text("".join(f"{host} slots=1\n" for host in self.hosts))

    def command(self, host: str, *command: str | Path) -> list[str]:
        """``command``, run on a host."""
        return [sys.executable, str(_ENTER), host, str(self.directory / host), *map(str, command)]

    def mpirun(self, n: int, *args: str | Path) -> list[str]:
        """``mpirun -n N python ARGS`` as it is called on the first host."""
        network = f"{NETWORK}.0/24"
        return self.command(
            self.hosts[0],
            Path(sys.executable).with_name("mpirun"),
            *("-n", str(n), "--hostfile", self.hostfile, "--map-by", "node:OVERSUBSCRIBE"),
            *("--bind-to", "none"),
            *("--prtemca", "plm_ssh_agent", self.agent, "--prtemca", "prte_if_include", network),
            *("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", network),
            sys.executable,
            *args,
        )

    def cut(self) -> None:
        """Take the link away: nothing more comes, and nobody is told."""
        _ip("-n", f"{PREFIX}-mac2", "link", "set", f"{PREFIX}2", "down")


@contextmanager
def two_hosts(directory: Path) -> Iterator[Lab]:
    """The lab, up and running."""
    with ExitStack() as stack:
        for host in Lab.hosts:
            _ip("netns", "del", f"{PREFIX}-{host}", check=False)
        for host in Lab.hosts:
            _ip("netns", "add", f"{PREFIX}-{host}")
            stack.callback(_ip, "netns", "del", f"{PREFIX}-{host}", check=False)
            (directory / host).mkdir()
        one, two = (f"{PREFIX}-{host}" for host in Lab.hosts)
        _ip("link", "add", f"{PREFIX}1", "netns", one, "type", "veth", "peer", "name",
            f"{PREFIX}2", "netns", two)  # fmt: skip
        for number, namespace in enumerate((one, two), start=1):
            _ip(
                "-n", namespace, "addr", "add", f"{NETWORK}.{number}/24", "dev", f"{PREFIX}{number}"
            )
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", f"{PREFIX}{number}", "up")
        yield Lab(directory)


def _ip(*arguments: str, check: bool = True) -> int:
    """Exit status of ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.returncode
