"""Adapters that train side by side learn what each would alone."""

from __future__ import annotations

import shutil
import signal
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml

from shardmlx.config.sweep import check_replicas, read_sweep
from shardmlx.config.train import TrainConfig
from shardmlx.errors import AgreedFailure, Stopped, UserError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.training.command import train_model
from tests.helpers.loaded_runs import loaded_runs
from tests.helpers.local_transport import LocalNetwork, LocalTransport, alone
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.preference_data import preference_directory, write_own_objective

RUNS: dict[str, dict[str, Any]] = {
    "small": {"lora_parameters": {"rank": 2, "scale": 10.0}, "learning_rate": 1e-3},
    "steep": {"learning_rate": 1e-2, "seed": 7, "max_grad_norm": 0.5},
    "drops": {"lora_parameters": {"dropout": 0.2}, "optimizer": "sgd"},
}

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


@pytest.fixture
def options(small: Path, pirate: Path, tmp_path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"batch_size": 4, "micro_batch_size": 2, "iters": 4, "num_layers": -1}
    options |= {"steps_per_report": 1, "steps_per_eval": 2, "val_batches": 1}
    options |= {"lr_schedule": "cosine_decay", "pack": False, "recompute": "none"}
    options |= {"model": str(small), "data": str(pirate), "adapter_path": str(tmp_path / "out")}
    options |= {"lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    return options | {"max_seq_length": 32}


def curves(options: Mapping[str, Any], ranks: int = 1) -> dict[str, list[tuple[str, int, float]]]:
    """Return the losses of each run by its name, "" for one alone."""
    found: defaultdict[str, list[tuple[str, int, float]]] = defaultdict(list)

    def listen(event: str, values: Mapping[str, Any]) -> None:
        if event in ("train", "val"):
            found[values.get("run", "")].append((event, values["step"], values["loss"]))

    config = TrainConfig.from_flat(**options)
    LocalNetwork(ranks, timeout=60).run(lambda rank: train_model(config, rank, on_event=listen))
    return dict(found)


def swept(
    options: Mapping[str, Any], tmp_path: Path, runs: Mapping[str, Any] = RUNS
) -> dict[str, Any]:
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(dict(runs)))
    return {**options, "sweep": str(file)}


def by_itself(
    options: dict[str, Any], name: str, tmp_path: Path, runs: Mapping[str, Any] = RUNS
) -> dict[str, Any]:
    changes = runs[name]
    lora = {**options["lora_parameters"], **changes.get("lora_parameters", {})}
    place = str(tmp_path / "alone" / name)
    return {**options, **changes, "lora_parameters": lora, "adapter_path": place}


def test_a_run_may_have_an_alpha_where_all_have_a_scale(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = TrainConfig.from_flat(
        **swept(options, tmp_path, {"a": {"lora_parameters": {"alpha": 8}}})
    )
    assert read_sweep(config)["a"].tune.lora_parameters == {"rank": 4, "scale": 2.0, "dropout": 0.0}


def test_a_run_may_have_keys_of_the_adapters_as_options(
    options: dict[str, Any], tmp_path: Path
) -> None:
    runs: dict[str, Any] = {"a": {"lora_rank": 2}, "b": {"lora_alpha": 8, "lora_dropout": 0.5}}
    read = read_sweep(TrainConfig.from_flat(**swept(options, tmp_path, runs)))
    assert read["a"].tune.lora_parameters == {"rank": 2, "scale": 20.0, "dropout": 0.0}
    assert read["b"].tune.lora_parameters == {"rank": 4, "scale": 2.0, "dropout": 0.5}


def test_curves_and_adapters_are_those_of_their_own_runs(
    options: dict[str, Any], tmp_path: Path
) -> None:
    expected = {name: curves(by_itself(options, name, tmp_path))[""] for name in RUNS}
    found = curves({**swept(options, tmp_path), "schedule": "interleaved-1f1b"}, ranks=2)
    assert found.keys() == expected.keys()
    for name, curve in found.items():
        assert [each[:2] for each in curve] == [each[:2] for each in expected[name]]
        losses = [each[2] for each in expected[name]]
        assert [each[2] for each in curve] == pytest.approx(losses, rel=1e-5)
        weights = load_arrays(tmp_path / "alone" / name / "adapters.safetensors")
        ours = load_arrays(tmp_path / "out" / name / "adapters.safetensors")
        assert ours.keys() == weights.keys()
        for key, array in ours.items():
            assert mx.allclose(array, weights[key], atol=1e-5).item(), key


def test_runs_have_their_own_rows_and_objectives(
    options: dict[str, Any], pirate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    rows = preference_directory(tmp_path, pirate)
    pairs, singles = str(rows / "pairs"), str(rows / "singles")
    runs: dict[str, dict[str, Any]] = {
        "masked": {"mask_prompt": True},
        "dpo": {"data": pairs, "objective": "dpo", "loss_type": "hinge"},
        "kto": {"data": singles, "objective": "kto", "beta": 0.5},
    }
    options |= {"epochs": 0.25, "val_batches": 1, "learning_rate": 1e-3, "pack": True}
    own = {"own": {"data": pairs, "objective": write_own_objective(tmp_path)}}
    found = curves(swept(options, tmp_path, runs | own), ranks=2)
    assert found.pop("own") == found["dpo"]
    assert found.keys() == runs.keys()
    steps = {name: curve[-1][1] for name, curve in found.items()}
    assert steps == {"masked": 2, "dpo": 2, "kto": 1}, "each by rows that are short enough"
    for name, curve in found.items():
        expected = curves(by_itself(options, name, tmp_path, runs))[""]
        assert [each[:2] for each in curve] == [each[:2] for each in expected]
        losses = [each[2] for each in expected]
        assert [each[2] for each in curve] == pytest.approx(losses, rel=1e-5)


def test_a_run_of_another_objective_takes_no_settings_of_the_command(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options |= {"objective": "dpo", "loss_type": "ipo", "beta": 0.5}
    runs = {"same": {"beta": 0.2}, "other": {"objective": "orpo"}}
    found = read_sweep(TrainConfig.from_flat(**swept(options, tmp_path, runs)))
    assert (found["same"].loss.loss_type, found["same"].loss.beta) == ("ipo", 0.2)
    assert (found["other"].loss.loss_type, found["other"].loss.beta) == ("sigmoid", None)


def test_runs_resume_each_from_its_own_checkpoint(options: dict[str, Any], tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints"
    options |= {"checkpoint_dir": str(kept), "checkpoint_every": 1}
    whole = curves(swept(options, tmp_path))
    shutil.rmtree(kept / "small" / "step-0000004")
    shutil.rmtree(kept / "steep")
    found = curves(swept(options, tmp_path))
    assert found.keys() == {"small", "steep"}, "the third has all its steps"
    for name, since in (("small", 4), ("steep", 1)):
        expected = [each for each in whole[name] if each[1] >= since]
        assert [each[:2] for each in found[name]] == [each[:2] for each in expected]
        assert [each[2] for each in found[name]] == pytest.approx([each[2] for each in expected])


class FromTheFifthLookOn(LocalTransport):
    """A rank that hears a signal when it is asked for the fifth time."""

    def __init__(self, network: LocalNetwork, rank: int) -> None:
        super().__init__(network, rank)
        self._looks = count(1)

    def stop_requested(self) -> int | None:
        return signal.SIGTERM if next(self._looks) > 4 else None


def test_all_runs_stop_at_a_signal_that_some_hear_a_step_later(
    options: dict[str, Any], tmp_path: Path
) -> None:
    options |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "val_batches": 0}
    config = TrainConfig.from_flat(**swept(options, tmp_path))
    with pytest.raises(Stopped):
        train_model(config, FromTheFifthLookOn(LocalNetwork(1), 0))
    kept = {path.parent.name: path.name for path in (tmp_path / "checkpoints").rglob("step-*")}
    assert kept == dict.fromkeys(RUNS, "step-0000001")
    found = curves(swept(options, tmp_path))
    expected = curves(swept(options | {"checkpoint_dir": None}, tmp_path))
    for name, curve in found.items():
        losses = [loss for _, _, loss in expected[name][1:]]
        assert [loss for _, _, loss in curve] == pytest.approx(losses)


def test_a_run_that_fails_ends_no_other_and_the_best_is_named(
    options: dict[str, Any], tmp_path: Path
) -> None:
    told: list[Mapping[str, Any]] = []

    def listen(event: str, values: Mapping[str, Any]) -> None:
        told.extend([values] if event == "sweep" else [])

    runs = {"wild": {"learning_rate": 1e30}, "still": {"learning_rate": 1e-6}, **RUNS}
    config = TrainConfig.from_flat(**swept(options, tmp_path, runs))
    alone(lambda rank: train_model(config, rank, on_event=listen))
    (values,) = told
    found = values["runs"]
    assert "nan" in found["wild"]["failure"]
    losses = {name: each["best"] for name, each in found.items() if name != "wild"}
    assert losses.keys() == {"still", *RUNS}
    assert values["best"] == [min(losses, key=lambda name: losses[name])]
    assert values["best"] != ["still"]
    with pytest.raises(AgreedFailure, match="nan"):
        curves(swept(options, tmp_path, {"wild": runs["wild"]}))


def test_frozen_weights_are_in_memory_once(options: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig.from_flat(**swept(options, tmp_path))
    runs = alone(lambda rank: loaded_runs(config, rank))
    first, *others = ([stage.part for stage in run.stages] for run in runs)
    assert len(others) == 2
    for parts in others:
        for part, same in zip(parts, first, strict=True):
            for name, array in part.parameters().items():
                assert (array is same[name]) == (name not in part.trainable), name


@pytest.mark.parametrize(
    ("runs", "changes", "named"),
    [
        ({"a": {"batch_size": 8}}, {}, "batch_size"),
        ({"a": {"iters": 8}}, {}, "iters"),
        ({"a": {"lora_parameters": {"keys": ["self_attn.q_proj"]}}}, {}, "keys"),
        ({"a": {"lora_keys": ["self_attn.q_proj"]}}, {}, "keys"),
        ({"a": {"lora_rank": 0}}, {}, "lora_rank is 0"),
        ({"a": {"lora_rank": 2, "lora_parameters": {"rank": 4}}}, {}, "rank 4"),
        ({"a": {"learning_rate": -1}}, {}, "learning_rate"),
        ({"a": {"beta": 0.5}}, {}, "beta"),
        ({"a": {"objective": "dpo"}}, {"mask_prompt": True}, "mask_prompt"),
        ({"a": {"objective": "dpo"}}, {"micro_batch_size": 1}, "micro-batch-size"),
        ({"a/b": {}}, {}, "a/b"),
        ({"a": 3}, {}, "3"),
        ({"A": {}, "a": {"seed": 1}}, {}, "A, a"),
        ({}, {}, "no run"),
        ({f"r{i}": {} for i in range(17)}, {}, "17"),
        (RUNS, {"fine_tune_type": "full"}, "full"),
        (RUNS, {"resume": "some/where"}, "some/where"),
        (RUNS, {"report_to": "wandb"}, "wandb"),
    ],
)
def test_what_runs_cannot_have_of_their_own_is_refused_by_name(
    runs: Mapping[str, Any],
    changes: Mapping[str, Any],
    named: str,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=named):
        curves({**swept(options, tmp_path, runs), **changes})


def test_a_sweep_has_one_replica(options: dict[str, Any], tmp_path: Path) -> None:
    config = TrainConfig.from_flat(**swept(options, tmp_path))
    check_replicas(config, Mesh(dp=1, pp=2))
    with pytest.raises(UserError) as refused:
        check_replicas(config, Mesh(dp=2, pp=1))
    assert "2 replicas" in refused.value.problem
    assert refused.value.remedy == "give --pipeline-stages 2"
