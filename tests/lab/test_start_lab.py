"""Ranks that mpirun has started, and whose messages a firewall drops: a line names the host, and
the job ends at --timeout."""

from __future__ import annotations

import math
import subprocess

from testbed.hosts import Lab
from testbed.jobs import patience
from tests.helpers.mpirun import mpirun

MESSAGES = "10.78.0"


def with_a_second_network(lab: Lab) -> None:
    """Give hosts a network for messages, in which the packets of mac2 vanish."""
    for number, host in enumerate(lab.hosts, start=1):
        script = (
            "ip link add link eth0 name eth1 type macvlan mode bridge && ip link set eth1 up && "
            f"ip addr add {MESSAGES}.{number}/24 dev eth1"
        )
        subprocess.run(lab.command(host, "sh", "-c", script), check=True)
    nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
    vanish = ("ip", "neigh", "replace", f"{MESSAGES}.1", "dev", "eth1", *nowhere)
    subprocess.run(lab.command("mac2", *vanish), check=True)


def test_a_host_whose_messages_are_dropped_is_named_and_the_start_ends_in_time(lab: Lab) -> None:
    """mpirun's own connections are in another network, and work."""
    with_a_second_network(lab)
    timeout = 2 * min(30, math.ceil(patience(3)))  # rank 0 says so after 30 s at the latest
    lab.mpirun_options = (*lab.mpirun_options[:-1], f"{MESSAGES}.0/24")
    words = ("--model", "model", "--prompt", "Ahoy", "--timeout", str(timeout))
    job = mpirun(2, command=lab.mpirun(2, "-m", "shardmlx.generate", *words))
    said = job.failure(1)
    where = "starting MPI: no message of MPI from rank 1 on mac2 came within"
    assert said.startswith(
        f"shardmlx: failed: rank 0 on mac1: {where} {timeout} s (see --timeout): "
    )
    assert "firewalls" in said
    assert f"warning: {where} {timeout // 2} s; the job ends after {timeout} s" in job.stderr


LATE = """\
import os, time
from shardmlx.distributed.mpi import MPITransport

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(1000)
MPITransport(timeout=float(os.environ["SECONDS"]))
"""


def test_a_host_whose_rank_does_not_come_to_mpi_is_named(lab: Lab) -> None:
    """Its Python may load for long, or hang. MPI_Init waits for it, and says nothing."""
    timeout = 2 * min(30, max(4, math.ceil(patience(2))))
    job = mpirun(2, command=lab.mpirun(2, "-c", LATE), env={"SECONDS": str(timeout)})
    said = job.failure(1)
    late = "starting MPI: rank 1 on mac2 did not come within"
    assert said.startswith(
        f"shardmlx: failed: rank 0 on mac1: {late} {timeout} s (see --timeout): "
    )
    assert "firewalls" in said
    assert f"warning: {late} {timeout // 2} s; the job ends after {timeout} s" in job.stderr
