"""Several hosts on this machine, each a set of Linux namespaces: mpirun crosses real TCP links
between them, which may be slow, and which a test can cut.

Each host has its own name, address, home, temporary directory and process that holds its
namespaces. Of the disk it sees all of this machine but ``/tmp``, and writes only to its own
``/tmp``: so Python and this repository are everywhere, and what a host writes is nowhere else,
but for what compilers leave.
Nothing has a name outside: a killed run takes its hosts with it, and two labs may be up at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import SkipTest

from testbed.cgroups import MemoryCgroup
from testbed.jobs import ROOT

NETWORK = "10.77.0"
TMP = Path("/tmp")
HOME = TMP / "home"
"""The home directory of each host, as that host sees it."""

_HOST = Path(__file__).with_name("host.sh")
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NOT_THERE = (
    *("XDG_CACHE_HOME", "HF_HOME", "PRTE_MCA_prte_tmpdir_base"),
    "PRTE_MCA_rmaps_default_mapping_policy",
)
"""Variables that would lead out of a host's own directories, or put all ranks on one host."""

_AGENT = """#!/bin/sh
# In the place of ssh: HOST COMMAND...
host=$1
shift
case $host in
{cases}
*) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
"""
_CASE = """\
{host} | {host}.local | {address})
    if ! kill -0 {pid} 2>/dev/null; then
        echo "ssh: connect to host $host port 22: No route to host" >&2
        exit 255
    fi
    {enter} sh -c "$*"
    status=$?
    # As ssh, which does not notice for long that a host is gone or its link is cut.
    while [ -z "$({enter} ip -oneline link show dev eth0 up 2>/dev/null)" ] && kill -0 $PPID; do
        sleep 0.2
    done
    exit $status ;;
"""


def missing() -> str | None:
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        packages = " ".join(sorted({_TOOLS[tool] for tool in absent}))
        return f"needs {' and '.join(absent)}: apt-get install {packages}"
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        return "this machine allows no network namespaces"
    return None


def require() -> None:
    if lacks := missing():
        raise SkipTest(lacks)


class Lab:
    """Hosts ``mac1``, ``mac2``, ... that are up, on one network. Commands are those of ``mac1``."""

    def __init__(
        self,
        directory: Path,
        holders: dict[str, subprocess.Popen[str]],
        slots: int,
        cgroups: Mapping[str, MemoryCgroup],
    ) -> None:
        self._directory = directory
        self._holders = holders
        self._cgroups = cgroups
        self.hosts = tuple(holders)
        self.agent = TMP / "agent"
        """A program that takes the place of ssh."""
        self.hostfile = TMP / "hosts"
        """The hostfile, on the first host."""
        machines = "".join(f"{host} slots={slots}\n" for host in holders)
        (directory / self.hosts[0] / self.hostfile.name).write_text(machines)
        cases = "".join(map(self._case, holders))
        for host in holders:
            agent = directory / host / self.agent.name  # mpirun's daemons look for it too
            agent.write_text(_AGENT.format(cases=cases))
            agent.chmod(0o755)
        network = f"{NETWORK}.0/24"
        self.mpirun_options = (
            *("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
            *("--prtemca", "prte_if_include", network),
            *("--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", network),
        )

    def home(self, host: str) -> Path:
        """Return, as seen from outside, the directory that is ``HOME`` on a host."""
        return self._directory / host / "home"

    def address(self, host: str) -> str:
        return f"{NETWORK}.{1 + self.hosts.index(host)}"

    def command(self, host: str, *command: str | Path) -> list[str]:
        return [*self._enter(host), *map(str, command)]

    def mpirun(self, n: int, *args: str | Path) -> list[str]:
        """``mpirun -n N python ARGS`` as it is called on the first host."""
        return self.command(
            self.hosts[0],
            Path(sys.executable).with_name("mpirun"),
            *("-n", str(n), "--hostfile", self.hostfile),
            *("--prtemca", "plm_ssh_agent", self.agent),
            *self.mpirun_options,
            sys.executable,
            *args,
        )

    def write_everywhere(self, name: str, content: object) -> None:
        """Write a JSON file into the home of each host."""
        for host in self.hosts:
            (self.home(host) / name).write_text(json.dumps(content))

    def replace(self, host: str, path: Path, text: str) -> None:
        name = "-".join(path.parts[1:])
        (self._directory / host / name).write_text(text)
        _in(self._holders[host], "--mount", "mount", "--bind", str(TMP / name), str(path))

    def cut(self, host: str | None = None) -> None:
        """Take the link of a host away, by default of the last: nothing more comes, and nobody is
        told."""
        _in(self._holders[host or self.hosts[-1]], "--net", "ip", "link", "set", "eth0", "down")

    def power_off(self, host: str) -> None:
        """End a host: as with ``cut``, nobody is told."""
        self.cut(host)
        holder = self._holders[host]
        inside = list(_inside(holder.pid))
        holder.kill()
        holder.wait()
        for pid in inside:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _enter(self, host: str) -> list[str]:
        enter = [
            *("nsenter", "--target", str(self._holders[host].pid), "--net", "--uts", "--mount"),
            *("env", *(f"--unset={name}" for name in _NOT_THERE)),
            *(f"--chdir={HOME}", f"HOME={HOME}", f"TMPDIR={TMP}"),
        ]
        return self._cgroups[host].command(*enter) if host in self._cgroups else enter

    def _case(self, host: str) -> str:
        enter = shlex.join(self._enter(host))
        pid, address = self._holders[host].pid, self.address(host)
        return _CASE.format(host=host, address=address, pid=pid, enter=enter)


@contextmanager
def hosts(
    directory: Path,
    count: int,
    *,
    slots: int = 1,
    rate: str | None = None,
    line: Sequence[str | Path] = (),
    cgroups: Mapping[str, MemoryCgroup] | None = None,
) -> Iterator[Lab]:
    """Yield a lab of ``count`` hosts on one switch, running; skip the test where there can be none.

    ``rate`` limits each host's link in both directions, in ``tc``'s words: ``20mbit``. ``line`` is
    a command that takes the switch's place: it gets the name of each host's port. A host that has
    one of the ``cgroups`` runs everything in it.
    """
    require()
    names = [f"mac{number}" for number in range(1, count + 1)]
    lines = [f"{NETWORK}.{number} {name}\n" for number, name in enumerate(names, start=1)]
    (directory / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
    kernels = Path(tempfile.gettempdir(), "mlx")
    kernels.mkdir(exist_ok=True)
    bytecode = sys.pycache_prefix or ""
    with ExitStack() as stack:
        switch = stack.enter_context(_holding("--net", "sh", "-c", "echo up; exec cat"))
        _in(switch, "--net", "ip", "link", "add", "switch", "type", "bridge")
        _in(switch, "--net", "ip", "link", "set", "switch", "up")
        holders = {}
        for number, name in enumerate(names, start=1):
            (directory / name).mkdir()
            holders[name] = stack.enter_context(
                _holding(
                    *("--net", "--uts", "--mount", "sh", _HOST),
                    *(name, directory, kernels, bytecode),
                    *seen_by_all(),
                )
            )
            _connect(holders[name], switch, number, rate)
        if line:
            ports = [f"port{number}" for number in range(1, count + 1)]
            for port in ports:
                _in(switch, "--net", "ip", "link", "set", port, "nomaster")
            enter = ("nsenter", "--target", str(switch.pid), "--net")
            stack.enter_context(_started(*enter, *line, *ports))
        lab = Lab(directory, holders, slots, cgroups or {})
        yield lab


def two_hosts(directory: Path) -> contextlib.AbstractContextManager[Lab]:
    return hosts(directory, 2)


def seen_by_all() -> list[Path]:
    """Return what lies in this machine's ``/tmp`` that the ranks cannot do without."""
    needed = {Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix)}
    inside = [path for path in needed if path.is_relative_to(TMP)]
    return [path for path in inside if not any(other in path.parents for other in inside)]


def _holding(*command: str | Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start a process with new namespaces, which end with it, and wait until it says ``up``."""
    return _started("unshare", *command)


@contextmanager
def _started(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process, and wait until it says ``up``. It ends when its stdin is closed: also if
    this process is killed."""
    with subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n", f"{command} failed"
        yield process


def _connect(
    host: subprocess.Popen[str], switch: subprocess.Popen[str], number: int, rate: str | None
) -> None:
    port = f"port{number}"
    _run(
        *("ip", "link", "add", port, "netns", str(switch.pid), "type", "veth"),
        *("peer", "name", "eth0", "netns", str(host.pid)),
    )
    _in(host, "--net", "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
    _in(switch, "--net", "ip", "link", "set", port, "master", "switch", "up")
    _in(host, "--net", "ip", "link", "set", "eth0", "up")
    if rate is None:
        return
    # A burst holds the packets that TCP leaves to the card to divide: else the kernel divides them,
    # which takes a core at 1 Gbit/s.
    burst = "256kb" if rate.endswith("gbit") else "32kb"
    for holder, device in ((host, "eth0"), (switch, port)):
        limit = ("rate", rate, "burst", burst, "latency", "50ms")
        try:
            _in(holder, "--net", "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        except RuntimeError as error:
            raise SkipTest(f"this machine limits no link: {error}") from None


def _inside(pid: int) -> Iterator[int]:
    namespace = os.readlink(f"/proc/{pid}/ns/net")
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(directory / "ns" / "net") == namespace:
                    yield int(directory.name)


def _in(holder: subprocess.Popen[str], *command: str) -> None:
    """Run ``--net COMMAND`` or ``--mount COMMAND`` in such a namespace of a host."""
    _run("nsenter", "--target", str(holder.pid), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
