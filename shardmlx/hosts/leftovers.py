"""Ends what an mpirun may leave behind: its daemons on other hosts, and the logins to them.

A daemon that cannot connect to its mpirun never learns that it has ended. This text is sent to
other hosts as well, and run there without shardmlx: the first line of stdin is the name.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SECONDS_TO_END = 1.0  # after a SIGTERM, before a SIGKILL
SECONDS_FOR_A_HOST = 15.0  # a login, a start of Python, and the end of the processes


def name_of(pid: int, node: str) -> str:
    """Return the parts of the name that an mpirun gives itself, which stands in the command lines
    of its daemons and logins: prterun-NODE-PID@0. NODE may have a domain, or none."""
    return f"prterun-{node.partition('.')[0]} -{pid}@"


def end_here(name: str) -> int:
    """End the processes of this host with that name, as ``name_of`` returns it, in their command
    lines; return how many."""
    import psutil

    parts = name.split()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(all(part in word for part in parts) for word in process.cmdline()):
                process.terminate()
                found.append(process)
    _, left = psutil.wait_procs(found, SECONDS_TO_END)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return len(found)


def end_there(name: str, command: Sequence[str]) -> None:
    """End such processes on another host, as far as it answers: ``command`` starts a Python there
    that runs the program in the first line of its stdin."""
    text = json.dumps(Path(__file__).read_text(encoding="utf-8"))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            command,
            # Not in the command line, by which the login would end itself.
            input=f"{text}\n{name}\n",
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS_FOR_A_HOST,
            start_new_session=True,
            check=False,
        )


if __name__ == "__main__":
    end_here(sys.stdin.readline().strip())
