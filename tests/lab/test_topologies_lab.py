"""Two Macs of different chips: mpirun learns the cores of the second from its daemon there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from testbed.hosts import TMP, Lab
from testbed.jobs import patience
from tests.helpers.mpirun import mpirun
from tests.helpers.topologies import CHIPS, cores_of, write_topology

# Open MPI 5.0.11 may hang after a job that ends at once.
REST = f"import time; time.sleep({patience(1)})"
WHERE = f"import os; print(os.uname().nodename); {REST}"
MEET = f"from mpi4py.MPI import COMM_WORLD as world; print(world.allreduce(world.rank + 1)); {REST}"


@pytest.mark.parametrize("chips", [*pairwise(CHIPS)], ids=" and ".join)
def test_ranks_on_two_chips_are_placed_by_their_cores_and_meet(
    chips: tuple[str, str], lab: Lab
) -> None:
    for host, chip in zip(lab.hosts, chips, strict=True):
        write_topology(lab.home(host).with_name("topology.xml"), chip)
    env = {"HWLOC_XMLFILE": str(TMP / "topology.xml")}
    assert mpirun(2, command=lab.mpirun(2, "-c", MEET), env=env).well().stdout.split() == ["3"] * 2
    # Without slots in the hostfile each host has as many as cores.
    lab.home("mac1").with_name(lab.hostfile.name).write_text("mac1\nmac2\n")
    first, second = map(cores_of, chips)
    job = mpirun(2, command=lab.mpirun(first + second, "-I", "-S", "-c", WHERE), env=env).well()
    assert sorted(job.stdout.split()) == ["mac1"] * first + ["mac2"] * second
