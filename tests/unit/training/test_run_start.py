"""What rank 0 knows of where a run begins, before it plans the job."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.checkpoint.resume import CheckpointFacts, RunStart
from shardmlx.checkpoint.store import Store, name_of
from shardmlx.common.digests import file_digest
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.errors import UserError
from shardmlx.training.plan_run import open_for_training, read_sets
from shardmlx.training.run_start import find_start
from shardmlx.training.worker import TrainWorker
from tests.helpers.checkpoints import flip, manifest_of
from tests.helpers.loaded_runs import QUIET
from tests.helpers.local_transport import LocalTransport, alone
from tests.helpers.preference_data import preference_directory, write_own_objective

FILE = "weights-00.safetensors"


def found(model: Path, data: Path, **options: Any) -> tuple[RunStart, CheckpointFacts]:
    """Return what one rank finds out for a run with these options."""
    config = TrainConfig.from_flat(model=str(model), data=str(data), iters=300, **options)

    def find(crew: Crew[TrainWorker]) -> tuple[RunStart, CheckpointFacts]:
        opened = open_for_training(config, crew, QUIET)
        return find_start(config, read_sets(config, opened, QUIET), crew)

    def work(transport: LocalTransport) -> tuple[RunStart, CheckpointFacts]:
        with closing(TrainWorker(transport, QUIET)) as worker:
            return lead(transport, worker, find) or pytest.fail("rank 0 has an answer")

    return alone(work)


def identity_of(start: RunStart) -> Any:
    assert start.identity is not None
    return start.identity


def put(directory: Path, data: Any) -> Path:
    """Write a checkpoint of a run with these facts of its ``data``; return its directory."""
    store = Store(directory)
    (store.begin(100) / FILE).write_bytes(b"0")
    store.commit(replace(manifest_of(100, {FILE: b"0"}), identity={"data": data}))
    return store.path(100)


def test_a_run_that_saves_nothing_and_goes_on_from_nothing_needs_no_identity(
    small: Path, pirate: Path
) -> None:
    start, seen = found(small, pirate)
    assert (start.identity, start.iters, start.step) == (None, 300, None)
    assert (seen.own, seen.source) == (None, None)


def test_a_run_that_saves_is_known_by_model_data_and_options(
    small: Path, pirate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = tmp_path / "c"
    (tmp_path / "sft.py").touch()  # a module that is called as the objective is
    monkeypatch.syspath_prepend(tmp_path)
    schedule = {"name": "cosine_decay"}
    start, seen = found(
        small,
        pirate,
        checkpoint_dir=str(checkpoints),
        resume="never",
        seed=5,
        lr_schedule=schedule,
    )
    identity = identity_of(start)
    assert (identity["model"]["layers"], identity["model"]["dtype"]) == (5, "float32")
    assert identity["options"]["seed"] == 5
    assert identity["optimizer"]["usual_settings"] == {"betas": [0.9, 0.999], "eps": 1e-8} | {
        "bias_correction": False
    }
    assert (identity["start"]["sha256"], identity["objective"]) == (None, None)
    assert identity["optimizer"]["open_schedule"] == schedule
    assert seen.own is not None
    assert seen.own.store == Store(checkpoints)


@pytest.mark.parametrize("is_named", [False, True])
def test_sets_are_known_as_the_checkpoint_that_it_may_go_on_from_knows_them(
    small: Path, pirate: Path, tmp_path: Path, is_named: bool
) -> None:
    """By their rows, if that was so then, even where all rows have become tokens by now."""
    path = put(tmp_path / "c", {"train": {"content": "of rows"}})
    options = {"resume": str(path)} if is_named else {"checkpoint_dir": str(path.parent)}
    data = identity_of(found(small, pirate, **options)[0])["data"]
    assert ("content" in data["train"], "sha256" in data["train"]) == (True, False)
    assert ("content" in data["valid"], "sha256" in data["valid"]) == (False, True)


@pytest.mark.parametrize("damage", ["the file", "what it says of data"])
def test_a_checkpoint_that_is_not_sound_says_nothing_of_the_sets(
    small: Path, pirate: Path, tmp_path: Path, damage: str
) -> None:
    is_of_file = damage == "the file"
    path = put(tmp_path / "c", {"train": {"content": "of rows"}} if is_of_file else ["train"])
    if is_of_file:
        flip(path / FILE)
    data = identity_of(found(small, pirate, checkpoint_dir=str(path.parent))[0])["data"]
    assert "sha256" in data["train"]


def test_files_that_decide_the_losses_are_known_by_their_content(
    small: Path, pirate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = preference_directory(tmp_path, pirate) / "pairs"
    monkeypatch.syspath_prepend(tmp_path)
    objective = write_own_objective(tmp_path)
    adapters = tmp_path / "adapters.safetensors"
    weight = mx.zeros((8, 64))
    mx.save_safetensors(str(adapters), {"model.layers.0.self_attn.q_proj.lora_a": weight.T})
    start, _ = found(
        small,
        pairs,
        objective=objective,
        resume_adapter_file=str(adapters),
        checkpoint_dir=str(tmp_path / "c"),
    )
    identity = identity_of(start)
    assert identity["start"]["sha256"] == file_digest(adapters)
    assert identity["objective"] == file_digest(tmp_path / "my_objectives.py")


def test_a_name_that_no_checkpoint_has_is_refused(small: Path, pirate: Path) -> None:
    with pytest.raises(UserError) as refused:
        found(small, pirate, resume="checkpoints/newest")
    assert name_of(100) in refused.value.remedy
