"""Programs whose pipe loses its reader, or whose terminal is closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardmlx.common.hang_up import write_all

ENDLESS = """
import sys
from shardmlx.common.hang_up import outlive_readers
outlive_readers()
for number in range(20_000):  # more than a pipe holds
    print("line", number, flush=True)
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("nohup", "status", "said"),
    [
        ("", -signal.SIGHUP, ["shardmlx: nobody reads the output any more"]),
        ("trap '' HUP;", 0, ["shardmlx: nobody reads the output any more: goes on", "went on"]),
    ],
)
def test_a_program_whose_reader_has_gone_hangs_up_once(
    nohup: str, status: int, said: list[str]
) -> None:
    command = ["sh", "-c", f'{nohup} exec "$0" -c "$1"', sys.executable, ENDLESS]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    assert (process.returncode, lines) == (status, said)


def test_what_is_written_to_a_closed_terminal_is_nothing() -> None:
    ours, its = pty.openpty()
    os.close(ours)
    write_all(its, b"nobody is there\n")
    os.close(its)


def test_a_full_disk_is_an_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        write_all(file.fileno(), b"text")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_command_that_is_stopped_ends_what_it_has_started(
    number: signal.Signals, status: int
) -> None:
    program = (
        "import sys, time\n"
        "from shardmlx.common.cli import run_command\n"
        "def main():\n"
        "    try:\n"
        "        print('up', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('down', flush=True)\n"
        "sys.exit(run_command(main))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.stdout.read() == "down\n"
    assert process.returncode == status
