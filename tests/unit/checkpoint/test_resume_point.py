"""Rank 0 decides from which checkpoint a run goes on by what ranks have told: plain Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.checkpoint.resume import (
    CheckedVersion,
    CheckpointFacts,
    Resumption,
    RunStart,
    SeenDirectory,
    resume_point,
)
from shardmlx.checkpoint.run_identity import SetFacts, identity_of
from shardmlx.checkpoint.store import Manifest, Store
from shardmlx.config.train import CheckpointOptions, TrainConfig
from shardmlx.distributed.shared_disks import Disks
from shardmlx.errors import UserError
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.checkpoints import manifest_of

NAMES = ("rank 0 on mac-a", "rank 1 on mac-b")
SHARED = Disks(((0, 1),), (None, None))
APART = Disks(((0,), (1,)), (None, None))

FILES = {"weights-00.safetensors": b"0", "weights-01.safetensors": b"1"}


def checked(step: int, *where: tuple[int, ...]) -> CheckedVersion:
    """Return a checkpoint whose two files have a sound copy on these disks each; a file without any
    is missing."""
    sound = dict(zip(FILES, where, strict=True))
    faults = [f"{name} of step {step} is missing" for name in FILES if not sound[name]]
    return CheckedVersion(manifest_of(step, FILES), sound, tuple(faults))


def directory(name: str, disks: Disks, *found: CheckedVersion) -> SeenDirectory:
    """Return what ranks see there: each checkpoint on all disks."""
    on_all = range(len(disks.groups))
    versions = {each.manifest.step: dict.fromkeys(on_all, each.manifest) for each in found}
    return SeenDirectory(Store(Path(name)), disks, versions, found)


def decided(
    own: SeenDirectory | None,
    source: SeenDirectory | None = None,
    *,
    owners: int = 2,
    iters: int = 1000,
    **options: Any,
) -> Resumption:
    """Return the start of a run that saves in ``own``, and looks in ``source``: or in the same, if
    there is none, unless it never goes on."""
    if own is not None:
        options["checkpoint_dir"] = str(own.store.directory)
    looked = own if source is None and options.get("resume") != "never" else source
    start = RunStart(options=CheckpointOptions(**options), iters=iters)
    return resume_point(start, CheckpointFacts(names=NAMES, own=own, source=looked), owners)


def step_of(resumption: Resumption) -> int | None:
    return None if resumption.found is None else resumption.found.manifest.step


def test_a_checkpoint_that_only_all_ranks_together_have_is_whole() -> None:
    own = directory("c", APART, checked(200, (0,), (1,)), checked(100, (0, 1), (0, 1)))
    resumption = decided(own)
    assert resumption.found is not None
    assert step_of(resumption) == 200
    assert resumption.found.disks == {
        "weights-00.safetensors": (0,),
        "weights-01.safetensors": (1,),
    }
    assert resumption.superseded_after == 200
    assert (resumption.damaged, resumption.warnings) == ((), ())


def test_the_newest_that_is_sound_is_taken_and_damaged_ones_are_named() -> None:
    own = directory("c", SHARED, checked(300, (0,), ()), checked(200, (0,), (0,)))
    resumption = decided(own)
    assert step_of(resumption) == 200
    assert resumption.damaged == (300,)
    (warning,) = resumption.warnings
    assert "weights-01.safetensors of step 300 is missing" in warning


@pytest.mark.parametrize(
    ("disks", "wanted", "owners", "kind", "writers"),
    [
        (SHARED, "auto", 2, "shared", {0, 1}),
        (SHARED, "auto", 1, "shared", {0}),  # of two replicas the first saves
        (APART, "auto", 2, "rank0", {0}),
        (APART, "neighbour", 1, "neighbour", {0, 1}),
    ],
)
def test_any_layout_goes_on_from_the_same_and_saves_where_its_own_ranks_can(
    disks: Disks, wanted: str, owners: int, kind: str, writers: set[int]
) -> None:
    own = directory("c", disks, checked(100, (0,), (0,)))
    resumption = decided(own, owners=owners, checkpoint_storage=wanted)
    assert step_of(resumption) == 100
    assert resumption.place is not None
    assert resumption.place.storage.kind == kind
    assert resumption.place.storage.writers == frozenset(writers)


@pytest.mark.parametrize("resume", ["never", "elsewhere/step-0000100"])
def test_two_runs_in_one_directory_are_refused(resume: str) -> None:
    own = directory("c", SHARED, checked(100, (0,), (0,)), checked(250, (0,), (0,)))
    elsewhere = directory("elsewhere", SHARED, checked(100, (0,), (0,)))
    source = None if resume == "never" else elsewhere
    with pytest.raises(UserError) as refused:
        decided(own, source, resume=resume)
    assert "another run, up to step 250" in refused.value.problem
    assert f"--resume {resume}" in refused.value.problem
    empty = directory("c", SHARED)
    resumption = decided(empty, source, resume=resume)
    assert step_of(resumption) == (None if source is None else 100)
    assert resumption.superseded_after is None


def test_a_run_that_names_one_takes_it_and_departs_from_later_ones() -> None:
    own = directory("c", SHARED, checked(200, (0,), (0,)), checked(100, (0,), (0,)))
    resumption = decided(own, resume="c/step-0000100")
    assert step_of(resumption) == 100
    assert resumption.superseded_after == 100
    assert step_of(decided(None, own, resume="c/step-0000100")) == 100
    assert decided(None, own, resume="c/step-0000100").superseded_after is None
    assert not CheckpointFacts(names=NAMES, source=own).own_is_source


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "no checkpoint is sound"),
        ({"resume": "c/step-0000300"}, "no checkpoint is sound"),
        ({"resume": "c/step-0000400"}, "there is no complete checkpoint"),
    ],
)
def test_where_none_is_sound_nothing_is_begun_in_its_place(
    options: dict[str, Any], problem: str
) -> None:
    own = directory("c", SHARED, checked(300, (0,), ()))
    with pytest.raises(UserError) as refused:
        decided(own, **options)
    assert problem in refused.value.problem


def test_a_rank_that_cannot_write_its_part_is_named_before_any_checkpoint_is() -> None:
    full = Disks(((0,), (1,)), (None, "Read-only file system"))
    own = directory("c", full, checked(300, (0,), ()))
    with pytest.raises(UserError) as refused:
        decided(own, checkpoint_storage="neighbour")
    assert "rank 1 on mac-b cannot write to --checkpoint-dir" in refused.value.problem


def test_a_checkpoint_beyond_the_last_step_is_refused() -> None:
    own = directory("c", SHARED, checked(300, (0,), (0,)))
    assert step_of(decided(own, iters=300)) == 300
    with pytest.raises(UserError) as refused:
        decided(own, iters=299)
    assert "--iters 299" in refused.value.problem


def test_what_differs_from_the_run_that_saved_is_told_besides_what_was_passed_over(
    tmp_path: Path,
) -> None:
    model = save_model_directory(tmp_path / "model", tiny_config(layers=1))
    large = SetFacts(samples=2, longest=3, content="rows", looked_at="tokens")

    def identity(most: int) -> dict[str, Any]:
        options = TrainConfig.from_flat(model="m", data="d", max_seq_length=most).flat()
        return identity_of(options, model, large, SetFacts.of([]))

    saved = replace(manifest_of(100, FILES), identity=identity(2048))
    sound = CheckedVersion(saved, dict.fromkeys(FILES, (0,)))
    own = directory("c", SHARED, checked(200, (0,), ()), sound)
    options = CheckpointOptions(checkpoint_dir="c")
    start = RunStart(options=options, iters=1000, identity=identity(1024))
    note, passed = resume_point(
        start, CheckpointFacts(names=NAMES, own=own, source=own), 2
    ).warnings
    assert note.startswith("c/step-0000100: ")
    assert "max_seq_length is 1024 from here on, and was 2048" in note
    assert passed.endswith("weights-01.safetensors of step 200 is missing")


def test_a_version_that_more_disks_completed_was_checked_first() -> None:
    """Manifests of one step may differ: the sound one of them is taken."""
    old: Manifest = manifest_of(100, {"weights-00.safetensors": b"old"})
    damaged = CheckedVersion(old, {"weights-00.safetensors": ()}, ("it is damaged",))
    sound = checked(100, (1,), (1,))
    versions = {100: {0: old, 1: sound.manifest}}
    own = SeenDirectory(Store(Path("c")), APART, versions, (damaged, sound))
    resumption = decided(own)
    assert resumption.found is not None
    assert resumption.found.manifest == sound.manifest
    assert (resumption.damaged, resumption.warnings) == ((), ())
