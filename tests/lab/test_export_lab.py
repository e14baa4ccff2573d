"""Two hosts, of which the first alone has the model, export it over a real link."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardmlx.config.export import ExportOptions
from tests.helpers.exports import export_alone
from tests.helpers.hosts import Lab
from tests.helpers.models_and_batches import tensors
from tests.helpers.mpirun import mpirun


def test_two_hosts_export_what_one_does(lab: Lab, small: Path, tmp_path: Path) -> None:
    alone = ExportOptions(model=str(small), output_dir=str(tmp_path / "alone"), quantize="4:32")
    export_alone(alone)
    mac1, mac2 = (lab.home(host) for host in lab.hosts)
    shutil.copytree(small, mac1 / "model")
    words = "-m", "shardmlx.export", "model", "--quantize", "4:32", "-o"

    job = mpirun(2, command=lab.mpirun(2, *words, "apart")).well()
    assert "rank 1 on mac2 keeps its files in its own apart: bring them here with" in job.stdout
    (kept,) = (mac2 / "apart").iterdir()
    assert not (mac1 / "apart" / kept.name).exists()
    shutil.copy(kept, mac1 / "apart")
    assert tensors(mac1 / "apart") == tensors(tmp_path / "alone")
