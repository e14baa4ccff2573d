"""Adapters and models on disk: those of the last save are whole, whatever becomes of this one."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import mlx.core as mx
import pytest

from shardmlx.checkpoint.export import Collection, Collector, SaveError, save_adapters, save_model
from shardmlx.common import durable_files
from shardmlx.common.durable_files import flush_to_disk
from shardmlx.distributed.messages import TransportError
from shardmlx.models.runtime.slice import Piece
from shardmlx.pipeline.mesh import Mesh
from tests.helpers.checkpoints import as_bytes, on_ranks, tensors_of, whole
from tests.helpers.local_transport import LocalTransport
from tests.helpers.models_and_batches import load_arrays

CONFIG = {"num_layers": 2}
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


class Part(dict[str, mx.array]):
    """A slice of a model, as far as it is saved: one that trains all it has."""

    @property
    def trainable(self) -> list[str]:
        return list(self)

    @property
    def pieces(self) -> dict[str, Piece]:
        return {}

    def parameters(self) -> dict[str, mx.array]:
        return self


def on_two_ranks(directory: Path, seed: int, save: Callable[[Collector, Collection], None]) -> None:
    def work(transport: LocalTransport, store: Any) -> None:
        plan = cast(Any, SimpleNamespace(mesh=Mesh(dp=1, pp=2)))
        part = cast(Any, Part(tensors_of(transport.rank, seed)))
        collector = Collector(plan, transport, [part])
        held = transport.all_gather(collector.held(trained_only=True))
        collection = Collection.of(held)
        if transport.rank == 0:
            save(collector, collection)
        else:
            collector.send(collection.sent_by(transport.rank))

    on_ranks([directory, directory], work)


def adapters(directory: Path, seed: int = 0, copy_as: str | None = None) -> None:
    on_two_ranks(
        directory,
        seed,
        lambda own, collected: save_adapters(own, collected, directory, CONFIG, copy_as),
    )


def model(directory: Path, seed: int = 0) -> None:
    source = directory.parent / "source"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text('{"rope_parameters": {"rope_theta": 5.0}}')
    (source / "tokenizer.json").write_text(f"of {seed}")
    on_two_ranks(
        directory, seed, lambda own, collected: save_model(own, collected, source, directory)
    )


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def load(*paths: Path) -> Mapping[str, Any]:
    return as_bytes(load_arrays(*paths))


def fail(patch: pytest.MonkeyPatch, name: str, number: int) -> None:
    def flush(file: IO[bytes]) -> None:
        if Path(file.name).name == f"partial-{name}":
            raise OSError(number, os.strerror(number))
        flush_to_disk(file)

    patch.setattr(durable_files, "flush_to_disk", flush)


def test_adapters_are_what_all_ranks_trained(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    adapters(out, copy_as="0000004_adapters.safetensors")
    assert load(out / "adapters.safetensors") == whole(2)
    assert sorted(content(out)) == [
        "0000004_adapters.safetensors",
        "adapter_config.json",
        "adapters.safetensors",
    ]
    first, _, last = content(out).values()
    assert first == last


def test_a_model_is_what_all_ranks_have(tmp_path: Path) -> None:
    out = tmp_path / "out"
    model(out)
    assert load(*(out / name for name in SHARDS)) == whole(2)
    assert sorted(content(out)) == [
        "config.json",
        *SHARDS,
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert json.loads(content(out)["config.json"])["rope_theta"] == 5.0


FULL = "rank 0 on .*, saving {path}: the disk is full .* --adapter-path; .* unchanged"


@pytest.mark.parametrize(
    ("save", "name"),
    [(adapters, name) for name in ("adapters.safetensors", "adapter_config.json")]
    + [
        (model, name)
        for name in (*SHARDS, "tokenizer.json", "model.safetensors.index.json", "config.json")
    ],
)
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., None], name: str
) -> None:
    out = tmp_path / "out"
    save(out)
    before = content(out)
    fail(monkeypatch, name, errno.ENOSPC)
    with pytest.raises(SaveError, match=FULL.format(path=out / name)):
        save(out, seed=1)
    assert content(out) == before


def test_where_only_the_copy_does_not_fit_the_new_adapters_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    adapters(out)
    fail(monkeypatch, "copy", errno.ENOSPC)
    with pytest.raises(SaveError, match=FULL.format(path=out / "copy")):
        adapters(out, seed=1, copy_as="copy")
    assert load(out / "adapters.safetensors") == whole(2, seed=1)
    assert sorted(content(out)) == ["adapter_config.json", "adapters.safetensors"]


def test_a_model_that_cannot_take_its_names_is_none_and_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is half of one model and half of another has no config.json."""
    out = tmp_path / "out"
    model(out)
    replace = os.replace

    def fails(source: Path, target: Path) -> None:
        if target.name == SHARDS[1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(SaveError, match="new files that are not in their place yet are called"):
        model(out, seed=1)
    names = content(out).keys()
    assert "config.json" not in names
    assert {f"partial-{name}" for name in (SHARDS[1], "config.json")} <= names
    assert load(out / SHARDS[0], out / f"partial-{SHARDS[1]}") == whole(2, seed=1)


def test_a_rank_that_is_lost_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def lost(collector: Collector, *source: Any) -> Any:
        raise TransportError("rank 1 died")

    monkeypatch.setattr(Collector, "receive", lost)
    with pytest.raises(TransportError):
        adapters(out)
    assert not out.exists() or content(out) == {}
