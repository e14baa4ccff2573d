"""Which checkpoint a run goes on from, and what it refuses, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmlx.checkpoint.resume import RunStart
from shardmlx.checkpoint.run_identity import SetFacts, identity_of
from shardmlx.checkpoint.store import MARKER, Store
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.agreement import AgreedError
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.checkpoints import begun, flip, hosts, led, save


def resume(
    directories: Sequence[Path],
    resume: str = "auto",
    *,
    save_to: Sequence[Path] | None = None,
    identity: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[int, list[str]]:
    """(step, warnings) of a run on two pipeline ranks whose checkpoints lie there."""

    saved = save_to or directories
    named = resume if resume in ("auto", "never") else str(directories[0] / resume)
    config = TrainConfig.from_flat(
        model="m",
        data="d",
        **{"checkpoint_dir": str(saved[0]), "resume": named, "iters": 1000, **options},
    )
    start = RunStart(options=config.checkpoints, iters=config.iters, identity=identity)
    resumption = led(directories, lambda crew: begun(crew, start, 2), saved)
    found = resumption.found
    return 0 if found is None else found.manifest.step, [*resumption.warnings]


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(AgreedError) as refused:
        resume(*args, **options)
    return str(refused.value)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_a_run_without_checkpoints_starts_anew(tmp_path: Path) -> None:
    for choice in ("auto", "never"):
        assert resume(hosts(tmp_path, "aa"), choice) == (0, [])


def test_a_damaged_one_is_passed_over_named_and_set_aside(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "aa")
    save(directories, "shared", 2, [100, 200])
    path = Store(directories[0]).path(200) / "weights-01.safetensors"
    flip(path)
    step, (warning,) = resume(directories)
    assert step == 100
    assert warning.startswith(f"damaged checkpoint passed over: {path}: its sha256 is ")
    assert names(directories[0]) == ["damaged-step-0000200", "step-0000100"]


@pytest.mark.parametrize("choice", ["auto", "never", "step-0000100"])
def test_what_is_called_a_checkpoint_and_lacks_its_marker_is_none(
    tmp_path: Path, choice: str
) -> None:
    """Nothing is done to it."""
    directories = hosts(tmp_path, "ab")
    save(directories, "neighbour", 2, [100] if choice.startswith("step") else [])
    for directory in directories:
        (directory / "step-0000200").mkdir(parents=True)
        (directory / "step-0000200" / "weights-00.safetensors").write_bytes(b"half")
    before = names(directories[0])
    assert resume(directories, choice) == (100 if choice.startswith("step") else 0, [])
    assert names(directories[0]) == before


def test_where_none_is_sound_nothing_is_begun_in_its_place(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "aa")
    save(directories, "shared", 2, [100])
    flip(Store(directories[0]).path(100) / MARKER)
    text = refusal(directories)
    assert text.startswith("--resume auto: no checkpoint is sound: ")
    assert names(directories[0]) == ["step-0000100"]


@pytest.mark.parametrize("storage", ["auto", "rank0", "neighbour"])
def test_what_a_run_that_was_set_back_leaves_behind_is_set_aside_on_every_disk(
    tmp_path: Path, storage: str
) -> None:
    directories = hosts(tmp_path, "ab")
    save(directories, "neighbour", 2, [100, 200])
    assert resume(directories, "step-0000100", checkpoint_storage=storage) == (100, [])
    for directory in directories:
        assert names(directory) == ["step-0000100", "superseded-step-0000200"]
    save(directories, "rank0", 2, [150])
    assert resume(directories) == (150, [])


def test_a_disk_that_saves_nothing_now_may_hold_what_another_run_saved(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "ab")
    save(directories[1:], "shared", 1, [100])
    assert "another run, up to step 100" in refusal(directories, "never")


def test_another_runs_checkpoint_may_be_gone_on_from_in_an_empty_directory(tmp_path: Path) -> None:
    directories, elsewhere = hosts(tmp_path, "aa"), hosts(tmp_path, "xx")
    save(directories, "shared", 2, [100, 200])
    assert resume(directories, "step-0000100", save_to=elsewhere) == (100, [])
    assert names(directories[0]) == ["step-0000100", "step-0000200"]
    save(elsewhere, "shared", 2, [150])
    text = refusal(directories, "step-0000100", save_to=elsewhere)
    assert "another run, up to step 150" in text


@pytest.mark.parametrize("choice", ["step-0000300", "weights"])
def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path, choice: str) -> None:
    directories = hosts(tmp_path, "aa")
    save(directories, "shared", 2, [100])
    assert f"--resume {directories[0] / choice}" in refusal(directories, choice)


def test_a_checkpoint_beyond_the_last_step_is_refused(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "aa")
    save(directories, "shared", 2, [100])
    assert resume(directories, iters=100) == (100, [])
    assert "--iters 99" in refusal(directories, iters=99)


def test_what_another_run_saved_is_refused_on_all_ranks_and_left_as_it_is(tmp_path: Path) -> None:
    directories = hosts(tmp_path, "aa")
    save(directories, "shared", 2, [100])
    save_model_directory(tmp_path / "model", tiny_config(layers=1))
    options = TrainConfig.from_flat(model="m", data="d").flat()
    mine = identity_of(options, tmp_path / "model", SetFacts.of([([1, 2], 0)]), SetFacts.of([]))
    assert "does not say which run it is of" in refusal(directories, identity=mine)
    assert names(directories[0]) == ["step-0000100"]
