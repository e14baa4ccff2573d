"""A checkpoint is gone on from by the same run only: what must be the same is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.checkpoint.run_identity import (
    SAME_OPTIONS,
    RunFacts,
    SetFacts,
    check_identity,
    identity_of,
    set_digest,
    start_digest,
)
from shardmlx.config.options import declared
from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import KNOWN, REFERENCE, WANTED, Sample, Samples
from shardmlx.engine.optimizer import usual_settings
from shardmlx.errors import UserError
from testbed.tiny_models import save_model_directory, tiny_config

TRAIN: list[Sample] = [([1, 2, 3], 0), ([4, 5], 1)]
VALID: list[Sample] = [([6, 7, 8, 9], 0)]
SETS = SetFacts.of(TRAIN), SetFacts.of(VALID)
CONFIG = TrainConfig.from_flat(model="tiny", data="books", train=True)
WHERE = Path("checkpoints/step-0000100")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_directory(tmp_path_factory.mktemp("model"), tiny_config(layers=1))


def identity(
    model: Path,
    config: TrainConfig = CONFIG,
    train: Sequence[Sample] = TRAIN,
    valid: Sequence[Sample] = VALID,
) -> dict[str, Any]:
    known = train.known if isinstance(train, Samples) else None
    facts = SetFacts.of(train, known), SetFacts.of(valid)
    return identity_of(config.flat(), model, *facts)


def refusal(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    with pytest.raises(UserError) as refused:
        check_identity(ours, theirs, WHERE)
    assert str(WHERE) in refused.value.problem
    return refused.value.problem


def test_where_not_all_rows_are_known_another_limit_is_said_or_refused(model: Path) -> None:
    """Of a large set only some rows have become tokens: another may be longer than any of them."""
    large = SetFacts(samples=2, longest=3, content="rows", looked_at="tokens")

    def limited(most: int, train: SetFacts = large) -> dict[str, Any]:
        return identity_of(CONFIG.changed(max_seq_length=most).flat(), model, train, SETS[1])

    ours = limited(2048)
    assert check_identity(ours, ours, WHERE) == []
    (note,) = check_identity(limited(1024), ours, WHERE)
    assert "max_seq_length is 1024 from here on, and was 2048" in note
    assert check_identity(limited(1024, SETS[0]), limited(2048, SETS[0]), WHERE) == []
    others = replace(large, looked_at="cut tokens")
    assert "max_seq_length" in refusal(limited(2, others), ours)
    assert set_digest(large, 1024) != set_digest(large, 2048)
    assert set_digest(SETS[0], 1024) == set_digest(SETS[0], 2048)


def test_another_model_is_refused_and_the_same_may_be_called_otherwise(
    model: Path, tmp_path: Path
) -> None:
    save_model_directory(tmp_path / "other", tiny_config(layers=1), seed=2)
    other = identity(tmp_path / "other", CONFIG.changed(model="large"))
    assert "large, not tiny" in refusal(identity(model), other)
    assert "tiny had other weights" in refusal(identity(model), identity(tmp_path / "other"))
    save_model_directory(tmp_path / "same", tiny_config(layers=1))
    config = CONFIG.changed(model="elsewhere/tiny", data="elsewhere/books")
    check_identity(identity(tmp_path / "same", config), identity(model), WHERE)


@pytest.mark.parametrize("where", ["config.json", "model.safetensors"])
def test_a_model_that_was_changed_is_another(model: Path, tmp_path: Path, where: str) -> None:
    save_model_directory(tmp_path, tiny_config(layers=1))
    content = (tmp_path / where).read_bytes()
    (tmp_path / where).write_bytes(content + b"\n")
    assert "another model" in refusal(identity(model), identity(tmp_path))


def test_a_model_of_several_large_files_is_known_by_samples_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    parts = [tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for part in parts:
        part.write_bytes(bytes(1 << 21))
    before = identity(tmp_path)
    for position in (0, (1 << 21) - 1):
        changed = bytearray(1 << 21)
        changed[position] = 1
        parts[1].write_bytes(changed)
        assert "another model" in refusal(identity(tmp_path), before)
    parts[1].unlink()
    assert "another model" in refusal(identity(tmp_path), before)


@pytest.mark.parametrize(
    ("name", "train", "valid"),
    [
        ("train", [*TRAIN, ([1], 0)], VALID),
        ("train", [([1, 2, 3], 0), ([4, 6], 1)], VALID),  # another token
        ("train", [([1, 2, 3], 0), ([4, 5], 0)], VALID),  # another prompt
        ("train", TRAIN[::-1], VALID),
        ("train", [([1, 2, 3, 4], 0), ([5], 1)], VALID),  # cut elsewhere
        ("valid", TRAIN, []),
        ("valid", TRAIN, TRAIN),
    ],
)
def test_other_data_is_refused(
    model: Path, name: str, train: list[Sample], valid: list[Sample]
) -> None:
    ours = identity(model, CONFIG.changed(data="films"), train, valid)
    problem = refusal(ours, identity(model))
    assert f"its {name} set came from books" in problem
    assert "films" in problem


@pytest.mark.parametrize(
    ("changed", "now"),
    [
        ({"optimizer": "sgd"}, "sgd {}"),
        ({"learning_rate": 2e-5}, "2e-05"),
        ({"lr_schedule": {"name": "cosine_decay", "arguments": [1e-5, 100]}}, "cosine_decay"),
        ({"optimizer_config": {"adam": {"bias_correction": True}}}, "{'bias_correction': True}"),
    ],
)
def test_another_optimizer_is_refused(model: Path, changed: dict[str, Any], now: str) -> None:
    problem = refusal(identity(model, CONFIG.changed(**changed)), identity(model))
    was, _, is_now = problem.partition(", not ")
    assert "adam {}" in was
    assert "1e-05" in was
    assert now in is_now


def test_settings_of_optimizers_that_are_not_used_may_change(model: Path) -> None:
    config = CONFIG.changed(optimizer_config={"sgd": {"momentum": 0.9}})
    check_identity(identity(model, config), identity(model), WHERE)


MODEL = RunFacts(layers=4, stored_dtype="float32")

COSINE = {"name": "cosine_decay", "arguments": [1e-5, 100]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"num_layers": 4}, {"num_layers": -1}),
        ({}, {"dtype": "float32"}),
        ({"objective": "dpo"}, {"objective": "dpo", "beta": 0.1}),
        ({"objective": "simpo"}, {"objective": "simpo", "beta": 2}),
        ({"mask_prompt": True}, {"loss_on": "last"}),
        ({"max_seq_length": 4}, {"max_seq_length": 2048}),
        (
            {"lora_parameters": {"rank": 8, "scale": 2.0, "dropout": 0.0}},
            {"lora_parameters": {"rank": 8, "alpha": 16, "dropout": 0.0, "keys": None}},
        ),
        (
            {"lora_parameters": {"rank": 8, "scale": 2.0, "dropout": 0.0, "keys": ["a", "b"]}},
            {"lora_parameters": {"rank": 8, "scale": 2.0, "dropout": 0.0, "keys": ["b", "a"]}},
        ),
        (
            {"fine_tune_type": "full"},
            {"fine_tune_type": "full", "lora_parameters": {"rank": 4}},
        ),
        ({}, {"optimizer_config": {"adam": {"betas": [0.9, 0.999]}}}),
        ({}, {"optimizer_config": {"adam": None}}),
        ({}, {"lr_schedule": {"name": "linear_schedule", "arguments": [1e-5, 1e-5, 7]}}),
        ({"lr_schedule": COSINE}, {"lr_schedule": COSINE | {"arguments": [1e-5, 100, 0.0]}}),
        ({"lr_schedule": COSINE}, {"lr_schedule": COSINE | {"warmup": 0}}),
        ({"lr_schedule": COSINE}, {"lr_schedule": COSINE, "learning_rate": 1.0}),
        (
            {"lr_schedule": COSINE, "warmup": 3},
            {"lr_schedule": COSINE | {"warmup": 3, "warmup_init": 0.0}},
        ),
        ({"iters": 100, "lr_schedule": {"name": "cosine_decay"}}, {"lr_schedule": COSINE}),
    ],
    ids=str,
)
def test_options_that_mean_the_same_are_the_same_run(
    one: dict[str, Any], other: dict[str, Any], model: Path
) -> None:
    facts = replace(MODEL, usual_settings=usual_settings("adam"))
    first, second = (
        identity_of(CONFIG.changed(**each).flat(), model, *SETS, facts=facts)
        for each in (one, other)
    )
    assert check_identity(first, second, WHERE) == []
    assert check_identity(second, first, WHERE) == []
    assert start_digest(first) == start_digest(second)
    assert refusal(identity(model, CONFIG.changed(**one, seed=7)), second)


def test_a_schedule_over_the_run_follows_raised_iters_and_this_is_said(model: Path) -> None:
    def at(iters: int, **options: Any) -> dict[str, Any]:
        config = CONFIG.changed(iters=iters, **{"lr_schedule": {"name": "cosine_decay"}, **options})
        facts = RunFacts(open_schedule=config.open_lr_schedule)
        return identity_of(config.flat(), model, *SETS, facts=facts)

    assert check_identity(at(100), at(100), WHERE) == []
    (note,) = check_identity(at(200), at(100), WHERE)
    assert "[1e-05, 200]" in note
    assert "[1e-05, 100]" in note
    assert "cosine_decay" in refusal(at(200, warmup=5), at(100))
    assert "0.1" in refusal(at(200, learning_rate=0.1), at(100))
    asked = {"name": "cosine_decay", "arguments": [1e-5, 100]}
    assert check_identity(at(200, lr_schedule=asked), at(100), WHERE) == []
    assert refusal(at(200), at(150, lr_schedule=asked))


def test_the_weights_to_start_from_are_known_by_their_content(model: Path) -> None:
    def starting(name: str | None, digest: str | None) -> dict[str, Any]:
        options = CONFIG.changed(resume_adapter_file=name).flat()
        return identity_of(options, model, *SETS, facts=RunFacts(start=digest))

    before = starting("sft/adapters.safetensors", "1")
    assert check_identity(starting("moved/adapters.safetensors", "1"), before, WHERE) == []
    problem = refusal(starting("sft/adapters.safetensors", "2"), before)
    assert "resume_adapter_file sft/adapters.safetensors, which had other weights" in problem
    for other in (starting(None, None), starting("sft/adapters.safetensors", "2")):
        refusal(before, other)
        assert start_digest(before) != start_digest(other)
    # A release before this one knew the name.
    older = identity(model)
    del older["start"]
    older["options"]["resume_adapter_file"] = "sft/adapters.safetensors"
    assert check_identity(before, older, WHERE) == []
    refusal(starting("other", "1"), older)


def test_which_answers_are_wanted_is_part_of_the_data(model: Path) -> None:
    def labelled(*wanted: float) -> Samples:
        known = np.full((len(wanted), KNOWN), np.nan)
        known[:, WANTED] = wanted
        bounds = np.array([[0, 3, 1]] * len(wanted), np.int64)
        return Samples(np.array([1, 2, 3], np.int32), bounds, known)

    both = [identity(model, train=labelled(*wanted)) for wanted in [(1, 0), (0, 1)]]
    assert "and the labels differ" in refusal(*both)
    assert start_digest(both[0]) != start_digest(both[1])
    # What is found out of answers later on is none of the data.
    samples = labelled(1, 0)
    assert samples.known is not None
    samples.known[:, REFERENCE] = -1.0
    assert check_identity(identity(model, train=samples), both[0], WHERE) == []


def test_an_own_objective_that_has_changed_is_told(model: Path) -> None:
    now, then = (
        identity_of(CONFIG.flat(), model, *SETS, facts=RunFacts(objective=each))
        for each in ("1", "2")
    )
    (note,) = check_identity(now, then, WHERE)
    assert "objective" in note


@pytest.mark.parametrize("name", SAME_OPTIONS)
def test_an_option_that_makes_another_run_is_refused_by_name(model: Path, name: str) -> None:
    ours = identity(model)
    theirs = json.loads(json.dumps(ours))
    theirs["options"][name] = "another"
    problem = refusal(ours, theirs)
    assert f"{name} another, not {CONFIG.flat()[name]}" in problem


MAY_CHANGE = """
    device iters epochs dry_run revision val_batches test test_batches steps_per_report
    steps_per_eval save_every adapter_path weights weight_cache grad_checkpoint recompute
    attention_chunk loss_chunk clear_cache_threshold memory_limit stage_map pipeline_stages
    replica_rows pack partitioner schedule micro_batch_size metrics_file metrics_port
    metrics_host trace checkpoint_dir checkpoint_every keep_checkpoints checkpoint_storage
    resume on_nan loss_scale timeout hostfile data_parallel profile zero report_to
    project_name trust_remote_code text_feature train config prompt_feature
    completion_feature chat_feature chosen_feature rejected_feature label_feature warmup hf_dataset
    loss_on mask_prompt show_data early_stop keep sweep tensor_parallel tensor_shares
    expert_parallel island name
"""
"""Options of layout, length, reports and paths, and those whose effect on the data is compared."""


def test_of_every_option_it_is_known_whether_it_may_change() -> None:
    described = {"model", "data", "optimizer", "optimizer_config", "learning_rate", "lr_schedule"}
    described |= {"resume_adapter_file"}
    may_change = {each.name for each in declared(TrainConfig)}.difference(SAME_OPTIONS, described)
    assert may_change == set(MAY_CHANGE.split())


@pytest.mark.parametrize(
    "theirs", [{}, {"model": []}, {"model": {"sha256": 3}}, {"model": None, "data": 3}]
)
def test_what_does_not_say_whose_it_is_is_refused(model: Path, theirs: dict[str, Any]) -> None:
    refusal(identity(model), theirs)
    for part in ("model", "data", "optimizer", "options"):
        lacking = identity(model)
        del lacking[part]
        refusal(identity(model), lacking)
