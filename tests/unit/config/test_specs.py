"""Sections of the options."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import shardmlx
from shardmlx.config.commands import BY_NAME
from shardmlx.config.inference import InferenceConfig
from shardmlx.config.options import OptionError, declared
from shardmlx.config.profile import ProfileOptions
from shardmlx.config.specs import BatchOptions, FineTune, MachineOptions
from shardmlx.config.train import TrainConfig


@pytest.mark.parametrize("command", BY_NAME)
def test_an_option_stands_once_in_all_sections_and_no_section_has_its_name(command: str) -> None:
    options = BY_NAME[command].line.options
    names = [each.name for each in declared(options)]
    sections = {each.name for each in fields(options)} - set(names)
    assert len(set(names)) == len(names) > 0
    assert sections.isdisjoint(BatchOptions.__annotations__)


def test_options_are_built_by_flat_names_and_taken_by_section() -> None:
    config = TrainConfig.from_flat(model="m", micro_batch_size=2, prompt_feature="question")
    assert (config.source.model, config.batch.micro_batch_size) == ("m", 2)
    assert config.sets.features.prompt_feature == "question"
    assert config.flat()["prompt_feature"] == "question"
    assert TrainConfig.from_flat(**config.flat()) == config
    assert config.changed(micro_batch_size=4).batch == BatchOptions(micro_batch_size=4)


def test_an_unknown_name_is_no_option() -> None:
    with pytest.raises(TypeError, match="micro_batch"):
        TrainConfig.from_flat(micro_batch=2)


def test_sections_are_checked_with_the_whole() -> None:
    tune = FineTune(train=True)
    assert TrainConfig(tune=tune, batch=BatchOptions(batch_size=8)).batch.batch_size == 8
    with pytest.raises(OptionError) as wrong:
        TrainConfig(tune=tune, batch=BatchOptions(batch_size=0))
    assert wrong.value.name == "batch_size"
    # What follows from other options is filled in by from_flat alone.
    with pytest.raises(OptionError) as unsettled:
        TrainConfig(tune=FineTune(train=False))
    assert (unsettled.value.name, unsettled.value.remedy) == ("train", "give True")


def test_a_command_may_have_another_form_of_a_run_s_option() -> None:
    with pytest.raises(TypeError, match="model"):
        ProfileOptions.from_flat()
    options = ProfileOptions.from_flat(model="m", batch_size=2)
    assert (options.run.source.model, options.run.batch.batch_size) == ("m", 2)
    (model,) = [each for each in declared(ProfileOptions) if each.name == "model"]
    assert model.rules.positional


def test_what_the_options_lack_has_its_default() -> None:
    machines = InferenceConfig.from_flat(hostfile="hosts", memory_limit=7).machines
    assert machines == MachineOptions(hostfile="hosts", memory_limit=7, profile=None)


def test_the_settings_of_the_optimizer_are_those_of_the_one_that_is_used() -> None:
    config = TrainConfig.from_flat(
        optimizer="sgd", optimizer_config={"sgd": {"momentum": 0.9}, "adam": {}}
    )
    assert config.tune.optimizer_settings == {"momentum": 0.9}
    assert TrainConfig.from_flat(optimizer_config={}).tune.optimizer_settings == {}


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
        "islands/hub_link.py",
        "planning/plan_command.py",
        "planning/training_plan.py",
        "training/command.py",
        "training/plan_run.py",
        "training/run_start.py",
        "training/run_warnings.py",
        "training/setup.py",
        "training/sweep.py",
        "training/worker.py",
    }


def test_chunks_that_are_left_to_the_run_go_by_the_backend_and_the_vocabulary() -> None:
    def chunks(backend: str, vocab_size: int, **options: Any) -> tuple[int | None, int | None]:
        batch = TrainConfig.from_flat(model="m", data="d", **options).batch
        savings = batch.savings(backend, vocab_size)
        return savings.attention_chunk, savings.loss_chunk

    assert (chunks("cpu", 49152), chunks("metal", 49152)) == ((128, 128), (512, 512))
    assert (chunks("cpu", 1024), chunks("metal", 1024)) == ((128, 1024), (512, 1024))
    assert chunks("cpu", 1024, attention_chunk="off", loss_chunk="counted") == (None, 1024)
    assert chunks("cpu", 1024, loss_chunk="off") == (128, None)
