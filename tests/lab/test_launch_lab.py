"""launch where another host answers its login but cannot connect back: a line says so, launch ends
mpirun at --timeout, and nothing stays on either host."""

from __future__ import annotations

import subprocess
import sys

from testbed.hosts import Lab
from tests.helpers.mpirun import mpirun


def test_a_host_that_cannot_connect_back_is_named_and_nothing_is_left(lab: Lab) -> None:
    """Its packets vanish, as a firewall drops them. The login needs no network."""
    nowhere = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
    vanish = ("ip", "neigh", "replace", lab.address("mac1"), "dev", "eth0", *nowhere)
    subprocess.run(lab.command("mac2", *vanish), check=True)
    options = f"--mpirun-options={' '.join(lab.mpirun_options)}"
    command = lab.command(
        "mac1",
        *(sys.executable, "-m", "shardmlx.launch", "--hostfile", lab.hostfile),
        *("--ssh-command", lab.agent, options, "doctor", "--timeout", "4"),
    )
    job = mpirun(2, command=command)  # fails the test if anything is left on any host
    assert job.failure(1).endswith("mpirun has started no rank within 4 s (see --timeout)")
    assert "launch: mpirun has started no rank for 2 s; it is ended after 4 s" in job.stderr
    why = "no answer within 6 s): let Python through the firewall of mac1"
    assert f"launch: mac2: cannot connect to mac1 ({why}" in job.stderr
