"""``shardmlx doctor --find``: hosts that announce ssh find each other, and launch reads what is
written."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shardmlx.hosts.doctor_find import SECONDS_TO_HEAR
from shardmlx.planning.facts.hostfile import read_hostfile
from testbed.hosts import Lab
from testbed.jobs import Job, patience
from tests.helpers import announcer
from tests.helpers.lab import doctor_with
from tests.helpers.mpirun import mpirun

NAMES = "127.0.0.1 localhost\n10.77.0.1 mac1 mac1.local\n10.77.0.2 mac2 mac2.local\n"
"""As Macs resolve them, by the same announcements."""

LONGEST = 15.0
"""Seconds to find, ask and connect, on a busy machine."""


@contextmanager
def announcing(lab: Lab, *hosts: str) -> Iterator[None]:
    """Let hosts announce ssh."""
    with ExitStack() as stack:
        for host in hosts:
            command = lab.command(host, sys.executable, announcer.__file__, host, lab.address(host))
            pipe = subprocess.PIPE
            process = stack.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        yield


def find(lab: Lab, host: str, *options: str) -> Job:
    seconds = max(SECONDS_TO_HEAR, patience(SECONDS_TO_HEAR / 2))
    words = ("--find", "--ssh-command", str(lab.agent), *options)
    doctor = doctor_with({"doctor_find.SECONDS_TO_HEAR": seconds}, *words)
    return mpirun(2, command=lab.command(host, *doctor))


def test_hosts_find_each_other_and_launch_reads_what_is_written(lab: Lab) -> None:
    """No host knows the name of the other, as on a Linux without Avahi's resolver."""
    hostfile = lab.home("mac1") / "found"
    with announcing(lab, *lab.hosts):
        began = time.monotonic()
        there = find(lab, "mac2")
        assert time.monotonic() - began < patience(LONGEST)
        here = find(lab, "mac1", "--write-hostfile", "found")
    for job, own, other in ((here, "mac1", "mac2.local"), (there, "mac2", "mac1.local")):
        assert job.returncode == 0, job.output
        assert job.stdout.splitlines()[0].split() == ["host", own, other]
        assert "nothing to warn of" in job.stdout
        assert "eth0 (virtual)" in job.stdout
    machines = read_hostfile(hostfile)
    assert [machine.host for machine in machines] == ["10.77.0.1", "10.77.0.2"]
    assert all(machine.slots == 1 and machine.memory for machine in machines)
    job = mpirun(
        2,
        command=lab.command(
            "mac1",
            *(sys.executable, "-m", "shardmlx.launch", "--hostfile", "found"),
            *("--ssh-command", lab.agent, "--mpirun-options", "--bind-to none"),
            *("doctor", "--seconds", "0.1"),
        ),
    )
    assert job.returncode == 0, job.output
    assert "btl_tcp_if_include 10.77.0.0/24" in job.stdout


def test_hosts_whose_names_are_known_and_that_share_one_network_keep_them(lab: Lab) -> None:
    """Who has announced nothing is listed too, if it is this machine."""
    for host in lab.hosts:
        lab.replace(host, Path("/etc/hosts"), NAMES)
    with announcing(lab, "mac2"):
        job = find(lab, "mac1", "--write-hostfile", "found")
    assert job.returncode == 0, job.output
    machines = read_hostfile(lab.home("mac1") / "found")
    assert [machine.login for machine in machines] == ["mac1", "mac2.local"]


def test_alone_a_host_says_in_one_line_what_to_switch_on(lab: Lab) -> None:
    lab.cut("mac1")
    with announcing(lab, "mac1"):
        job = find(lab, "mac1", "--write-hostfile", "found")
    assert job.returncode == 2
    (line,) = job.stderr.splitlines()[1:]
    assert "no other machine has announced ssh" in line
    assert "Remote Login" in line
    assert not (lab.home("mac1") / "found").exists()


def test_ctrl_c_ends_the_search_in_silence(lab: Lab) -> None:
    command = lab.command("mac1", sys.executable, "-m", "shardmlx.doctor", "--find")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "listening" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(patience(LONGEST)) == 130
        assert process.stderr.read() == ""
