"""The file of measured times and bytes: what is written is read, and what is not one is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.specs import FULL, Savings
from shardmlx.modelfiles.parts import read_shape
from shardmlx.planning.facts.hostfile import read_hostfile
from shardmlx.planning.facts.profile_file import (
    MachineProfile,
    Profile,
    Sample,
    read_profile,
    read_profiles,
    work_of,
    write_profile,
)
from shardmlx.planning.memory.measured import MemorySample, StageBytes
from shardmlx.planning.time.parts import Seconds
from testbed.tiny_models import tiny_config
from tests.helpers.refusals import refusal
from tests.helpers.workloads import workload

SHAPE = read_shape(tiny_config())
STAGE = StageBytes(4, 3, 2, 1)


def machine(host: str, seconds: float = 1.0, chip: str = "M2") -> MachineProfile:
    part = Seconds(seconds, 2 * seconds, seconds, 0.1)
    samples = tuple(
        Sample(rows=1, length=length, layer=part, frozen=part, embedding=part, head=part)
        for length in (64, 256)
    )
    savings = Savings(recompute=FULL, loss_chunk=128)
    memory = MemorySample(
        rows=1, length=64, savings=savings, first=STAGE, last=STAGE, kinds=(STAGE,)
    )
    return MachineProfile(host, chip, samples, (memory,))


def work(quantization: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return work_of(replace(workload(SHAPE, **options), quantization=quantization))


def profile(*machines: MachineProfile, **options: Any) -> Profile:
    return Profile(work(**options), machines)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    written = profile(machine("studio"), machine("mini", 2.0))
    write_profile(written, path)
    assert read_profile(path) == replace(written, path=str(path))
    content = json.loads(path.read_text())
    for each in content["machines"]:
        del each["memory"]  # as in files that have times alone
    path.write_text(json.dumps(content))
    assert read_profile(path).machines[0] == replace(machine("studio"), memory=())


@pytest.mark.parametrize(
    ("host", "kind", "found"),
    [
        ("studio", None, "Studio.local"),
        ("mini.lan", None, "mini"),
        ("studio2", "M2 Ultra", "Studio.local"),
        ("mini2", "MINI.lan", "mini"),
        ("10.0.0.1", None, "10.0.0.1"),
    ],
)
def test_a_host_is_found_by_its_name_or_its_kind(host: str, kind: str | None, found: str) -> None:
    known = profile(
        machine("Studio.local", chip="M2 Ultra"), machine("mini", 2.0), machine("10.0.0.1", 3.0)
    )
    assert known.machine(host, kind).host == found


@pytest.mark.parametrize(("host", "kind"), [("air", "M4"), ("air", None), ("10.0.0.3", None)])
def test_a_host_that_was_not_measured_is_refused(host: str, kind: str | None) -> None:
    known = profile(machine("studio", chip="M2 Ultra"), machine("10.0.0.1"))
    caught = refusal(known.machine, host, kind)
    assert host in caught.problem
    assert "kind=m2-ultra or kind=m2 " in str(caught.remedy)


@pytest.mark.parametrize(
    "chip", ["Apple M2 Ultra", "Intel(R) Xeon(R) CPU @ 2.20GHz", "x86_64", "Zen, 2nd = new; Inc."]
)
def test_the_kind_that_is_asked_for_can_be_written_into_a_hostfile(
    chip: str, tmp_path: Path
) -> None:
    measured = profile(machine("studio.local", chip=chip))
    (words,) = re.findall(r"kind=\S+", str(refusal(measured.machine, "mini")))
    (tmp_path / "hosts").write_text(f"mini slots=1  # {words} memory=8GiB\n")
    (mini,) = read_hostfile(tmp_path / "hosts")
    assert measured.machine(mini.host, mini.kind).host == "studio.local"


def test_of_ranks_that_share_a_host_the_slowest_counts() -> None:
    shared = profile(machine("mac", 1.0), machine("mac", 1.5), machine("mac", 1.2))
    assert shared.machine("mac").samples[0].layer.forward == 1.5


FOUR_BITS = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("measured", "asked"),
    [
        ({}, {"fine_tune_type": "full"}),
        ({}, {"optimizer": "sgd"}),
        ({}, {"quantization": FOUR_BITS}),
        ({"quantization": {}}, {}),
        ({"quantization": {}}, {"quantization": {**FOUR_BITS, "model.norm": False}}),
    ],
)
def test_other_work_is_refused_by_what_differs(
    measured: dict[str, Any], asked: dict[str, Any]
) -> None:
    assert (
        next(iter(asked or measured))
        in refusal(profile(machine("a"), **measured).check, work(**asked)).problem
    )


def test_the_same_work_may_be_said_in_other_words_and_with_other_layers_and_steps() -> None:
    four_bits = Profile(json.loads(json.dumps(work({}))), (machine("a"),))
    four_bits.check(work({**FOUR_BITS, "mode": "affine"}))
    deeper = read_shape(tiny_config(layers=12))
    other = workload(deeper, num_layers=4, iters=7, batch_size=2, learning_rate=1.0)
    profile(machine("a")).check(work_of(other))


def test_profiles_of_several_files_are_one(tmp_path: Path) -> None:
    a, b, other = (str(tmp_path / name) for name in ("a", "b", "other"))
    write_profile(profile(machine("a")), Path(a))
    write_profile(profile(machine("b")), Path(b))
    write_profile(profile(machine("b"), optimizer="sgd"), Path(other))
    assert [each.host for each in read_profiles(f"{a}, {b}").machines] == ["a", "b"]
    assert "optimizer 'sgd'" in refusal(read_profiles, f"{a},{other}").problem


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", '{"format": 1}', '{"format": 2, "work": {}, "machines": []}'),
        '{"format": 2, "work": {}, "machines": [{"host": "a"}]}',
        '{"format": 2, "work": 7, "machines": [1]}',
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    refused(path)


def refused(path: Path) -> None:
    caught = refusal(read_profile, path)
    assert str(path) in caught.problem
    assert "\n" not in str(caught)
    assert len(str(caught)) < 300


@pytest.mark.parametrize(
    ("kind", "where", "value"),
    [
        ("samples", "rows", "Infinity"),
        ("samples", "layer", f'{{"forward": {"9" * 400}}}'),
        ("memory", "savings", '{"recompute": "twice"}'),
        ("memory", "last", '{"after_forward": 1}'),
    ],
)
def test_what_no_machine_measures_is_refused_in_one_line(
    kind: str, where: str, value: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    write_profile(profile(machine("a")), path)
    content = json.loads(path.read_text())
    content["machines"][0][kind][0][where] = "VALUE"
    path.write_text(json.dumps(content).replace('"VALUE"', value))
    refused(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere.json")
