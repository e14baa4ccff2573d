"""The wheel's mpirun starts where the cores are those of a Mac: Homebrew's crashed on some."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from testbed.jobs import ROOT
from tests.helpers.mpirun import mpirun
from tests.helpers.topologies import CHIPS, cores_of, write_topology

MPIRUN = str(Path(sys.executable).with_name("mpirun"))
MEET = "from mpi4py.MPI import COMM_WORLD as world; print(world.allreduce(world.rank + 1))"
REMEDY = 'export HWLOC_SYNTHETIC="pack:1 core:14 pu:1"'


def check(cores: int, env: Mapping[str, str]) -> None:
    """Start a process on each core and no more, as Open MPI reads them, and two ranks that meet."""
    for count, starts in ((cores, True), (cores + 1, False)):
        command = [MPIRUN, "--map-by", ":NOOVERSUBSCRIBE", "-n", str(count), "sleep", "1"]
        job = mpirun(count, command=command, env=env)
        assert (job.returncode == 0) == starts, job.output
        assert starts or "not enough slots" in job.output
    two = mpirun(2, command=[MPIRUN, "-n", "2", sys.executable, "-c", MEET], env=env, cwd=ROOT)
    assert two.well().stdout.split() == ["3", "3"]


@pytest.mark.parametrize("chip", CHIPS)
def test_ranks_start_on_the_cores_of_each_chip(chip: str, tmp_path: Path) -> None:
    topology = write_topology(tmp_path / "topology.xml", chip)
    check(cores_of(chip), {"HWLOC_XMLFILE": str(topology)})


def test_and_with_the_cores_that_troubleshooting_tells_to_set() -> None:
    assert REMEDY in (ROOT / "docs" / "troubleshooting.md").read_text()
    name, _, value = REMEDY.removeprefix("export ").partition("=")
    check(14, {name: value.strip('"')})
