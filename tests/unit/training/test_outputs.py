"""Of a run that keeps its best weights: which these are, where they are, and what is tested."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.errors import UserError
from shardmlx.training.command import train_model
from shardmlx.training.outputs import Kept
from shardmlx.training.worker import TrainWorker
from tests.helpers.loaded_runs import trained_run, with_loaded_runs
from tests.helpers.local_transport import LocalNetwork, LocalTransport, alone
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.saved_adapters import write_earlier_outputs

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

STEEP: dict[str, Any] = {"learning_rate": 3.0}
"""A rate at which the loss soon rises."""


@pytest.fixture
def options(small: Path, pirate: Path, tmp_path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": 2, "iters": 4, "num_layers": 2, "keep": "best"}
    options |= {"steps_per_eval": 2, "val_batches": 4, "max_seq_length": 64}
    return options | {
        "model": str(small),
        "data": str(pirate),
        "adapter_path": str(tmp_path / "out"),
    }


Told = list[tuple[str, Mapping[str, Any]]]


def trained(options: Mapping[str, Any], ranks: int = 1) -> tuple[Kept | None, Told]:
    """Return the best weights that a run has kept, and what it tells."""
    told: Told = []
    config = TrainConfig.from_flat(**options)

    def work(transport: LocalTransport) -> Kept | None:
        listeners = [lambda name, values: told.append((name, values))]
        reporter = Reporter(quiet=transport.rank != 0, listeners=listeners)
        trainer = trained_run(config, transport, reporter)
        return None if trainer is None else trainer.outputs.kept

    kept, *_ = LocalNetwork(ranks, timeout=60).run(work)
    return kept, told


def of(told: Told, kind: str) -> list[Mapping[str, Any]]:
    return [values for name, values in told if name == kind]


UNMOVED: dict[str, dict[str, Any]] = {
    "accumulation": {"grad_accumulation_steps": 4},
    "warm-up from 0": {"iters": 2, "warmup": 5},
    "a rate below the last bit": {
        "lr_schedule": {"name": "linear_schedule", "arguments": [1e-30, 1e-3, 2]},
        "fine_tune_type": "full",
        "iters": 2,
    },
}


@pytest.mark.parametrize("still", UNMOVED)
def test_a_validation_before_the_first_moved_weight_replaces_nothing(
    still: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_earlier_outputs(tmp_path / "out", b"trained before")
    kept, told = trained(options | UNMOVED[still])
    assert [each["step"] for each in of(told, "val")][:2] == [1, 2]
    assert kept is None
    left = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    assert len(left) == 2
    assert {*left.values()} == {b"trained before"}
    assert [*(tmp_path / "out" / "last").glob("*.safetensors")], "the last weights have moved"


def test_only_validations_with_an_update_between_them_count_for_an_early_stop(
    options: dict[str, Any],
) -> None:
    """With eight steps an update there are four validations of the same weights."""
    options |= {"grad_accumulation_steps": 8, "iters": 40, "early_stop": 1, "val_batches": -1}
    kept, told = trained(options | STEEP)
    losses = {each["step"]: each["loss"] for each in of(told, "val")}
    assert losses[1] == losses[2] == losses[8] != losses[10] == losses[16] != losses[18]
    assert losses[18] > losses[10]
    assert kept is not None
    assert (kept.step, kept.loss) == (10, losses[10])
    assert max(losses) == 18, "the second that counts is worse"
    (summary,) = of(told, "summary")
    assert summary["steps"] == 17, "the last step that was made"


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pipeline": (2, {}),
    "replicas": (2, {"data_parallel": 2}),
    "full, weights divided": (2, {"fine_tune_type": "full", "data_parallel": 2, "zero": 3}),
    "full": (2, {"fine_tune_type": "full", "learning_rate": 1e-1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_weights_are_tested(
    layout: str, options: dict[str, Any], pirate: Path, tmp_path: Path
) -> None:
    shutil.copytree(pirate, tmp_path / "data")
    shutil.copy(pirate / "valid.jsonl", tmp_path / "data" / "test.jsonl")
    ranks, how = LAYOUTS[layout]
    options |= {"data": str(tmp_path / "data"), "train": True, "test": True, "val_batches": -1}
    options |= {"test_batches": -1, "iters": 8, **STEEP, **how}
    kept, told = trained(options, ranks)
    assert kept is not None
    losses = {each["step"]: each["loss"] for each in of(told, "val")}
    assert kept.loss == losses[kept.step]
    (test,) = of(told, "test")
    assert test["loss"] == pytest.approx(kept.loss, rel=1e-5)


def test_a_run_that_goes_on_elsewhere_says_where_its_best_is(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": 1}
    options |= {"val_batches": -1, "learning_rate": 1e-2}
    first, _ = trained(options)
    assert first is not None
    elsewhere = options | {"adapter_path": str(tmp_path / "other"), "iters": 5}
    second, _ = trained(elsewhere)
    assert second is not None
    assert (second.step, second.loss) == (first.step, first.loss)
    assert second.place == str(tmp_path / "out")
    assert not (tmp_path / "other" / "adapters.safetensors").exists()
    shutil.move(tmp_path / "out", tmp_path / "moved")
    third, _ = trained(options | {"adapter_path": str(tmp_path / "moved"), "iters": 5})
    assert third is not None
    assert (third.step, third.place) == (first.step, str(tmp_path / "moved"))


@pytest.mark.parametrize("lost", ["replaced", "removed"])
def test_best_weights_that_are_gone_are_the_best_no_more(
    lost: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """They are replaced by a run that was set back, for one, or by hand."""
    options |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "checkpoint_every": 1}
    options |= {"val_batches": -1, "learning_rate": 1e-2, "save_every": 1}
    first, _ = trained(options)
    assert first is not None
    file = tmp_path / "out" / "adapters.safetensors"
    if lost == "replaced":
        shutil.copy(tmp_path / "out" / "last" / "adapters.safetensors", file)
    else:
        file.unlink()
    again, _ = trained(options)
    assert again is None
    longer, told = trained(options | {"iters": 6})
    (validated,) = of(told, "val")
    assert longer is not None
    assert longer == Kept(validated["loss"], 6, str(tmp_path / "out"), longer.digest)
    expected = load_arrays(tmp_path / "out" / "last" / "0000005_adapters.safetensors")
    for name, array in load_arrays(file).items():
        assert (array == expected[name]).all().item(), name


def test_checkpoints_may_be_in_the_directory_of_the_adapters(options: dict[str, Any]) -> None:
    """The run that has locked it for the ones does not wait for itself with the others."""
    place = options["adapter_path"]
    options |= {"checkpoint_dir": str(Path(place) / "." / "last" / ".."), "checkpoint_every": 2}
    first, _ = trained(options)
    assert first is not None
    _, told = trained(options | {"iters": 6})
    assert [each["step"] for each in of(told, "resume")] == [4]

    def work(transport: LocalTransport) -> None:
        def train_again(_: Crew[TrainWorker]) -> None:
            with pytest.raises(UserError):
                train_model(TrainConfig.from_flat(**options | {"checkpoint_dir": None}), transport)

        with_loaded_runs(TrainConfig.from_flat(**options | {"iters": 8}), transport, train_again)

    alone(work)


def test_a_directory_is_one_runs_until_it_ends(options: dict[str, Any]) -> None:
    place = options["adapter_path"]
    places = [place, str(Path(place) / "last")]

    def work(transport: LocalTransport) -> None:
        def train_again(_: Crew[TrainWorker]) -> None:
            for each in places:
                config = TrainConfig.from_flat(**options | {"adapter_path": each, "keep": "last"})
                with pytest.raises(UserError) as refused:
                    train_model(config, transport)
                assert refused.value.problem.startswith(f"--adapter-path {each}: ")

        with_loaded_runs(TrainConfig.from_flat(**options), transport, train_again)
        train_model(TrainConfig.from_flat(**options), transport)

    alone(work)
    assert not [each for each in places if (Path(each) / ".lock").exists()]
