"""Hosts that have their Python at other paths: launch and doctor find each at its own, through a
real sshd, and mpirun starts them in the hostfile's order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from testbed.hosts import Lab, hosts
from tests.helpers.lab import move_python, needs_own_python, start_pythons_with, write_hosts
from tests.helpers.mpirun import mpirun
from tests.helpers.sshd import logins, require

FOREIGN = """\
import platform

platform.machine = lambda: "aarch64"
"""
"""As a Python of another machine would say."""


def links(lab: Lab, host: str) -> list[Path]:
    """The links to environments that launch has left on a host, as this one reads them."""
    return [
        path.readlink() for path in lab.home(host).parent.glob("shardmlx-*") if path.is_symlink()
    ]


def test_each_host_starts_its_own_python(tmp_path: Path) -> None:
    """The second one says that it is of another machine."""
    require()
    needs_own_python()
    with hosts(tmp_path, 2) as lab, logins(lab):
        pythons = {host: move_python(lab, host) for host in lab.hosts}
        start_pythons_with(lab, "mac2", FOREIGN)
        write_hosts(lab, pythons)
        here = (pythons["mac1"], "-m")
        ssh = ("shardmlx.doctor", "--ssh", "--hostfile", "hosts")
        asked = mpirun(1, command=lab.command("mac1", *here, *ssh)).well()
        options = f"--mpirun-options={shlex.join(lab.mpirun_options)}"
        launch = ("shardmlx.launch", "--hostfile", "hosts", options, "doctor", "--seconds", "0.01")
        ran = mpirun(2, command=lab.command("mac1", *here, *launch)).well()
        found = {host: links(lab, host) for host in lab.hosts}
        linked = next(lab.home("mac2").parent.glob("shardmlx-*"))
        linked.unlink()
        linked.symlink_to("/somewhere")
        taken = mpirun(2, command=lab.command("mac1", *here, *launch))
    for host, python in pythons.items():
        assert f"{python} on {host}" in asked.stdout
        assert found[host] == [python.parents[1]]
    unlike = "hosts are unlike: Linux x86_64 (mac1), Linux aarch64 (mac2); "
    assert f"warning: {unlike}" in asked.stdout
    assert f"launch: {unlike}" in ran.stdout
    assert re.search(r"^host +mac1 +mac2$", ran.stdout, re.MULTILINE)
    assert f"warning: {unlike}" in ran.stdout  # the ranks themselves have seen it
    assert f"mac2: {pythons['mac2']} cannot be at /tmp/shardmlx-" in taken.failure(2)
