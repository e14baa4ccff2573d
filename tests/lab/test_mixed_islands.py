"""Two islands of unlike machines: a pipeline of two ranks, and one process with another build of
MLX. They train one LoRA by one hub, at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardmlx.islands.client import TOKEN
from testbed.jobs import CACHE, PYTHONPATH, patience
from tests.helpers.island_hub import running_hub

OTHER = "0.32.3"
STEPS = 40

AS_BOX = """\
import sys
import mlx.core as mx
from shardmlx.main import main

assert mx.__version__ == sys.argv[1]
sys.exit(main(["train", *sys.argv[2:]]))
"""


def other_build() -> Path:
    """Return a directory with another MLX for the CPU, loaded once from the registry."""
    target = CACHE / f"mlx-{OTHER}"
    if not target.exists():
        wheels = target.with_suffix(".wheels")
        packages = [f"{name}=={OTHER}" for name in ("mlx", "mlx-cpu")]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
        if subprocess.run([*command, *packages], capture_output=True).returncode:
            pytest.skip(f"mlx {OTHER} for this machine cannot be had")
        for wheel in wheels.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(target)
    return target


@contextmanager
def island(
    command: list[str], token: str, path: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, TOKEN: token, "PYTHONPATH": path}
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=env, stdout=file, stderr=file) as process,
    ):
        yield process


@pytest.mark.skipif(sys.platform != "linux", reason="needs MLX for the CPU alone")
def test_a_pipeline_and_another_build_of_mlx_train_by_one_hub(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    other = other_build()
    options = [
        *("--model", str(small), "--data", str(pirate), "--num-layers", "-1", "--train"),
        *("--iters", str(STEPS), "--batch-size", "4", "--val-batches", "0", "--device", "cpu"),
        *("--learning-rate", "1e-3", "--dtype", "float32", "--timeout", "60"),
    ]
    launch = [sys.executable, "-m", "shardmlx.launch", "-n", "2", "train", *options]
    box = [sys.executable, "-c", AS_BOX, OTHER, *options]
    with running_hub(tmp_path / "hub", "macs,box", inner_steps=2) as hub:
        ends = {}
        place = {
            name: ["--island", hub.url, "--name", name, "--adapter-path", str(tmp_path / name)]
            for name in ("macs", "box")
        }
        path = f"{other}{os.pathsep}{PYTHONPATH}"
        logs = {name: tmp_path / f"{name}.log" for name in place}
        with (
            island([*launch, *place["macs"]], hub.tokens["macs"], PYTHONPATH, logs["macs"]) as macs,
            island([*box, *place["box"]], hub.tokens["box"], path, logs["box"]) as one,
        ):
            together = False
            start = time.monotonic()
            while macs.poll() is None or one.poll() is None:
                if time.monotonic() - start > patience(100):
                    break
                together = together or len(hub.rounds.run.lives) == 2
                time.sleep(0.05)
            ends = {"macs": macs.poll(), "box": one.poll()}
        said = {name: log.read_text() for name, log in logs.items()}
        assert ends == {"macs": 0, "box": 0}, said
        assert together
        assert hub.rounds.version >= STEPS // 2
    sizes = {name: (tmp_path / name / "adapters.safetensors").stat().st_size for name in place}
    assert sizes["macs"] == sizes["box"]
