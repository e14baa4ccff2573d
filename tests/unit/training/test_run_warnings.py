"""What options of a run make of it that nobody may have meant is named, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.training.run_warnings import warnings_of

RATE = 1e-5


def warned(replicas: int = 1, **options: Any) -> str:
    """Return the only warning of a run with these options, "" for none."""
    config = TrainConfig.from_flat(**{"train": True, "iters": 100, **options})
    found = warnings_of(config, replicas)
    assert len(found) <= 1
    return found[0] if found else ""


def schedule(name: str, *arguments: float, **more: Any) -> dict[str, Any]:
    return {"lr_schedule": {"name": name, "arguments": [*arguments], **more}}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param({"warmup": 100}, ["100 updates", "100:"], id="as long as the run"),
        pytest.param({"warmup": 500}, ["500 updates", "100:"], id="longer"),
        pytest.param(
            {"warmup": 30, "grad_accumulation_steps": 4}, ["30 updates", "25:"], id="in updates"
        ),
        pytest.param(
            schedule("cosine_decay", RATE, 50, warmup=100), ["100 updates"], id="in lr_schedule"
        ),
        pytest.param(schedule("cosine_decay", RATE, 1000), ["1000 updates", "100:"], id="cosine"),
        pytest.param(
            schedule("linear_schedule", RATE, 1e-6, 1000), ["1000 updates", "1e-06"], id="linear"
        ),
        pytest.param(schedule("cosine_decay", RATE, 60), ["60 updates", "at 0"], id="over early"),
        pytest.param(
            {"iters": 10, "grad_accumulation_steps": 4}, ["2 steps", "--iters 10", "4"], id="left"
        ),
    ],
)
def test_steps_that_do_not_fit_the_run_are_named(options: dict[str, Any], named: list[str]) -> None:
    text = warned(**options)
    assert all(each in text for each in named), text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warmup": 99},
        {"lr_schedule": {"name": "cosine_decay"}, "warmup": 10},
        schedule("linear_schedule", RATE, RATE, 1),
        schedule("linear_schedule", RATE, RATE, 1000),
        schedule("cosine_decay", RATE, 60, 1e-6),
        schedule("exponential_decay", RATE, 0.9),
        schedule("step_decay", RATE, 0.9, 1000),
        {"iters": 100, "grad_accumulation_steps": 4},
        {"train": False, "test": True, "iters": 7, "warmup": 500},
    ],
    ids=str,
)
def test_what_fits_is_not_named(options: dict[str, Any]) -> None:
    assert warned(**options) == ""


def lora(**parameters: Any) -> dict[str, Any]:
    return {"lora_parameters": {"rank": 8, "dropout": 0.0, **parameters}}


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (lora(scale=20.0), lora(scale=10.0), ["scale 20", "10:", "by 0.5"]),
        (lora(alpha=16), lora(scale=4.0), ["scale 2,", "by 2"]),
        (lora(scale=20.0), lora(scale=20), []),
        (lora(alpha=16), lora(alpha=16), []),
        (lora(scale=0.0), lora(scale=1.0), ["scale 0"]),
        (lora(scale=20.0) | {"fine_tune_type": "lora"}, {"fine_tune_type": "dora"}, ["lora"]),
        ({"lora_parameters": None}, {}, []),
        ({"peft_type": "LORA"}, {}, []),
        ({"lora_parameters": {"rank": 4}}, {"lora_parameters": {"scale": 1.0}}, []),
    ],
    ids=str,
)
def test_adapters_that_do_something_else_in_this_run_are_named(
    theirs: dict[str, Any], ours: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(theirs))
    file = str(tmp_path / "0000100_adapters.safetensors")
    text = warned(resume_adapter_file=file, **ours)
    assert (file in text) == bool(named)
    assert all(each in text for each in named), text


@pytest.mark.parametrize("content", [None, "no JSON"])
def test_adapters_without_a_description_are_not_named(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    assert warned(resume_adapter_file=str(tmp_path / "adapters.safetensors")) == ""


@pytest.mark.parametrize(
    ("parameters", "named"),
    [({}, []), ({"rank": 8, "dropout": 0.0, "scale": 20.0}, []), ({"rank": 16}, ["rank 16"])],
)
def test_adapters_of_a_full_fine_tune_are_named(
    parameters: dict[str, Any], named: list[str]
) -> None:
    text = warned(fine_tune_type="full", lora_parameters=parameters)
    assert (text == "") == (named == [])
    assert all(each in text for each in named)


def test_a_test_alone_says_which_adapters_it_tests() -> None:
    tested = TrainConfig.from_flat(
        test=True, resume_adapter_file="start.safetensors", adapter_path="trained"
    )
    (text,) = warnings_of(tested, replicas=1)
    assert "start.safetensors" in text
    assert "trained" in text


@pytest.mark.parametrize(("option", "value"), [("zero", 1), ("zero", 3), ("replica_rows", "5,3")])
def test_what_only_replicas_use_is_named_where_there_is_one(option: str, value: Any) -> None:
    options = {"fine_tune_type": "full", "batch_size": 8, option: value}
    assert f"--{option.replace('_', '-')} {value} " in warned(**options)
    assert warned(replicas=2, **options) == ""


def test_what_nobody_asked_for_is_not_named() -> None:
    assert warned(zero=0) == ""
    assert warned(fine_tune_type="full") == ""
