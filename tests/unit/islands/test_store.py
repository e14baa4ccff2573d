"""The hub's directory: versions, reports, tokens, exports, and disks that fail at any call."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest

from shardmlx.errors import UserError
from shardmlx.islands.encodings import encoding_named
from shardmlx.islands.protocol import Join, SharedTensor, Terms
from shardmlx.islands.store import (
    CHANGE,
    FLOAT32,
    MOMENTUM,
    OUTER,
    PUBLISHED,
    Differences,
    FragmentStore,
    Report,
    Run,
)
from tests.helpers.worlds.disk import Crash, FailingDisk, Faults

T = TypeVar("T")

TENSORS = (
    SharedTensor("model.layers.0.lora_a", (2, 3)),
    SharedTensor("model.layers.1.lora_a", (4,)),
)
START = np.arange(10, dtype=np.float32)
JOIN = Join(name="ann", model={"type": "llama"}, tensors=TENSORS, adapter_config={"rank": 8})


def opened(directory: Path, encoding: str = "float32") -> FragmentStore:
    return FragmentStore(directory, TENSORS, encoding)


def seeded(directory: Path, encoding: str = "float32") -> FragmentStore:
    store = opened(directory, encoding)
    _seed(store)
    return store


def put(store: FragmentStore, island: str, base: int, value: float, life: int = 1) -> None:
    """Put a report of ``value`` times the first weights."""
    body = store.new_file()
    body.write_bytes((value * START).tobytes())
    store.add(body, Report(island=island, life=life, base=base, rows=1, tokens=1, norm=value))


def _seed(store: FragmentStore) -> None:
    body = store.new_file()
    body.write_bytes(START.tobytes())
    try:
        store.seed(body)
    finally:
        body.unlink(missing_ok=True)


def _put_tens(store: FragmentStore) -> None:
    body = store.new_file()
    tens = np.full(10, 10, np.float32)
    parts = [FLOAT32, encoding_named("bfloat16")]
    (encoding,) = [each for each in parts if each.nbytes((10,)) == store.report_bytes]
    body.write_bytes(encoding.encode(tens, None).tobytes())
    try:
        store.add(body, Report(island="ann", life=1, base=0, rows=1, tokens=1, norm=10))
    finally:
        body.unlink(missing_ok=True)


def _advance(store: FragmentStore) -> None:
    store.advance(store.pending, summed)


def weights(store: FragmentStore, part: str = PUBLISHED) -> list[float]:
    return [float(each) for each in np.fromfile(store.path(part), np.float32)]


def summed(
    now: np.ndarray, momentum: np.ndarray | None, differences: Differences
) -> tuple[np.ndarray, np.ndarray | None]:
    """An outer step that shows how often each report counts: they are powers of ten."""
    momentum = np.zeros_like(now) if momentum is None else momentum
    return now - sum(differences), momentum + 1


def by_file(directory: Path) -> Sequence[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_version_has_what_its_reports_add_and_only_two_are_kept(tmp_path: Path) -> None:
    store = seeded(tmp_path)
    assert by_file(tmp_path / "v0000000") == ["facts", "published"]
    for base in range(3):
        put(store, "ann", base, 10)
        put(store, "ben", base, 100)
        store.advance(store.pending, summed)
    assert store.version == 3
    assert weights(store) == (START - 330 * START).tolist()
    assert weights(store, MOMENTUM) == [3.0] * 10
    assert by_file(tmp_path) == ["v0000002", "v0000003"]
    assert by_file(tmp_path / "v0000003") == ["facts", "momentum", "published"]
    assert store.facts.tokens == 6


def test_reports_of_one_island_from_two_bases_are_one_difference(tmp_path: Path) -> None:
    store = seeded(tmp_path)
    put(store, "ann", 0, 10)
    put(store, "ann", 1, 100)
    seen: list[list[float]] = []

    def step(
        now: np.ndarray, momentum: np.ndarray | None, differences: Differences
    ) -> tuple[np.ndarray, np.ndarray | None]:
        seen.append([float(each.reshape(-1)[0]) for each in differences])
        return now, None

    store.advance(store.pending, step)
    assert seen == [[0.0], [660.0]]


def test_a_report_replaces_that_of_its_life_and_base_and_no_other(tmp_path: Path) -> None:
    store = seeded(tmp_path)
    put(store, "ann", 0, 10)
    put(store, "ann", 0, 20)
    assert [each.norm for each in store.pending] == [20]
    assert by_file(tmp_path) == ["ann.1.0.report", "v0000000"]
    put(store, "ann", 0, 30, life=2)  # it has joined anew
    put(store, "ann", 1, 50)
    put(store, "ben", 0, 60)
    assert [each.norm for each in store.pending] == [20, 50, 30, 60]
    assert [each.norm for each in opened(tmp_path).pending] == [20, 50, 30, 60]


@pytest.mark.parametrize("encoding", ["bfloat16", "top-k:0.2", "low-rank:1"])
def test_what_a_lossy_encoding_leaves_out_of_a_change_is_in_the_next(
    tmp_path: Path, encoding: str
) -> None:
    store = seeded(tmp_path, encoding)
    change = np.linspace(-1.01, 2.3, 10, dtype=np.float32)

    def moved(
        now: np.ndarray, momentum: np.ndarray | None, differences: Differences
    ) -> tuple[np.ndarray, np.ndarray | None]:
        part = change[:6] if now.size == 6 else change[6:]
        return now + part.reshape(now.shape), None

    def kept(
        now: np.ndarray, momentum: np.ndarray | None, differences: Differences
    ) -> tuple[np.ndarray, np.ndarray | None]:
        return now, None

    codec = encoding_named(encoding)
    last: np.ndarray | None = None
    for step in (moved, *[kept] * 12):
        before = np.fromfile(store.path(PUBLISHED), np.float32)
        store.advance([], step)
        left_out = (np.fromfile(store.path(OUTER), np.float32) - before)[:6].reshape(2, 3)
        last = codec.encode(left_out, last)  # begun with the last one
        np.testing.assert_array_equal(np.fromfile(store.path(CHANGE), np.uint8, last.size), last)
        decoded = np.concatenate([each.reshape(-1) for each in store.decoded(store.path(CHANGE))])
        after = np.fromfile(store.path(PUBLISHED), np.float32)
        np.testing.assert_array_equal(after, before + decoded)
    np.testing.assert_allclose(weights(store, OUTER), START + change, rtol=1e-6)
    np.testing.assert_allclose(weights(store), START + change, atol=1e-4)


class RefusingDisk:
    """Lets one call of the operating system fail: that of a number, counted from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
        self.calls = 0
        self._refused = refused
        for name in ("fsync", "mkdir", "rename", "replace"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.calls += 1
            if self.calls - 1 == self._refused:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            real(*args)

        return call


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_after_any_call_that_the_disk_refuses_the_next_try_makes_the_same_version(
    tmp_path: Path, encoding: str
) -> None:
    """The flush of a directory, too, in which a version has its name already."""
    for refused in count():
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = RefusingDisk(monkeypatch, refused)
            store = tried_twice(opened, tmp_path / str(refused), encoding)
            for attempt in (_seed, _put_tens, _advance):
                tried_twice(attempt, store)
        assert (store.version, weights(store)) == (1, (START - 10).tolist())
        assert by_file(store.directory) == ["v0000000", "v0000001"]
        again = opened(store.directory, encoding)
        assert (again.version, again.facts, again.pending) == (1, store.facts, [])
        if disk.calls <= refused:
            break
    assert refused > 15


@pytest.mark.parametrize("encoding", ["float32", "bfloat16"])
def test_what_was_acknowledged_is_there_whatever_call_the_power_is_cut_at(
    tmp_path: Path, encoding: str
) -> None:
    for death in count():
        for seed in range(3):
            disk = FailingDisk(tmp_path / f"{death}-{seed}", Random(seed))
            disk.root.mkdir()
            acknowledged = 0
            with disk.failing(Faults(death=death, cuts_power=True)), suppress(Crash):
                store = opened(disk.root / "fragment", encoding)
                for step in (_seed, _put_tens, _advance):
                    step(store)
                    acknowledged += 1
            again = opened(disk.root / "fragment", encoding)
            left = [name for name in by_file(again.directory) if not name.startswith("v")]
            assert left == [each.file for each in again.pending]
            has_step = again.version == 1
            has_report = has_step or bool(again.pending)
            assert [again.version is not None, has_report, has_step][:acknowledged] == (
                [True] * acknowledged
            )
            if has_step:
                assert (weights(again), again.facts.tokens) == ((START - 10).tolist(), 1)
            elif has_report:
                (body,) = again.directory.glob("*.report")
                assert [float(each.mean()) for each in again.decoded(body)] == [10, 10]
        if not disk.has_crashed:
            break
    assert death > 20


def test_a_version_whose_name_was_not_flushed_is_made_anew_whatever_call_the_power_is_cut_at(
    tmp_path: Path,
) -> None:
    for death in count():
        for seed in range(2):
            disk = FailingDisk(tmp_path / f"{death}-{seed}", Random(seed))
            disk.root.mkdir()
            store = seeded(disk.root / "fragment")
            put(store, "ann", 0, 10)
            with disk.failing(Faults(death=death, cuts_power=True)), suppress(Crash):
                with (
                    refused_flush(store.directory, "v0000001"),
                    pytest.raises(OSError, match="output"),
                ):
                    _advance(store)
                _advance(store)
            again = opened(store.directory)
            made = START - 10 * START if again.version == 1 else START
            assert weights(again) == made.tolist()
        if not disk.has_crashed:
            break
    assert again.version == 1
    assert death > 15


@contextmanager
def refused_flush(directory: Path, name: str) -> Iterator[None]:
    """Let the disk refuse the flushes of a directory which has something of that name."""
    flush = os.fsync

    def call(descriptor: int) -> None:
        is_there = (directory / name).exists()
        if is_there and os.path.samestat(os.fstat(descriptor), directory.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", call)
        yield


def test_there_may_be_ten_million_versions(tmp_path: Path) -> None:
    seeded(tmp_path).path(PUBLISHED).parent.rename(tmp_path / "v9999999")
    store = opened(tmp_path)
    for version in (10_000_000, 10_000_001):
        store.advance([], summed)
        assert opened(tmp_path).version == version
    assert by_file(tmp_path) == ["v10000000", "v10000001"]


def test_a_fragment_without_weights_has_no_next_version(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no weights"):
        opened(tmp_path).advance([], summed)


def test_where_no_difference_is_known_the_mean_of_a_file_is_the_only_one(tmp_path: Path) -> None:
    store = seeded(tmp_path)
    assert store.masked_bytes == 2 * START.nbytes
    mean = store.new_file()
    mean.write_bytes((START + 1).tobytes())
    report = Report(island="ann", life=1, base=0, rows=1, tokens=5)
    assert report.norm == 0.0
    store.advance([report], summed, mean)
    assert weights(store) == [-1.0] * 10
    assert store.facts.counted == {"ann": report}


def tried_twice(attempt: Callable[..., T], *args: Any) -> T:
    """Return what an attempt returns, or the second one if the disk refuses something in it."""
    try:
        return attempt(*args)
    except OSError:
        return attempt(*args)


def test_tokens_are_secret_stay_and_are_those_of_good_names(tmp_path: Path) -> None:
    run = Run(tmp_path, ["ann", "ben"], Terms())
    tokens = dict(run.tokens)
    assert [*tokens] == ["ann", "ben"]
    assert len({*tokens.values()}) == 2
    assert {*map(len, tokens.values())} == {43}  # 256 bits
    assert stat.S_IMODE((tmp_path / "tokens" / "ann").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "tokens").stat().st_mode) == 0o700
    with pytest.raises(UserError, match="another hub"):
        Run(tmp_path, [], Terms())
    run.close()
    (tmp_path / "tokens" / ".DS_Store").write_bytes(b"\xff\xfe")
    run = Run(tmp_path, ["ben", "cid"], Terms())
    assert {name: run.tokens[name] for name in tokens} == tokens
    run.close()
    for name in ("../ann", "Ann", "", "a b"):
        with pytest.raises(UserError, match="--islands"):
            Run(tmp_path / "other", [name], Terms()).close()
    for token in (b"sixteen-lett\xe9rs-\n", b"fifteen-letters\n"):
        (tmp_path / "tokens" / "ann").write_bytes(token)
        with pytest.raises(UserError, match="tokens/ann") as refusal:
            Run(tmp_path, [], Terms())
        assert "--islands" in refusal.value.remedy
    (tmp_path / "tokens" / "ann").write_text("sixteen-letters-\n")
    with closing(Run(tmp_path, [], Terms())) as run:  # the one that was refused locks nothing
        assert run.tokens["ann"] == "sixteen-letters-"


def test_a_restart_goes_on_and_refuses_other_terms(tmp_path: Path) -> None:
    run = Run(tmp_path, ["ann"], Terms(inner_steps=7, fragments=2))
    run.join("ann", JOIN)
    run.close()
    again = Run(tmp_path, [], Terms(inner_steps=7, fragments=2))
    assert (again.first, again.lives, again.id) == (JOIN, {"ann": 1}, run.id)
    assert [each.tensors for each in again.fragments] == [TENSORS[:1], TENSORS[1:]]
    again.close()
    with pytest.raises(UserError, match="inner_steps is 8"):
        Run(tmp_path, [], replace(run.terms, inner_steps=8))
    other = replace(run.terms, outer_optimizer="average")
    with closing(Run(tmp_path, [], other)) as again:
        assert again.terms.outer_optimizer == "average"
    with closing(Run(tmp_path, [], None)) as again:
        again.join("ben", replace(JOIN, name="ben"))
        assert (again.lives, again.first) == ({"ann": 1, "ben": 1}, JOIN)
        assert again.terms == run.terms
    with closing(Run(tmp_path, [], None)) as again:
        assert again.first == JOIN


def test_a_directory_of_an_earlier_version_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    run = Run(tmp_path, ["ann"], Terms())
    run.join("ann", JOIN)
    run.close()
    file = tmp_path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "id": None}).replace('"id"', '"_"'))
    with pytest.raises(UserError, match=f"{file}.*: id") as refused:
        Run(tmp_path, [], Terms())
    assert "--path" in refused.value.remedy


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_exported_weights_are_adapters_that_safetensors_reads(
    tmp_path: Path, encoding: str
) -> None:
    from safetensors.numpy import load_file

    run = Run(tmp_path / "hub", ["ann"], Terms(fragments=2, encoding=encoding))
    run.join("ann", JOIN)
    for store, part in zip(run.fragments, (START[:6], START[6:]), strict=True):
        with pytest.raises(UserError, match="no weights"):
            run.export(tmp_path / "out")
        body = store.new_file()
        body.write_bytes(part.tobytes())
        store.seed(body)
        store.advance([], lambda now, momentum, _: (now * np.float32(1.01), momentum))
    output = tmp_path / "of" / "today"
    for _ in range(2):
        run.export(output)
    run.close()
    found = load_file(output / "adapters.safetensors")
    made = START * np.float32(1.01)
    np.testing.assert_array_equal(found[TENSORS[0].name], made[:6].reshape(2, 3))
    np.testing.assert_array_equal(found[TENSORS[1].name], made[6:])
    assert by_file(output) == ["adapter_config.json", "adapters.safetensors"]


def test_weights_that_nobody_has_sent_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the directory of a hub"):
        Run(tmp_path, [], None)
    Run(tmp_path, ["ann"], Terms()).close()
    with closing(Run(tmp_path, [], None)) as run, pytest.raises(UserError) as refusal:
        run.export(tmp_path / "out")
    assert refusal.value.remedy == "let an island join"
    assert not (tmp_path / "out").exists()
