"""Checkpoints on one disk: what is complete, what stays, what goes, and who may write."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from random import Random

import pytest

from shardmlx.checkpoint.store import MANIFEST, MARKER, Store, name_of, step_of
from shardmlx.distributed.shared_disks import PROBE
from shardmlx.errors import UserError
from tests.helpers.checkpoints import NEW, OLD, content, is_sound, names, put
from tests.helpers.worlds.disk import Crash, FailingDisk, Faults


def test_a_checkpoint_is_a_directory_named_for_its_step(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, 100, OLD)
    assert names(store) == {"step-0000100"}
    assert {path.name for path in store.path(100).iterdir()} == {*OLD, MANIFEST, MARKER}
    text = (store.path(100) / MANIFEST).read_bytes()
    digest = hashlib.sha256(text).hexdigest()
    assert (
        store.path(100) / MARKER
    ).read_text() == f"{digest}  {MANIFEST}\n"  # as sha256sum has it


def test_steps_are_those_of_complete_checkpoints_and_only_these_are_pruned(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (20, 3, 12345678, 100):
        put(store, step, OLD)
    store.begin(200)
    (tmp_path / "step-0000300").mkdir()  # without its marker
    put(Store(tmp_path / "elsewhere"), 400, OLD)
    (tmp_path / "elsewhere/step-0000400").rename(tmp_path / "step-400")
    (tmp_path / "step-0000500").touch()
    assert store.steps() == [3, 20, 100, 12345678]
    assert store.prune(4) == []


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-0000100", 100),
        ("step-12345678", 12345678),
        ("step-00000100", None),  # what no checkpoint is called
        ("step-100", None),
        ("step-٠٠٠٠١٠٠", None),
        ("partial-step-0000100", None),
        ("step-0000100.bak", None),
    ],
)
def test_only_the_names_that_a_checkpoint_gets_are_names_of_one(
    name: str, step: int | None
) -> None:
    assert step_of(name) == step


def test_a_rank_may_remove_its_probe_while_a_checkpoint_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.glob

    def glob_and_lose(directory: Path, pattern: str) -> list[Path]:
        lost = [directory / f"{PROBE}3-f00"] if pattern.startswith(PROBE) else []
        return [*listed(directory, pattern), *lost]

    monkeypatch.setattr(Path, "glob", glob_and_lose)
    (tmp_path / f"{PROBE}1-f00").touch()  # of a rank that was killed
    assert Store(tmp_path).begin(3).is_dir()
    assert names(Store(tmp_path)) == {"partial-step-0000003"}


@pytest.mark.parametrize("keep", range(5))
@pytest.mark.parametrize("present", range(5))
def test_pruning_keeps_the_newest_and_never_deletes_the_only_one(
    tmp_path: Path, keep: int, present: int
) -> None:
    store = Store(tmp_path)
    for step in range(1, present + 1):
        put(store, step, OLD)
    kept = list(range(1, present + 1))[-max(1, keep) :]
    assert store.prune(keep) == list(range(1, present + 1 - len(kept)))
    assert store.steps() == kept
    assert not present or names(store) == {*map(name_of, kept)}


def test_a_checkpoint_of_the_same_step_is_set_aside_by_a_new_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, 1, OLD)
    put(store, 1, NEW)
    assert content(store, 1) == NEW
    assert names(store) == {"step-0000001", "superseded-step-0000001"}


def test_a_directory_is_made_with_all_above_it_and_without_it_there_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    assert Store(tmp_path / "nowhere").steps() == []
    assert Store(tmp_path / "a" / "b").begin(1).is_dir()
    Store(tmp_path / "c" / "d").lock().release()


def test_whatever_call_the_power_is_cut_at_what_was_done_is_done(tmp_path: Path) -> None:
    for death in count():
        for seed in range(3):
            disk = FailingDisk(tmp_path / f"{death}-{seed}", Random(seed))
            store = Store(disk.root)
            done = 0
            calls: list[Callable[[], object]] = [
                partial(put, store, 1, OLD),
                partial(put, store, 2, NEW),
                partial(store.prune, 1),
                partial(store.set_aside, 2, "damaged"),
                (disk.root / "notes").touch,
            ]
            with disk.failing(Faults(death=death, cuts_power=True)), suppress(Crash):
                for call in calls:
                    call()
                    done += 1
            steps = store.steps()
            assert steps in ([[], [1], [1, 2], [2], [], []][done : done + 2])
            assert all(is_sound(store, step) for step in steps)
            store.begin(3)
            partials = {name for name in names(store) if name.startswith("partial")}
            assert partials == {store.partial(3).name}
        if not disk.has_crashed:
            break
    assert death > 30


def test_what_is_set_aside_is_no_checkpoint_but_all_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    moved = []
    for _ in range(3):
        put(store, 1, OLD)
        moved.append(store.set_aside(1, "damaged"))
    assert store.steps() == []
    assert [path.name for path in moved] == [
        "damaged-step-0000001",
        "damaged-2-step-0000001",
        "damaged-3-step-0000001",
    ]
    assert all({f.name for f in path.iterdir()} == {*OLD, MANIFEST, MARKER} for path in moved)
    store.begin(1)
    store.prune(1)
    assert all(path.exists() for path in moved)


def test_one_run_at_a_time_writes_in_a_directory(tmp_path: Path) -> None:
    store = Store(tmp_path / "new")
    lock = store.lock()
    with pytest.raises(UserError, match=f"--checkpoint-dir {tmp_path / 'new'}"):
        Store(tmp_path / "new").lock()
    Store(tmp_path / "other").lock().release()
    lock.release()
    store.lock().release()
    assert store.steps() == []


def test_the_lock_of_a_killed_run_is_free_again(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from shardmlx.checkpoint.store import Store\n"
        "lock = Store(Path(sys.argv[1])).lock(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    Store(tmp_path).lock().release()
