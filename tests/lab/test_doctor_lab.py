"""``shardmlx.doctor`` between two hosts: the link has the bandwidth that it was given, and one that
is cut is found before mpirun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmlx.hostfile import read_hostfile
from tests.lab.hosts import PREFIX, Lab, require, two_hosts
from tests.mpi.mpirun import Job, mpirun

LIMIT = 100e6 / 8
"""Bytes a second."""

SLOWEST, FASTEST = 0.1 * LIMIT, 2 * LIMIT
"""Of what may be measured where other work shares the cores; without a limit it is far more."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    require()
    with two_hosts(tmp_path) as lab:
        yield lab


def limit(lab: Lab) -> None:
    """Both directions of the link."""
    for number, host in enumerate(lab.hosts, start=1):
        command = [
            *("tc", "-n", f"{PREFIX}-{host}", "qdisc", "add", "dev", f"{PREFIX}{number}", "root"),
            *("tbf", "rate", "100mbit", "burst", "32kb", "latency", "50ms"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this machine limits no link: {done.stderr.strip()}")


def with_ssh(lab: Lab) -> Job:
    return mpirun(
        2,
        command=lab.command(
            lab.hosts[0],
            *(sys.executable, "-m", "shardmlx.doctor", "--ssh", "--agent", lab.agent),
            *("--hostfile", lab.hostfile),
        ),
    )


def test_a_link_has_the_bandwidth_that_it_was_given(lab: Lab, tmp_path: Path) -> None:
    limit(lab)
    job = mpirun(
        2,
        command=lab.mpirun(
            2,
            *("-m", "shardmlx.doctor", "--hostfile", lab.hostfile, "--seconds", "0.5"),
            *("--json", tmp_path / "found.json", "--write-hostfile", tmp_path / "written"),
        ),
    )
    assert job.returncode == 0, job.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert [host["name"] for host in found["hosts"]] == ["mac1", "mac2"]
    (link,) = found["links"]
    for direction in ("there", "back"):
        assert SLOWEST < link["speed"][direction] < FASTEST
        (way,) = link[direction]
        assert way["problem"] is None
        assert way["medium"] == "virtual"
    assert link["there"][0]["address"] == "10.77.0.2"
    # Both hosts are this machine.
    assert abs(link["speed"]["clock_offset"]) <= link["speed"]["clock_error"] + 0.01
    assert "less than a 1 Gbit/s cable" in job.stdout

    first, second = read_hostfile(tmp_path / "written")
    assert (first.host, second.host) == ("mac1", "mac2")
    for machine in (first, second):
        assert machine.link is not None
        assert SLOWEST < machine.link < FASTEST
        assert machine.latency is not None
        assert machine.flops is not None


def test_before_mpirun_hosts_are_asked_and_connect(lab: Lab) -> None:
    job = with_ssh(lab)
    assert job.returncode == 0, job.output
    assert "without a password" in job.stdout
    assert "nothing to warn of" in job.stdout
    lab.cut()
    # The agent needs no network, as a host may have another way for ssh.
    job = with_ssh(lab)
    assert "warning: mac1: cannot connect to mac2 (no answer within 3 s): " in job.stdout
    assert "warning: mac2: cannot connect to mac1 (" in job.stdout
