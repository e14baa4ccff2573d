"""A run that was interrupted goes on as if it had not been, in whatever layout."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from testbed.jobs import Job
from testbed.runs import events
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import train_well
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool
from tests.helpers.shown import shown

COMMON: dict[str, Any] = {
    "seed": 5,
    "batch_size": 4,
    "micro_batch_size": 1,
    "iters": 12,  # the second epoch begins at the ninth
    "learning_rate": 1e-3,
    "num_layers": -1,
    "max_seq_length": 64,
    "steps_per_report": 1,
    "steps_per_eval": 5,
    "val_batches": 1,
    "save_every": 100,
    "schedule": "1f1b",
    "pack": False,
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": (
        "small",
        {
            "lora_parameters": {"rank": 4, "dropout": 0.2, "scale": 10.0},
            "optimizer": "adamw",
            "lr_schedule": {
                "name": "cosine_decay",
                "arguments": [1e-3, 12],
                "warmup": 7,
                "warmup_init": 1e-5,
            },
            "checkpoint_every": 5,
        },
    ),
    "full, tied, accumulated": (
        "small_tied",
        {
            "fine_tune_type": "full",
            "unfreeze_all": True,
            "optimizer": "sgd",
            "optimizer_config": {"sgd": {"momentum": 0.9}},
            "learning_rate": 0.05,
            "max_grad_norm": 0.5,
            "grad_accumulation_steps": 3,
            "checkpoint_every": 4,
        },
    ),
}
ADAM, SGD = "lora", "full, tied, accumulated"
SAVED_AT = {ADAM: 5, SGD: 3}
"""Steps of the first checkpoints. With accumulation step 4 is in the middle of an update."""

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "two stages": (2, []),
    "zb-v": (2, ["--schedule", "zb-v"]),
    "one rank": (1, ["--micro-batch-size", "4"]),
    "four stages": (4, ["--schedule", "gpipe"]),
    "two by two": (4, ["--pipeline-stages", "2", "--schedule", "zb-h1"]),
    "four replicas": (4, ["--pipeline-stages", "1"]),
}
BEGUN = {ADAM: "two stages", SGD: "two by two"}
"""Layouts in which runs begin. Two replicas of a full fine-tune divide the optimizer's state."""

OTHERS = {
    ADAM: ["four stages"],
    # Of a tied matrix it matters whether one rank has both ends, and whether there are replicas.
    SGD: ["zb-v", "one rank", "four replicas"],
}
"""Layouts in which runs go on, beside that in which they began."""

EVALUATED = 1e-6
"""Relative difference of two losses of the same weights, whose sums were made in another order."""

ROUNDED = 2e-6
"""The same of two gradients, in their norm: a thousand terms of float32, 2**-24 * sqrt(1000)."""


@dataclass(frozen=True)
class Result:
    metrics: Path
    output: Path
    checkpoints: Path

    def losses(self) -> dict[tuple[str, int], float]:
        return {
            (name, event["step"]): event["loss"]
            for name in ("train", "val")
            for event in events(self.metrics, name)
        }


def adam_may_differ(whole: Result, resumed_at: int) -> dict[int, float]:
    """Return by how much losses with Adam may differ after each step, if only sums differ.

    A step moves a weight by lr m / sqrt(v), where m and v are running means of its gradient g and
    of g^2, with the weights b = 0.9 and c = 0.999. By Cauchy-Schwarz |m| <= 7.3 sqrt(v), whatever
    the gradients were: a step moves a weight by at most 7.3 lr. Where g is as small as the
    rounding of its sums, that is what two layouts may differ by in that weight; but its loss feels
    little of it.

    Let r be the difference of g in two layouts. It changes m, k steps later, by (1 - b) b^k r, and
    v by 2 (1 - c) c^k g r; and v >= (1 - c) c^k g^2. So after n steps it has moved the weight by

        lr |r| sum_k ((1 - b) b^k / sqrt(v) + |m| (1 - c) c^k |g| / v^(3/2))
          <= lr |r| / |g| ((1 - b) / sqrt(1 - c) sum_k (b / sqrt(c))^k + 7.3 n)
          <= lr |r| / |g| (32 + 7.3 n),

    and the loss, to first order, by |g| times that: lr |r| (32 + 7.3 n), however small g is. Over
    N weights sum |r| <= sqrt(N) ||r|| <= sqrt(N) ROUNDED ||g||, if all errors add up. They do not:
    that leaves room for what is left out, batches whose gradients differ, and the next order. It
    holds while training is stable; where it is not, any rounding grows.
    """
    weights = sum(array.size for array in load_weights(whole.output).values())
    steps = {event["step"]: event for event in events(whole.metrics, "train")}
    lr = max(event["learning_rate"] for event in steps.values())
    return {
        last: EVALUATED * steps[last]["loss"]
        + sum(
            lr * (32 + 7.3 * (last - step)) * ROUNDED * weights**0.5 * steps[step]["grad_norm"]
            for step in range(resumed_at + 1, last)
        )
        for last in steps
        if last > resumed_at
    }


def arguments(
    run: str, directory: Path, models: Mapping[str, Path], data: Path, **more: str
) -> tuple[list[str], Result]:
    model, options = RUNS[run]
    directory.mkdir(parents=True, exist_ok=True)
    result = Result(directory / "metrics.jsonl", directory / "out", directory / "checkpoints")
    config = directory / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            COMMON
            | options
            | {
                "model": str(models[model]),
                "data": str(data),
                "adapter_path": str(result.output),
                "metrics_file": str(result.metrics),
                "checkpoint_dir": str(result.checkpoints),
                "keep_checkpoints": 9,
            }
            | more
        )
    )
    return ["-c", str(config)], result


def interrupt(before: Result, after: Result, step: int) -> None:
    """As if the run had been killed right after its checkpoint of ``step``."""
    name = f"step-{step:07d}"
    shutil.copytree(before.checkpoints / name, after.checkpoints / name)


WHOLE = "whole"


class Results(dict[tuple[str, str], Result]):
    """Uninterrupted runs, and runs that go on from their first checkpoints in a
    layout: each is run when it is asked for."""

    def __init__(self, directory: Path, models: Mapping[str, Path], data: Path) -> None:
        super().__init__()
        self._directory, self._models, self._data = directory, models, data

    def __missing__(self, key: tuple[str, str]) -> Result:
        run, layout = key
        flags, result = arguments(run, self._directory / run / layout, self._models, self._data)
        ranks, more = LAYOUTS[BEGUN[run] if layout == WHOLE else layout]
        if layout != WHOLE:
            interrupt(self[run, WHOLE], result, SAVED_AT[run])
        train_well(ranks, *flags, *more)
        self[key] = result
        return result


@pytest.fixture(scope="module")
def results(
    small: Path, small_tied: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    models = {"small": small, "small_tied": small_tied}
    return Results(tmp_path_factory.mktemp("resume"), models, pirate)


@pytest.mark.parametrize("run", RUNS)
def test_the_same_layout_goes_on_to_the_bit(results: Results, run: str) -> None:
    whole, resumed = results[run, WHOLE], results[run, BEGUN[run]]
    after = {key: loss for key, loss in whole.losses().items() if key[1] > SAVED_AT[run]}
    assert resumed.losses() == after
    expected = load_weights(whole.output)
    weights = load_weights(resumed.output)
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("run", "layout"), [(run, layout) for run in OTHERS for layout in OTHERS[run]]
)
def test_any_other_layout_goes_on_with_the_same_losses(
    results: Results, run: str, layout: str
) -> None:
    agree = {ADAM: agree_with_adam, SGD: agree_with_sgd}[run]
    agree(results[run, WHOLE], results[run, layout])


def agree_with_sgd(whole: Result, resumed: Result) -> None:
    """Assert that a resumed run has the losses of the whole one."""
    expected = whole.losses()
    losses = resumed.losses()
    assert len(losses) == sum(step > SAVED_AT[SGD] for _, step in expected)
    for key, loss in losses.items():
        assert loss == pytest.approx(expected[key], rel=EVALUATED), key


def agree_with_adam(whole: Result, resumed: Result) -> None:
    """Assert that a resumed run has the losses of the whole one, as far as Adam can."""
    expected, losses = whole.losses(), resumed.losses()
    may_differ = adam_may_differ(whole, SAVED_AT[ADAM])
    assert max(may_differ.values()) < 2e-5 * expected["train", 12], "it says something"
    assert len(losses) == sum(step > SAVED_AT[ADAM] for _, step in expected)
    for (name, step), loss in losses.items():
        # A validation before the update of its step.
        assert abs(loss - expected[name, step]) <= may_differ[step], (name, step)


@pytest.mark.parametrize("run", RUNS)
def test_what_the_metrics_tell(results: Results, run: str) -> None:
    whole, resumed = results[run, WHOLE], results[run, BEGUN[run]]
    saved = [event["step"] for event in events(whole.metrics, "checkpoint")]
    assert saved == {ADAM: [5, 10, 12], SGD: [3, 6, 12]}[run]
    for event in events(whole.metrics, "checkpoint"):
        name = f"step-{event['step']:07d}"
        files = (whole.checkpoints / name).glob("*.safetensors")
        assert event["bytes"] == sum(path.stat().st_size for path in files)
        assert event["exposed_seconds"] >= 0
    (event,) = events(resumed.metrics, "resume")
    assert event["step"] == SAVED_AT[run]
    if run == ADAM:  # on two stages, as on the page
        on_the_page = re.findall(r"^ {8}(\S+)", shown("stop-and-resume.md", "checkpoint"), re.M)
        assert {path.name for path in (whole.checkpoints / name).iterdir()} == {*on_the_page}
    (summary,) = events(whole.metrics, "summary")
    assert events(resumed.metrics, "summary")[0]["tokens"] == summary["tokens"]


# Without a shared disk: each rank works in a directory of its own.


def apart(homes: Sequence[Path], flags: Sequence[str]) -> Job:
    """Run ``shardmlx.train`` on a rank for each of ``homes``, which is where that rank works."""
    places = ",".join(map(str, homes))
    return run_in_pool(len(homes), PROGRAMS / "train_apart.py", places, *flags)


def test_without_a_shared_disk(results: Results, small: Path, pirate: Path, tmp_path: Path) -> None:
    """Parts that lie on several disks are in tests/lab/test_train_lab.py."""
    models = {"small": small}
    flags, result = arguments("lora", tmp_path, models, pirate, checkpoint_dir="checkpoints")
    homes = [tmp_path / name for name in "abc"]
    apart(homes, flags).well()
    assert not (homes[1] / "checkpoints").exists(), "all went to rank 0's disk"
    for step in (10, 12):
        shutil.rmtree(homes[0] / "checkpoints" / f"step-{step:07d}")
    result.metrics.unlink()
    apart([homes[0], homes[2]], flags).well()
    agree_with_adam(results[ADAM, WHOLE], result)
