"""A checkpoint is gone on from by the same run only: what must be the same is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.checkpoint.run_identity import SAME_OPTIONS, RunOptions, check_identity, identity_of
from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import Sample
from shardmlx.errors import UserError
from tests.helpers.models_and_batches import save_model_directory, tiny_config

TRAIN: list[Sample] = [([1, 2, 3], 0), ([4, 5], 1)]
VALID: list[Sample] = [([6, 7, 8, 9], 0)]
CONFIG = TrainConfig(model="tiny", data="books", train=True)
WHERE = Path("checkpoints/step-0000100")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model_directory(path, tiny_config(layers=1))
    return path


def identity(
    model: Path,
    config: TrainConfig = CONFIG,
    train: Sequence[Sample] = TRAIN,
    valid: Sequence[Sample] = VALID,
) -> dict[str, Any]:
    return identity_of(RunOptions.of(config), model, train, valid)


def refusal(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    with pytest.raises(UserError) as refused:
        check_identity(ours, theirs, WHERE)
    return str(refused.value)


def test_the_same_run_is_the_same(model: Path) -> None:
    check_identity(identity(model), identity(model), WHERE)


def test_an_identity_survives_its_text(model: Path) -> None:
    config = replace(
        CONFIG,
        learning_rate=1.1e-5,
        lr_schedule={"name": "cosine_decay", "arguments": (1e-5, 100)},
        optimizer="adamw",
        optimizer_config={"adamw": {"betas": (0.9, 0.98)}},
    )
    ours = identity(model, config)
    check_identity(ours, json.loads(json.dumps(ours)), WHERE)


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    save_model_directory(tmp_path, tiny_config(layers=1), seed=2)
    other = identity(tmp_path, replace(CONFIG, model="large"))
    assert refusal(identity(model), other) == (
        "checkpoints/step-0000100 is a checkpoint of another model: large, not tiny: resume with "
        "that model, or start anew with another --checkpoint-dir"
    )
    assert refusal(identity(model), identity(tmp_path)) == (
        "checkpoints/step-0000100 is a checkpoint of another model: tiny had other weights or "
        "another config.json then: resume with that model, or start anew with another "
        "--checkpoint-dir"
    )


def test_the_same_model_may_be_called_otherwise(model: Path, tmp_path: Path) -> None:
    save_model_directory(tmp_path, tiny_config(layers=1))
    config = replace(CONFIG, model="elsewhere/tiny", data="elsewhere/books")
    check_identity(identity(tmp_path, config), identity(model), WHERE)


@pytest.mark.parametrize("where", ["config.json", "model.safetensors"])
def test_a_model_that_was_changed_is_another(model: Path, tmp_path: Path, where: str) -> None:
    save_model_directory(tmp_path, tiny_config(layers=1))
    content = (tmp_path / where).read_bytes()
    (tmp_path / where).write_bytes(content + b"\n")
    assert "is a checkpoint of another model" in refusal(identity(model), identity(tmp_path))


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
    ("name", "train", "valid", "samples", "now"),
    [
        ("train", [*TRAIN, ([1], 0)], VALID, 2, 3),
        ("train", [([1, 2, 3], 0), ([4, 6], 1)], VALID, 2, 2),  # another token
        ("train", [([1, 2, 3], 0), ([4, 5], 0)], VALID, 2, 2),  # another prompt
        ("train", TRAIN[::-1], VALID, 2, 2),
        ("train", [([1, 2, 3, 4], 0), ([5], 1)], VALID, 2, 2),  # cut elsewhere
        ("valid", TRAIN, [], 1, 0),
        ("valid", TRAIN, TRAIN, 1, 2),
    ],
)
def test_other_data_is_refused(
    model: Path, name: str, train: list[Sample], valid: list[Sample], samples: int, now: int
) -> None:
    ours = identity(model, replace(CONFIG, data="films"), train, valid)
    assert refusal(ours, identity(model)) == (
        f"checkpoints/step-0000100 is a checkpoint of a run on other data: its {name} set came "
        f"from books with {samples} samples, now it is films with {now}, and the tokens differ: "
        "resume with the same data and tokenizer, or start anew with another --checkpoint-dir"
    )


@pytest.mark.parametrize(
    ("changed", "now"),
    [
        ({"optimizer": "sgd"}, "sgd {} with the learning rate 1e-05"),
        ({"learning_rate": 2e-5}, "adam {} with the learning rate 2e-05"),
        (
            {"lr_schedule": {"name": "cosine_decay", "arguments": [1e-5, 100]}},
            "adam {} with the learning rate {'name': 'cosine_decay', 'arguments': [1e-05, 100]}",
        ),
        (
            {"optimizer_config": {"adam": {"bias_correction": True}}},
            "adam {'bias_correction': True} with the learning rate 1e-05",
        ),
    ],
)
def test_another_optimizer_is_refused(model: Path, changed: dict[str, Any], now: str) -> None:
    assert refusal(identity(model, replace(CONFIG, **changed)), identity(model)) == (
        "checkpoints/step-0000100 was made with the optimizer adam {} with the learning rate "
        f"1e-05, not {now}: resume with that, or start anew with another --checkpoint-dir"
    )


def test_settings_of_optimizers_that_are_not_used_may_change(model: Path) -> None:
    config = replace(CONFIG, optimizer_config={"sgd": {"momentum": 0.9}})
    check_identity(identity(model, config), identity(model), WHERE)


OTHER = {
    "fine_tune_type": "dora",
    "num_layers": 3,
    "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 20.0},
    "unfreeze_all": True,
    "resume_adapter_file": "a.safetensors",
    "batch_size": 8,
    "grad_accumulation_steps": 2,
    "max_seq_length": 77,
    "mask_prompt": True,
    "max_grad_norm": 1.5,
    "master_weights": True,
    "sum_dtype": "bfloat16",
    "dtype": "float32",
    "seed": 9,
}


@pytest.mark.parametrize("name", SAME_OPTIONS)
def test_an_option_that_makes_another_run_is_refused_by_name(model: Path, name: str) -> None:
    ours = identity(model)
    theirs = json.loads(json.dumps(ours))
    theirs["options"][name] = OTHER[name]
    assert refusal(ours, theirs) == (
        f"checkpoints/step-0000100 was made with {name} {OTHER[name]}, not "
        f"{getattr(CONFIG, name)}: resume with that, or start anew with another --checkpoint-dir"
    )


MAY_CHANGE: dict[str, Any] = {
    "iters": 7,
    "epochs": 2.0,  # the steps of which are counted when the data is read
    "dry_run": True,
    "revision": "v2",  # what is in it is compared
    "val_batches": 1,
    "test": True,
    "test_batches": 3,
    "steps_per_report": 1,
    "steps_per_eval": 7,
    "save_every": 3,
    "adapter_path": "elsewhere",
    "weights": "rank0",
    "weight_cache": "elsewhere",
    "grad_checkpoint": True,
    "recompute": "selective",
    "attention_chunk": "off",
    "loss_chunk": "off",
    "clear_cache_threshold": 5,
    "memory_limit": 10**9,
    "stage_map": "map.yaml",
    "pipeline_stages": 2,
    "replica_rows": "auto",
    "pack": True,
    "partitioner": "balanced",
    "schedule": "gpipe",
    "micro_batch_size": 2,
    "metrics_file": "metrics.jsonl",
    "metrics_port": 8000,
    "metrics_host": "0.0.0.0",
    "trace": "trace.json",
    "checkpoint_dir": "elsewhere",
    "checkpoint_every": 3,
    "keep_checkpoints": 9,
    "checkpoint_storage": "rank0",
    "resume": "never",
    "on_nonfinite": "skip",
    "timeout": 3.0,
    "hostfile": "hosts",
    "data_parallel": 2,
    "profile": "profile.yaml",
    "zero": 0,
    "loss_scale": 1024.0,
    "report_to": "wandb",
    "project_name": "mine",
    "trust_remote_code": True,
    "long_sequences": "error",
    "text_feature": "story",  # what it makes of the data is compared
}


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_layout_length_reports_and_paths_may_change(model: Path, name: str) -> None:
    config = replace(CONFIG, **{name: MAY_CHANGE[name]})
    check_identity(identity(model, config), identity(model), WHERE)


def test_of_every_option_it_is_known_whether_it_may_change() -> None:
    compared_apart = {"model", "data", "optimizer", "learning_rate", "lr_schedule"}
    compared_apart |= {"optimizer_config", "hf_dataset"}
    like_others = {"train", "config", "prompt_feature", "completion_feature"}
    like_others |= {"chat_feature"}
    in_others = {"warmup"}
    assert set(SAME_OPTIONS) == set(OTHER)
    known = [*OTHER, *MAY_CHANGE, *compared_apart, *like_others, *in_others]
    assert sorted(known) == sorted(field.name for field in fields(TrainConfig))


@pytest.mark.parametrize(
    "theirs", [{}, {"model": []}, {"model": {"sha256": 3}}, {"model": None, "data": 3}]
)
def test_what_does_not_say_whose_it_is_is_refused(model: Path, theirs: dict[str, Any]) -> None:
    assert refusal(identity(model), theirs) == (
        "checkpoints/step-0000100 does not say which run it is of: take another one"
    )


def test_a_checkpoint_from_before_an_option_was_there_is_of_the_same_run(model: Path) -> None:
    older = identity(model)
    for name in ("master_weights", "sum_dtype"):
        del older["options"][name]
    check_identity(identity(model), older, WHERE)


@pytest.mark.parametrize("part", ["model", "data", "optimizer", "options"])
def test_a_part_that_is_missing_is_refused(model: Path, part: str) -> None:
    theirs = identity(model)
    del theirs[part]
    assert "does not say which run it is of" in refusal(identity(model), theirs)
