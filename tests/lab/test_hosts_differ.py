"""Hosts that cannot work together: each is named in one line, before anything is loaded."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import shardmlx
from testbed.hosts import Lab
from testbed.jobs import ROOT
from tests.helpers.mpirun import mpirun

HERE, THERE = shardmlx.__version__, "0.0.9"


def with_another_version(lab: Lab, host: str) -> None:
    """As if an older shardmlx were installed on that host."""
    init = ROOT / "shardmlx" / "__init__.py"
    lab.replace(host, init, init.read_text().replace(HERE, THERE))
    for path in (
        *ROOT.glob("shardmlx.egg-info/PKG-INFO"),
        *Path(sysconfig.get_path("purelib")).glob("shardmlx-*.dist-info/METADATA"),
    ):
        text = re.sub("^Version: .*", f"Version: {THERE}", path.read_text(), flags=re.MULTILINE)
        lab.replace(host, path, text)


def test_another_version_is_refused_by_ranks_and_by_launch_and_so_is_an_unknown_host(
    lab: Lab,
) -> None:
    with_another_version(lab, "mac2")
    generate = ("-m", "shardmlx.generate", "--model", "model", "--prompt", "Ahoy")
    assert error_of(lab.mpirun(2, *generate)) == (
        f"rank 1 on mac2, unlike rank 0 on mac1, has shardmlx {THERE} instead of {HERE}: install "
        "the same version on all machines"
    )
    launch = lab.command(
        "mac1",
        *(sys.executable, "-m", "shardmlx.launch", "--hostfile", lab.hostfile),
        *("--ssh-command", lab.agent, f"--mpirun-options={' '.join(lab.mpirun_options)}"),
        *("train", "--model", "model", "--data", "data"),
    )
    assert error_of(launch) == (
        f"mac2: has shardmlx {THERE}, and this machine {HERE}: install the same version on all "
        "machines"
    )
    lab.home("mac1").with_name("hosts").write_text("mac1 slots=1\nmac9 slots=1\n")
    assert error_of(launch).startswith("mac9: no login (")


def error_of(command: list[str]) -> str:
    return mpirun(2, command=command).failure(2).removeprefix("shardmlx: error: ")
