"""Every damage to a checkpoint is named, and what says what it holds is read with care."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmlx.checkpoint.store import MANIFEST, MARKER, FileInfo, Manifest, Store
from shardmlx.errors import UserError
from tests.helpers.checkpoints import NEW, OLD, manifest_of, put


def damages(path: Path) -> Iterator[str]:
    """Damage a file in many ways, one after the other, and say how."""
    whole = path.read_bytes()
    for position in range(0, len(whole), 1 + len(whole) // 99):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        yield f"byte {position}"
    for length in range(0, len(whole), 1 + len(whole) // 99):
        path.write_bytes(whole[:length])
        yield f"{length} bytes left"
    path.write_bytes(whole + b"\0")
    yield "a byte more"
    path.unlink()
    yield "missing"
    path.mkdir()
    yield "missing"  # a directory has its name
    path.rmdir()
    path.write_bytes(whole)


@pytest.mark.parametrize("name", OLD)
def test_every_damage_to_a_file_is_named(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    info = next(file for file in put(store, 1, OLD).files if file.name == name)
    path = store.path(1) / name
    for damage in damages(path):
        fault = store.fault(1, info)
        assert fault is not None, damage
        assert fault.startswith(str(path)), damage
        assert f" bytes, not {info.nbytes}" in fault or damage.startswith(("byte", "missing"))
    assert store.fault(1, info) is None
    shutil.rmtree(store.path(1))
    store.path(1).touch()
    assert store.fault(1, info) == f"{path} cannot be read: Not a directory"


@pytest.mark.parametrize("name", [MANIFEST, MARKER])
def test_every_damage_to_the_manifest_is_named(tmp_path: Path, name: str) -> None:
    store = Store(tmp_path)
    manifest = put(store, 1, OLD)
    for damage in damages(store.path(1) / name):
        with pytest.raises(UserError) as refused:
            store.manifest(1)
        assert str(store.path(1) / MANIFEST) in str(refused.value) or damage == "missing"
        assert name in str(refused.value), damage
    assert store.manifest(1) == manifest


def test_a_checkpoint_that_was_given_the_name_of_another_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, 1, OLD)
    store.path(1).rename(store.path(2))
    with pytest.raises(
        UserError, match=r"checkpoint\.json is of step 1: the directory was renamed"
    ):
        store.manifest(2)


def test_a_manifest_survives_its_text() -> None:
    manifest = manifest_of(7, NEW)
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


@pytest.mark.parametrize(
    "name", ["../weights.safetensors", "/etc/a.safetensors", "COMMITTED", "a/b.safetensors", ""]
)
def test_a_file_of_a_checkpoint_lies_in_its_directory(name: str) -> None:
    with pytest.raises(ValueError, match="is not a file of a checkpoint"):
        FileInfo(name, 0, "0" * 64)


GOOD = json.loads(manifest_of(7, OLD).to_json())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        json.dumps({**GOOD, "format": 2}).encode(),
        json.dumps({**GOOD, "step": float("inf")}).encode(),
        json.dumps({**GOOD, "step": 1.5}).encode(),
        json.dumps({**GOOD, "step": 0}).encode(),
        json.dumps({**GOOD, "files": []}).encode(),
        json.dumps({**GOOD, "files": GOOD["files"] * 2}).encode(),
        json.dumps({**GOOD, "files": [{**GOOD["files"][0], "nbytes": -1}]}).encode(),
        json.dumps({**GOOD, "files": [{**GOOD["files"][0], "sha256": "0" * 63}]}).encode(),
        json.dumps({**GOOD, "state": []}).encode(),
        json.dumps({key: GOOD[key] for key in GOOD if key != "identity"}).encode(),
    ],
)
def test_what_no_program_wrote_is_refused(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^here is "):
        Manifest.from_json(text, "here")
