"""Spoiled input is accepted or refused in one line: some cases of ``scripts/fuzz.py``."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
NAMES = (
    "stage map", "train config", "hostfile", "profile", "safetensors", "inspect config",
    "inspect index", "plan --hostfile", "manifest",
)  # fmt: skip


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("fuzz")


def test_every_target_is_tested(fuzz: ModuleType) -> None:
    assert {make().name for make in fuzz.TARGETS} >= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_spoiled_is_accepted(fuzz: ModuleType, name: str, tmp_path: Path) -> None:
    (target,) = (each for make in fuzz.TARGETS if (each := make()).name == name)
    path = tmp_path / target.file
    for seed in target.seeds:
        size = len(seed).to_bytes(8, "little")
        path.write_bytes(size + seed + bytes(fuzz.DATA_BYTES) if target.frame else seed)
        assert fuzz.outcome(target, path) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_spoiled_is_accepted_or_refused_in_one_line(fuzz: ModuleType, name: str) -> None:
    (target,) = (each for make in fuzz.TARGETS if (each := make()).name == name)
    counts = fuzz.sweep(target, range(40), seed=5)
    assert counts.faults == {}
    assert counts.refused > counts.accepted > 0
