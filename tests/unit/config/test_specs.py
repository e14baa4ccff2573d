"""Parts of the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest

import shardmlx
from shardmlx.config.inference import InferenceConfig
from shardmlx.config.options import Spec
from shardmlx.config.specs import BatchOptions, FineTune, MachineOptions
from shardmlx.config.train import TrainConfig


@pytest.mark.parametrize(
    ("spec", "options"), [(BatchOptions, TrainConfig), (MachineOptions, InferenceConfig)]
)
def test_fields_have_names_and_types_of_the_options(spec: type[Spec], options: type) -> None:
    theirs, mine = get_type_hints(options), get_type_hints(spec)
    assert mine == {name: theirs.get(name, mine[name]) for name in mine}
    assert len(theirs.keys() & mine.keys()) > 1


def test_what_the_options_lack_has_its_default() -> None:
    machines = MachineOptions.of(InferenceConfig(hostfile="hosts", memory_limit=7))
    assert machines == MachineOptions(hostfile="hosts", memory_limit=7, profile=None)


def test_the_settings_of_the_optimizer_are_those_of_the_one_that_is_used() -> None:
    config = TrainConfig(optimizer="sgd", optimizer_config={"sgd": {"momentum": 0.9}, "adam": {}})
    assert FineTune.of(config).optimizer_settings == {"momentum": 0.9}
    assert FineTune.of(TrainConfig(optimizer_config={})).optimizer_settings == {}


def test_few_modules_know_all_options_of_train() -> None:
    """The others take the part that they need: neither they nor a run hold all of them."""
    package = Path(shardmlx.__file__).parent
    users = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "TrainConfig" in path.read_text()
    } - {"config/train.py", "__init__.py"}  # which declares it, and which exports it
    assert users == {
        "config/profile.py",
        "config/sweep.py",
        "planning/alone.py",
        "planning/plan_command.py",
        "planning/training_plan.py",
        "training/command.py",
        "training/plan_run.py",
        "training/planned_run.py",
        "training/run_warnings.py",
        "training/sweep.py",
    }


def test_chunks_that_are_left_to_the_run_go_by_the_backend_and_the_vocabulary() -> None:
    def chunks(backend: str, vocab_size: int, **options: Any) -> tuple[int | None, int | None]:
        batch = BatchOptions.of(TrainConfig(model="m", data="d", **options))
        savings = batch.savings(backend, vocab_size)
        return savings.attention_chunk, savings.loss_chunk

    assert (chunks("cpu", 49152), chunks("metal", 49152)) == ((128, 128), (512, 512))
    assert (chunks("cpu", 1024), chunks("metal", 1024)) == ((128, 1024), (512, 1024))
    assert chunks("cpu", 1024, attention_chunk="off", loss_chunk="counted") == (None, 1024)
    assert chunks("cpu", 1024, loss_chunk="off") == (128, None)
