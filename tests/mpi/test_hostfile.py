"""mpirun reads the planner's hostfiles, and gives out ranks as the planner supposes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.planning.facts.hostfile import machine_of_each_rank, read_hostfile
from testbed.jobs import ROOT

EXAMPLES = sorted((ROOT / "hostfiles").iterdir())


def mpirun(hostfile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # As mpirun is by itself: where it may oversubscribe it takes what it refuses otherwise.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PRTE_")}
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(Path(sys.executable).with_name("mpirun")), "--hostfile", str(hostfile)]
    return subprocess.run(
        [*command, "--bind-to", "none", *options],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def hosts_by_mpirun(hostfile: Path, ranks: int) -> list[str]:
    """The host of each rank, without its domain, as mpirun plans it; it starts nothing."""
    job = mpirun(hostfile, "-n", str(ranks), "--display", "map", "--do-not-launch", "true")
    hosts: dict[int, str] = {}
    for line in job.stdout.splitlines():
        if node := re.search(r"Data for node: (\S+)", line):
            host = node[1]
        if rank := re.search(r"App rank: (\d+)", line):
            hosts[int(rank[1])] = host
    assert len(hosts) == ranks, job.stdout + job.stderr
    return [hosts[rank] for rank in range(ranks)]


def hosts_by_us(hostfile: Path) -> list[str]:
    hosts = [machine.host for machine in machine_of_each_rank(read_hostfile(hostfile))]
    return [host if host[0].isdigit() else host.split(".")[0] for host in hosts]


def test_a_job_starts_with_a_hostfile_for_the_planner(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(
        "# one machine, “here”\n\n"
        "localhost slots=2  # memory=64GiB flops=27T link=40Gbps latency=30us, in the office\n"
    )
    job = mpirun(hostfile, "-n", "2", "sh", "-c", "hostname; sleep 1")
    assert job.returncode == 0, job.stderr
    assert len(job.stdout.splitlines()) == len(machine_of_each_rank(read_hostfile(hostfile))) == 2


LINES = """\
studio.lan slots=2  # memory=64GiB flops=27T link=40Gbps
anna@mini.lan slots=1 port=22 // memory=16GiB
10.0.0.7 slots=2 # an address
book.home slots=2
old slots = 1# memory=8GiB
"""
HOSTS = ["studio", "studio", "mini", "10.0.0.7", "10.0.0.7", "book", "book", "old"]
"""The hosts of the ranks that these give out."""


@pytest.mark.parametrize(
    "text", [*(path.read_text() for path in EXAMPLES), LINES], ids=[*(p.name for p in EXAMPLES), ""]
)
def test_mpirun_gives_out_ranks_as_the_planner_supposes(text: str, tmp_path: Path) -> None:
    """By every example, and by every form of line."""
    # One's own machine has more names than localhost.
    hostfile = tmp_path / "hosts"
    hostfile.write_text(text.replace("localhost", "here"))
    ours = hosts_by_us(hostfile)
    assert text != LINES or ours == HOSTS
    assert hosts_by_mpirun(hostfile, len(ours)) == ours


@pytest.mark.parametrize(
    "text",
    [
        "here slots=2 memory=8GiB\n",
        "here slots=2\r\n",
        "here slots=2 # no line end",
        "here slots=1\nhere slots=1\n",
        "here.lan slots=1\nhere.office slots=1\n",
        "here slots=0\n",
        "here\u00a0slots=1\n",
        "\ufeffhere slots=1\n",
        "fe80::1%eth0 slots=1\n",
        "here slots=1 port=ssh\n",
        "here slots=2 max_slots=1\n",
        "slot slots=1\n",
        "# nobody\n",
    ],
)
def test_what_we_refuse_mpirun_refuses(text: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_bytes(text.encode())
    job = mpirun(hostfile, "-n", "1", "--display", "map", "--do-not-launch", "true")
    assert "App rank" not in job.stdout
    with pytest.raises(UserError):
        read_hostfile(hostfile)
