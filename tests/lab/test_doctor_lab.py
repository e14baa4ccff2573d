"""``shardmlx.doctor`` between two hosts: the link has the bandwidth that it was given, and one that
is cut is found before mpirun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shardmlx.planning.facts.hostfile import read_hostfile
from testbed.hosts import Lab, hosts
from testbed.jobs import Job, patience
from tests.helpers.mpirun import mpirun
from tests.helpers.shown import lacking

LIMIT = 100e6 / 8
"""Bytes a second."""

SLOWEST, FASTEST = 0.1 * LIMIT, 2 * LIMIT
"""Of what may be measured where other work shares the cores; without a limit it is far more."""


def with_ssh(lab: Lab) -> Job:
    return mpirun(
        2,
        command=lab.command(
            lab.hosts[0],
            *(sys.executable, "-m", "shardmlx.doctor", "--ssh", "--ssh-command", lab.agent),
            *("--hostfile", lab.hostfile),
        ),
    )


def test_a_link_has_the_bandwidth_that_it_was_given(tmp_path: Path) -> None:
    seconds = f"{patience(0.5):g}"
    with hosts(tmp_path, 2, rate="100mbit") as lab:
        home = lab.home("mac1")
        job = mpirun(
            2,
            command=lab.mpirun(
                2,
                *("-m", "shardmlx.doctor", "--hostfile", lab.hostfile, "--seconds", seconds),
                *("--json", "found.json", "--write-hostfile", "written"),
            ),
        )
    assert job.returncode == 0, job.output
    found = json.loads((home / "found.json").read_text())
    assert [host["name"] for host in found["hosts"]] == ["mac1", "mac2"]
    (link,) = found["links"]
    for direction in ("there", "back"):
        assert SLOWEST < link["speed"][direction] < FASTEST
        (way,) = link[direction]
        assert way["problem"] is None
        assert way["medium"] == "virtual"
    assert link["there"][0]["address"] == "10.77.0.2"
    assert "less than a 1 Gbit/s cable" in job.stdout

    first, second = read_hostfile(home / "written")
    assert (first.host, second.host) == ("mac1", "mac2")
    here = {"amd-epyc": str(first.kind)}
    assert (
        lacking("doctor.md", "doctor", job.stdout + (home / "written").read_text(), here) == set()
    )
    for machine in (first, second):
        assert machine.link is not None
        assert SLOWEST < machine.link < FASTEST
        assert machine.latency is not None
        assert machine.flops is not None


def test_before_mpirun_hosts_are_asked_and_connect(lab: Lab) -> None:
    job = with_ssh(lab).well()
    assert "without a password" in job.stdout
    assert "nothing to warn of" in job.stdout
    lab.cut()
    # What mac1 still knew of mac2 would let it wait for longer than doctor does.
    subprocess.run(lab.command("mac1", "ip", "neigh", "flush", "dev", "eth0"), check=True)
    # The agent needs no network, as a host may have another way for ssh.
    job = with_ssh(lab)
    for source, target, why in (
        ("mac1", "mac2", "no route to host"),
        ("mac2", "mac1", "network is unreachable"),
    ):
        warning = f"warning: {source}: cannot connect to {target} ({why}): bring both into one"
        assert warning in job.stdout
