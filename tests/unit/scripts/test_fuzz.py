"""Spoiled input is accepted or refused in one line: some cases of ``scripts/fuzz.py``."""

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from shardmlx.errors import UserError

SCRIPTS = Path(__file__).parents[3] / "scripts"
NAMES = (
    "stage map", "train config", "hostfile", "profile", "safetensors", "inspect FILE",
    "inspect config", "inspect index", "plan --hostfile", "manifest",
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


def test_the_same_seed_spoils_alike(fuzz: ModuleType) -> None:
    target = fuzz.stage_map()
    assert fuzz.spoiled(target, Random("a")) == fuzz.spoiled(target, Random("a"))
    assert len({fuzz.spoiled(target, Random(i)) for i in range(20)}) > 10


# What it takes for a fault


def fail_with_another_exception(path: Path) -> None:
    raise KeyError("x")


def fail_with_a_command_that_says_nothing(path: Path) -> None:
    importlib.import_module("fuzz").command(lambda argv: 2)


def fail_with_a_command_that_says_two_lines(path: Path) -> None:
    def main(argv: object) -> int:
        sys.stderr.write("one\ntwo\n")
        return 2

    importlib.import_module("fuzz").command(main)


def fail_by_hanging(path: Path) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("read", "fault"),
    [
        (fail_with_another_exception, "KeyError: 'x'"),
        (fail_with_a_command_that_says_nothing, "status 2, stdout '', stderr ''"),
        (fail_with_a_command_that_says_two_lines, "status 2, stdout '', stderr 'one\\ntwo\\n'"),
        (fail_by_hanging, "took over 0.05 s"),
    ],
)
def test_faults_are_found(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, read: object, fault: str
) -> None:
    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    target = fuzz.Target("bad", [b"x"], read)
    counts = fuzz.sweep(target, [0], seed=0)
    assert counts.faults == {0: fault}


def test_the_command_counts_and_fails_where_a_case_does(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise UserError("no")

    good = fuzz.Target("good", [b"x"], refuse)
    bad = fuzz.Target("bad", [b"x"], fail_with_another_exception)
    monkeypatch.setattr(fuzz, "TARGETS", (lambda: good, lambda: bad))
    assert fuzz.main(["--cases", "3", "--only", "good"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["good", "3", "0", "3", "0"]
    assert fuzz.main(["--cases", "4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 x bad:0: KeyError: 'x'"
    assert lines[-1].split() == ["bad", "2", "0", "0", "2"]
    assert fuzz.main(["--only", "bad:1"]) == 1
