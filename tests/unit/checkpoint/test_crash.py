"""A process may die at any moment: the old checkpoint or the new one is there, never half a one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from shardmlx.checkpoint.store import MANIFEST, MARKER, Store
from tests.helpers.checkpoints import NEW, OLD, content, is_sound, manifest_of, names, put
from tests.helpers.crashes import Crash, calls


def crashes(base: Path, prepare: Callable[[Store], None], act: Callable[[Store], None]) -> Any:
    """A new store for each moment at which ``act`` can die; then one where it does not."""
    for at in count():
        store = Store(base / str(at))
        prepare(store)
        try:
            with calls(at):
                act(store)
        except Crash:
            yield Store(store.directory)
        else:
            assert at > 1
            yield Store(store.directory)
            return


def old_and_new(store: Store) -> dict[int, dict[str, bytes]]:
    found = {step: content(store, step) for step in store.steps()}
    assert all(is_sound(store, step) for step in found)
    return found


def nothing(store: Store) -> None:
    pass


def one(store: Store) -> None:
    put(store, 1, OLD)


def two(store: Store) -> None:
    put(store, 1, OLD)
    put(store, 2, OLD)


def half(store: Store) -> None:
    put(store, 1, OLD)
    (store.begin(2) / "weights-00.safetensors").write_bytes(b"half")


def save_2(store: Store) -> None:
    put(store, 2, NEW)


def save_2_and_prune(store: Store) -> None:
    put(store, 2, NEW)
    store.prune(1)


@pytest.mark.parametrize(
    ("prepare", "act", "allowed"),
    [
        (nothing, save_2, [{}, {2: NEW}]),
        (one, save_2, [{1: OLD}, {1: OLD, 2: NEW}]),
        (half, save_2, [{1: OLD}, {1: OLD, 2: NEW}]),
        (one, save_2_and_prune, [{1: OLD}, {1: OLD, 2: NEW}, {2: NEW}]),
        (two, lambda store: store.prune(1), [{1: OLD, 2: OLD}, {2: OLD}]),
        (two, lambda store: store.set_aside(2, "damaged"), [{1: OLD, 2: OLD}, {1: OLD}]),
    ],
)
def test_after_a_crash_at_any_moment_there_is_the_old_or_the_new(
    tmp_path: Path, prepare: Any, act: Any, allowed: list[dict[int, dict[str, bytes]]]
) -> None:
    seen = []
    for store in crashes(tmp_path, prepare, act):
        found = old_and_new(store)
        assert found in allowed
        seen.append(found)
    assert seen[-1] == allowed[-1]


def test_a_crash_leaves_nothing_that_stays_for_ever_or_is_in_the_way(tmp_path: Path) -> None:
    for store in crashes(tmp_path, one, save_2_and_prune):
        put(store, 3, NEW)
        store.prune(1)
        assert content(store, 3) == NEW
        assert names(store) == {"step-0000003"}


def test_a_name_becomes_final_when_all_is_on_the_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin(1)
    with calls() as made:
        store.commit(manifest_of(1, OLD))
    assert made == [
        f"fsync {MANIFEST}",
        f"fsync {MARKER}",
        "fsync partial-step-0000001",
        "rename partial-step-0000001",
        f"fsync {tmp_path.name}",
    ]
