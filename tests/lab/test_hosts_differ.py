"""Hosts that cannot work together: each is named in one line, before anything is loaded."""

from __future__ import annotations

import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

import shardmlx
from tests.helpers.hosts import Lab
from tests.helpers.jobs import ROOT, Job
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


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--train", "--data", "data", "--iters", "1"),
        ("generate", "--prompt", "Ahoy"),
    ],
    ids=lambda command: command[0],
)
def test_another_version_of_the_package_is_refused(
    lab: Lab, command: tuple[str, ...], small: Path, pirate: Path
) -> None:
    shutil.copytree(small, lab.home("mac1") / "model")
    shutil.copytree(pirate, lab.home("mac1") / "data")
    with_another_version(lab, "mac2")
    name, *flags = command
    job = mpirun(2, command=lab.mpirun(2, "-m", f"shardmlx.{name}", "--model", "model", *flags))
    assert job.returncode == 2, job.output
    (line,) = job.error_lines
    assert line == (
        f"shardmlx: error: rank 1 on mac2, unlike rank 0 on mac1, has shardmlx {THERE} instead of "
        f"{HERE}: install the same version on all machines"
    )
    assert "weights: " not in job.output


def launch(lab: Lab) -> Job:
    return mpirun(
        2,
        command=lab.command(
            "mac1",
            *(sys.executable, "-m", "shardmlx.launch", "--hostfile", lab.hostfile),
            *("--agent", lab.agent, f"--mpirun-options={' '.join(lab.mpirun_options)}"),
            *("train", "--model", "model", "--data", "data"),
        ),
    )


def test_launch_asks_for_the_version_first(lab: Lab) -> None:
    with_another_version(lab, "mac2")
    job = launch(lab)
    assert job.returncode == 2, job.output
    (line,) = job.error_lines
    assert line == (
        f"shardmlx: error: mac2: has shardmlx {THERE}, and this machine {HERE}: install the same "
        "version on all machines"
    )


def test_a_host_whose_name_does_not_resolve(lab: Lab) -> None:
    lab.home("mac1").with_name("hosts").write_text("mac1 slots=1\nmac9 slots=1\n")
    job = launch(lab)
    assert job.returncode == 2, job.output
    (line,) = job.error_lines
    assert line.startswith("shardmlx: error: mac9: no login (")
    # mpirun alone names it too, and ends.
    job = mpirun(2, command=lab.mpirun(2, "-c", "pass"))
    assert job.returncode != 0
    assert "mac9" in job.output
