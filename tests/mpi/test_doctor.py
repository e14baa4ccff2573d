"""``shardmlx.doctor`` under mpirun, on this machine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from shardmlx.planning.facts.hostfile import read_hostfile
from testbed.jobs import PYTHONPATH
from tests.helpers.mpirun import mpirun

DOCTOR = ("-m", "shardmlx.doctor", "--seconds", "0.1")


def test_two_ranks_of_one_machine(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_text("# here\nlocalhost slots=2  # memory=1GiB link=1Gbps\n")
    job = mpirun(
        2,
        *DOCTOR,
        *("--hostfile", given, "--write-hostfile", "written", "--json", "found.json"),
        "--self-test",
        cwd=tmp_path,
    ).well()
    for word in ("Open MPI", "matmul fp32", "free memory"):
        assert word in job.stdout
    assert "doctor: multiplying matrices" in job.stderr

    found = json.loads((tmp_path / "found.json").read_text())
    (host,) = found["hosts"]
    assert host["ranks"] == [0, 1]
    assert host["flops"]["fp32"] > 0
    assert all(host["versions"].values())
    assert len(host["self_test"]) > 1
    assert set(host["self_test"].values()) == {0.0}  # the CPU beside itself
    assert found["links"] == []

    (machine,) = read_hostfile(tmp_path / "written")
    assert (machine.host, machine.slots) == ("localhost", 2)
    assert machine.memory == pytest.approx(host["facts"]["memory"], abs=1 << 20)
    assert machine.flops == pytest.approx(host["flops"]["fp32"], rel=1e-3)
    assert machine.link == 125e6  # was not measured


@pytest.mark.skipif(sys.platform != "linux", reason="macOS binds no process to a core")
def test_cores_are_those_of_the_job_though_mpirun_binds_a_rank_to_one() -> None:
    program = "from shardmlx.hosts.host_facts import collect; print(collect().cores)"
    words = ("-n", "1", "--bind-to", "core", sys.executable, "-c", program)
    mpirun_itself = Path(sys.executable).with_name("mpirun")
    job = mpirun(1, command=[mpirun_itself, *words], env={"PYTHONPATH": PYTHONPATH}).well()
    assert job.stdout.split() == [str(len(os.sched_getaffinity(0)))]
