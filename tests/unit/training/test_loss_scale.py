"""A factor of the loss keeps what float16 loses: it grows and halves as torch's and Apex's do, all
ranks skip the same updates, and a checkpoint has it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.checkpoint.store import Store
from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import split
from shardmlx.errors import AgreedFailure
from shardmlx.training.command import train_model
from shardmlx.training.loss_scale import LossScale
from testbed.runs import events
from tests.helpers.checkpoints import Bytes, as_bytes
from tests.helpers.engines import engine_of
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, load_arrays, random_batch, tiny_model

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


def grad_scaler(overflows: Sequence[bool]) -> list[float]:
    """Return torch.amp.GradScaler's scale after each step, with Apex's limit of 2**24: begin with
    2**16, halve at an overflow, double after 2000 steps in a row without one."""
    scale, growth, found = 65536.0, 0, []
    for overflow in overflows:
        growth = 0 if overflow else growth + 1
        if overflow:
            scale *= 0.5
        elif growth == 2000:
            scale, growth = min(2 * scale, 2.0**24), 0
        found.append(scale)
    return found


def test_a_dynamic_factor_is_that_of_torch() -> None:
    random = np.random.RandomState(0)
    steps = [*(random.rand(9000) < 1 / 4000), True, True, *[False] * 1999, True, *[False] * 30000]
    scale = LossScale.of("dynamic")
    found = []
    for overflow in steps:
        scale = scale.after_overflow() if overflow else scale.after_update()
        found.append(scale.factor)
    again = LossScale.of("dynamic").restored(json.loads(json.dumps(scale.state())))
    assert again == scale
    assert found == grad_scaler(steps)
    assert {32768.0, 2.0**24} <= set(found)


def test_a_number_stays_and_none_is_1() -> None:
    for option, factor in ((1024, 1024.0), (0.5, 0.5), (None, 1.0)):
        scale = LossScale.of(option)
        for _ in range(5000):
            scale = scale.after_update()
        assert (scale.factor, scale.can_fall) == (factor, False)
        assert scale.restored([8.0, 3]).factor == factor


def test_below_1_no_factor_helps() -> None:
    scale = LossScale.of("dynamic")
    for _ in range(16):
        assert scale.can_fall
        scale = scale.after_overflow()
    assert (scale.factor, scale.can_fall) == (1.0, False)


@pytest.mark.parametrize("layout", [Layout("1f1b", 1), Layout("zb-v", 2, 2)], ids=str)
def test_float16_keeps_gradients_that_would_vanish(layout: Layout) -> None:
    """Of a loss of a millionth they are mostly below 6e-8, where float16 ends."""
    layers = layout.pp * layout.virtual
    batch = random_batch(4, 0)

    def gradients(dtype: mx.Dtype, factor: float) -> dict[str, np.ndarray]:
        models = [tiny_model(layers=layers) for _ in range(layout.ranks)]
        for model in models:
            model.set_dtype(dtype)
            mx.eval(model.parameters())
        plan = layout.plan(layers, 4)

        def work(transport: LocalTransport) -> dict[str, np.ndarray]:
            engine = engine_of(transport, plan, models[transport.rank])
            scale = 1e-6 * factor / batch.valid_tokens
            engine.train_step(split(batch, 1, 0, 1), scale=scale)
            return {
                name: np.array(each.astype(mx.float32)) / factor
                for stage in engine.stages.values()
                for name, each in stage.gradients.items()
            }

        found: dict[str, np.ndarray] = {}
        for of_rank in LocalNetwork(layout.ranks).run(work):
            found |= of_rank
        return found

    exact = gradients(mx.float32, 1.0)
    lost, kept = (gradients(mx.float16, factor) for factor in (1.0, 65536.0))
    for name, gradient in exact.items():
        size = np.linalg.norm(gradient)
        assert np.linalg.norm(kept[name] - gradient) < 0.02 * size, name
    assert any(
        np.linalg.norm(lost[name] - each) > 0.9 * np.linalg.norm(each)
        for name, each in exact.items()
    )


COMMON: dict[str, Any] = {
    "batch_size": 4,
    "micro_batch_size": 1,
    "num_layers": -1,
    "iters": 4,
    "learning_rate": 1e-3,
    "val_batches": 0,
    "pack": False,
    "steps_per_report": 1,
    "checkpoint_every": 1,
    "keep_checkpoints": 99,
}
FULL: dict[str, Any] = {"fine_tune_type": "full", "unfreeze_all": True}
SHORT: dict[str, Any] = {**FULL, "dtype": "float16", "master_weights": True}

TOO_LARGE, STEPS = 23, 6
"""The power of 2 from which a run comes down to one that fits, and its steps."""


class Run:
    """A run on ranks that are threads, and what it has left in ``place``."""

    def __init__(self, place: Path, ranks: int, model: Path, data: Path, **options: Any) -> None:
        self.store = Store(place / "checkpoints")
        self.metrics = place / "metrics.jsonl"
        config = TrainConfig.from_flat(
            **{**COMMON, **options},
            model=str(model),
            data=str(data),
            adapter_path=str(place / "out"),
            checkpoint_dir=str(self.store.directory),
            metrics_file=str(self.metrics),
        )
        LocalNetwork(ranks, timeout=60).run(lambda transport: train_model(config, transport))
        self.weights: Bytes = as_bytes(load_arrays(*(place / "out").glob("*.safetensors")))

    def saved(self, kind: str) -> Bytes:
        directory = self.store.path(self.store.steps()[-1])
        return as_bytes(load_arrays(*directory.glob(f"{kind}-*.safetensors")))

    @property
    def states(self) -> dict[int, list[float]]:
        return {step: self.store.manifest(step).state["loss_scale"] for step in self.store.steps()}


def resumed_from(before: Run, step: int, place: Path, factor: float | None = None) -> None:
    """Leave in ``place`` the checkpoint of a step alone, with another factor if one is given."""
    store = Store(place / "checkpoints")
    manifest = before.store.manifest(step)
    partial = store.begin(step)
    for file in manifest.files:
        shutil.copy(before.store.path(step) / file.name, partial)
    scale = manifest.state["loss_scale"] if factor is None else [factor, 0]
    store.commit(replace(manifest, state={**manifest.state, "loss_scale": scale}))


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="lora"),
        pytest.param(2, {**FULL, "pipeline_stages": 1, "zero": 3}, id="zero 3"),
        pytest.param(2, {**FULL, "pipeline_stages": 2, "schedule": "zb-v"}, id="zb-v"),
        pytest.param(
            4, {**FULL, "pipeline_stages": 2, "grad_accumulation_steps": 2}, id="2 x 2, accumulated"
        ),
    ],
)
def test_in_float32_no_factor_that_is_a_power_of_two_changes_a_bit(
    ranks: int, options: dict[str, Any], small: Path, pirate: Path, tmp_path: Path
) -> None:
    """Clipping included, which needs the norm of the gradients themselves."""
    options = {**options, "max_grad_norm": 0.5, "iters": 2}
    without = Run(tmp_path / "none", ranks, small, pirate, **options)
    scaled = Run(tmp_path / "dynamic", ranks, small, pirate, loss_scale="dynamic", **options)
    assert scaled.weights == without.weights
    assert scaled.saved("optimizer") == without.saved("optimizer")
    assert "loss_scale" not in without.store.manifest(2).state


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, id="1 rank"),
        pytest.param(4, {"pipeline_stages": 2, "zero": 1}, id="2 x 2"),
    ],
)
def test_an_update_that_overflows_is_skipped_by_all_ranks_and_counted(
    ranks: int, layout: dict[str, Any], small: Path, pirate: Path, tmp_path: Path
) -> None:
    """From a factor that is too large for float16 the run comes down to one that fits."""
    options = {**SHORT, **layout, "loss_scale": "dynamic", "iters": STEPS}
    first = Run(tmp_path / "first", ranks, small, pirate, **{**options, "iters": 1})
    place = tmp_path / "too-large"
    resumed_from(first, 1, place, factor=2.0**TOO_LARGE)
    run = Run(place, ranks, small, pirate, **options)
    reports = events(run.metrics, "train")
    skipped = reports[-1]["skipped"]
    assert 1 < skipped < STEPS - 1
    assert [each["step"] for each in reports] == list(range(2 + skipped, STEPS + 1)), (
        "others have no loss"
    )
    fitting = 2.0 ** (TOO_LARGE - skipped)
    assert {each["loss_scale"] for each in reports} == {fitting}
    states = run.states
    for step in range(1, STEPS + 1):
        lost = min(step - 1, skipped)
        made = 0 if 1 < step <= skipped + 1 else step - 1 - lost
        assert states[step] == [2.0 ** (TOO_LARGE - lost), made]
    unchanged = [
        as_bytes(load_arrays(*run.store.path(step).glob("optimizer-*")))
        for step in (1, 1 + skipped)
    ]
    assert unchanged[0] == unchanged[1], "nothing of a skipped update is left, its number neither"
    # A run that was killed among the skips goes on to the bit.
    resumed_from(run, 2, tmp_path / "killed")
    again = Run(tmp_path / "killed", ranks, small, pirate, **options)
    assert again.weights == run.weights
    assert again.states.items() <= states.items()


def test_a_number_that_is_too_large_ends_the_run_with_the_remedy(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    with pytest.raises(AgreedFailure) as ended:
        Run(tmp_path, 2, small, pirate, **SHORT, pipeline_stages=2, loss_scale=1e12)
    assert "step 1: the gradient of " in str(ended.value)
    assert "give loss_scale: dynamic in the YAML file" in str(ended.value)
    skips = {**SHORT, "pipeline_stages": 2, "loss_scale": 1e12, "on_nan": "skip", "iters": 2}
    with pytest.raises(AgreedFailure):
        Run(tmp_path / "skips", 2, small, pirate, **skips)
