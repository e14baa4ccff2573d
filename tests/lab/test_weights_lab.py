"""Two hosts, of which the first alone has the model, over a real link."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.hosts import Lab, require, two_hosts
from tests.mpi.conftest import (  # noqa: F401 - fixtures
    pirate,
    small,
    small_tokenizer,
)
from tests.mpi.mpirun import PROGRAMS, mpirun

SAY = ("--prompt", "Who sails on the sea?", "--max-tokens", "8")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    require()
    with two_hosts(tmp_path) as lab:
        yield lab


def test_the_second_host_is_sent_its_part_of_the_model(
    lab: Lab,
    small: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    homes = [tmp_path / f"home-{host}" for host in lab.hosts]
    shutil.copytree(small, homes[0] / "model")
    places = ",".join(map(str, homes))
    command = lab.mpirun(
        2,
        PROGRAMS / "apart.py",
        "generate",
        places,
        "--model",
        "model",
        "--weight-cache",
        "kept",
        *SAY,
    )
    job = mpirun(2, command=command, timeout=120.0)
    assert job.returncode == 0, job.output
    assert re.search(
        r"^weights: [\d.]+ GB over MPI in [\d.]+ s \(rank 1 on mac2 [\d.]+ GB\)$", job.stdout, re.M
    )
    assert not (homes[0] / "kept").exists()
    again = mpirun(2, command=command, timeout=120.0)
    assert again.stdout.split("==========")[1] == job.stdout.split("==========")[1]
    assert re.search(r"^weights: [\d.]+ GB from caches in", again.stdout, re.M)
