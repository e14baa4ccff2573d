"""What is rounded off of sums in int8 goes on with a run, on ranks that are threads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.checkpoint.store import Store
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.agreement import AgreedError
from shardmlx.training.command import train_model
from tests.helpers.checkpoints import Bytes, as_bytes
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import load_arrays

COMMON: dict[str, Any] = {
    "batch_size": 4,
    "micro_batch_size": 1,
    "num_layers": -1,
    "pipeline_stages": 1,
    "iters": 3,
    "learning_rate": 1e-3,
    "checkpoint_every": 2,
    "val_batches": 0,
    "pack": False,
    "sum_dtype": "int8",
}
FULL: dict[str, Any] = {"fine_tune_type": "full", "unfreeze_all": True}
ACCUMULATED: dict[str, Any] = {"grad_accumulation_steps": 2, "checkpoint_every": 3, "iters": 4}


pytestmark = pytest.mark.usefixtures("limited_to_a_test")


class Run:
    """A finished run, and the tensors that it has left."""

    def __init__(
        self, directory: Path, ranks: int, model: Path, data: Path, **options: Any
    ) -> None:
        self.store = Store(directory / "checkpoints")
        paths = {
            "model": model,
            "data": data,
            "adapter_path": directory / "out",
            "checkpoint_dir": self.store.directory,
        }
        config = TrainConfig.from_flat(
            **{**COMMON, **options, **{key: str(paths[key]) for key in paths}}
        )
        LocalNetwork(ranks, timeout=60).run(lambda transport: train_model(config, transport))
        self.weights = tensors(directory / "out", "*.safetensors")

    def saved(self, kind: str) -> Bytes:
        return tensors(self.store.path(self.store.steps()[-1]), f"{kind}-*.safetensors")


def tensors(directory: Path, pattern: str) -> Bytes:
    return as_bytes(load_arrays(*directory.glob(pattern)))


def interrupted(
    before: Run,
    directory: Path,
    *,
    lacks: str = "none",
    backend: str = "cpu",
    scale: float | None = None,
) -> None:
    """Leave in ``directory`` what a run had when it was killed after its checkpoint of step 2, but
    for a kind of files, and as if it had run on another ``backend``, or scaled its loss."""
    step = 2
    store, manifest = Store(directory / "checkpoints"), before.store.manifest(step)
    files = tuple(file for file in manifest.files if not file.name.startswith(lacks))
    partial = store.begin(step)
    for file in files:
        shutil.copy(before.store.path(step) / file.name, partial)
    state = manifest.state if scale is None else {**manifest.state, "loss_scale": [scale, 2]}
    plan = {**manifest.plan, "backend": backend}
    store.commit(replace(manifest, files=files, plan=plan, state=state))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {}, id="lora"),
        pytest.param(4, FULL | {"pipeline_stages": 2}, id="zero 1, both ends tied"),
        # Step 3 is in the middle of an update: its sums have changed what step 2 left.
        pytest.param(2, FULL | ACCUMULATED | {"zero": 3}, id="zero 3, accumulated"),
    ],
)
def test_the_same_layout_goes_on_to_the_bit(
    ranks: int, options: dict[str, Any], small_tied: Path, pirate: Path, tmp_path: Path
) -> None:
    whole = Run(tmp_path / "a", ranks, small_tied, pirate, **options)
    interrupted(whole, tmp_path / "b")
    resumed = Run(tmp_path / "b", ranks, small_tied, pirate, **options)
    assert resumed.weights == whole.weights
    for kind in ("weights", "optimizer", "errors"):
        assert resumed.saved(kind) == whole.saved(kind)
    assert len(whole.saved("errors")) >= 2 * len(whole.saved("weights"))


def test_a_run_goes_on_on_another_device_and_without_them_from_an_older_checkpoint(
    small_tied: Path, pirate: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Run(tmp_path / "a", 2, small_tied, pirate)
    interrupted(whole, tmp_path / "b", backend="metal")
    assert Run(tmp_path / "b", 2, small_tied, pirate, device="cpu").weights == whole.weights
    assert "Computing on the CPU" in capsys.readouterr().out
    interrupted(whole, tmp_path / "c", lacks="errors")
    without = Run(tmp_path / "c", 2, small_tied, pirate).weights
    assert without != whole.weights, "they matter"
    interrupted(whole, tmp_path / "d", scale=65536.0)
    assert Run(tmp_path / "d", 2, small_tied, pirate).weights == without, "of a scaled loss"


def test_a_run_that_is_refused_lets_go_of_its_checkpoints(
    small_tied: Path, pirate: Path, tmp_path: Path
) -> None:
    """In a program that goes on, another run may use them."""
    Run(tmp_path, 1, small_tied, pirate)
    with pytest.raises(AgreedError, match="beyond --iters 1"):
        Run(tmp_path, 1, small_tied, pirate, iters=1)
    assert Run(tmp_path, 1, small_tied, pirate, iters=4).store.steps()[-1] == 4


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"memory_limit": "1MiB"}, "--memory-limit"),
        ({"resume": "weights"}, "--resume weights"),
        ({"resume": "step-0000002"}, "there is no complete checkpoint"),
    ],
)
def test_a_run_that_is_refused_leaves_no_directory(
    options: dict[str, Any], refusal: str, small_tied: Path, pirate: Path, tmp_path: Path
) -> None:
    with pytest.raises(AgreedError, match=refusal):
        Run(tmp_path / "runs" / "first", 2, small_tied, pirate, **options)
    assert [*tmp_path.iterdir()] == []
