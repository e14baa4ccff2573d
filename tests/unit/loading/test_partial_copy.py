"""A copy of a model that has some of its tensors: which, is on record, and checked."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from shardmlx.loading.manifest import ModelManifest, read_model_manifest
from shardmlx.loading.partial_copy import PartialCopy
from shardmlx.modelfiles.model_files import check_model_files
from shardmlx.modelfiles.sources import RECORD
from tests.helpers.fake_models import MISTRAL_7B, TINY, model_files, write

FILE = "model.safetensors"
NAME = "model.layers.1.mlp.up_proj.weight"
OTHER = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def blueprint(tmp_path: Path) -> ModelManifest:
    return read_model_manifest(write(tmp_path / "model", model_files(TINY)), [FILE], "")


def fill(copy: PartialCopy, blueprint: ModelManifest, name: str) -> bytes:
    place = blueprint.tensors()[name]
    data = bytes(range(256)) * (place.nbytes // 256)
    copy.write(place.file, place.start, data)
    copy.add(name)
    return data


def test_a_copy_looks_like_the_model_and_takes_no_room(tmp_path: Path) -> None:
    """A 7B model, of 14.5 GB."""
    source = write(tmp_path / "model", model_files(MISTRAL_7B, shards=3))
    files = sorted(path.name for path in source.glob("*.safetensors"))
    blueprint = read_model_manifest(source, files, "")
    copy = PartialCopy(tmp_path / "copy", blueprint, kept=False)
    assert check_model_files(tmp_path / "copy").keys() == check_model_files(source).keys()
    used = sum(path.stat().st_blocks * 512 for path in (tmp_path / "copy").iterdir())
    assert used < 200_000
    copy.close()


def test_what_was_added_is_there_and_nothing_else(tmp_path: Path, blueprint: ModelManifest) -> None:
    copy = PartialCopy(tmp_path / "copy", blueprint, kept=True)
    data = fill(copy, blueprint, NAME)
    copy.write(FILE, blueprint.tensors()[OTHER].start, b"\1" * 100)
    copy.flush()
    copy.close()
    again = PartialCopy(tmp_path / "copy", blueprint, kept=True)
    assert again.sound([NAME, OTHER]) == {NAME}
    place = blueprint.tensors()[NAME]
    assert again.read(FILE, place.start, place.nbytes) == data
    again.close()


@pytest.mark.parametrize("spoil", [b"", b"12345"])
def test_a_file_that_was_cut_off_is_begun_again(
    tmp_path: Path, blueprint: ModelManifest, spoil: bytes
) -> None:
    copy = PartialCopy(tmp_path / "copy", blueprint, kept=True)
    fill(copy, blueprint, NAME)
    copy.flush()
    copy.close()
    (tmp_path / "copy" / FILE).write_bytes(spoil)
    again = PartialCopy(tmp_path / "copy", blueprint, kept=True)
    assert again.sound([NAME]) == set()
    assert (tmp_path / "copy" / FILE).stat().st_size == blueprint.headers[FILE].file_size
    again.close()


def test_on_a_mac_weights_and_record_are_flushed_out_of_the_drives_cache_too(
    tmp_path: Path, blueprint: ModelManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = PartialCopy(tmp_path / "copy", blueprint, kept=True)
    fill(copy, blueprint, NAME)
    flushed: list[str] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(
        fcntl,
        "fcntl",
        lambda descriptor, command: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")),
    )
    copy.flush()
    assert [Path(path).name for path in flushed] == [FILE, RECORD]
    copy.close()
