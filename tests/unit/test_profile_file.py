"""The file of measured times: what is written is read, and what is not one is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardmlx.config import TrainConfig
from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape
from shardmlx.profile_file import (
    MachineProfile,
    Profile,
    merge,
    read_profile,
    work_of,
    write_profile,
)
from shardmlx.timing import Sample, Seconds
from tests.support import tiny_config

SHAPE = ModelShape.from_config(tiny_config())


def machine(host: str, seconds: float = 1.0, chip: str = "M2") -> MachineProfile:
    part = Seconds(seconds, 2 * seconds, seconds, 0.1)
    samples = tuple(
        Sample(rows=1, length=length, layer=part, frozen=part, embedding=part, head=part)
        for length in (64, 256)
    )
    return MachineProfile(host, chip, samples)


def profile(*machines: MachineProfile, config: TrainConfig | None = None) -> Profile:
    return Profile(work_of(config or TrainConfig(), SHAPE, "float32"), machines)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    written = profile(machine("studio"), machine("mini", 2.0))
    write_profile(written, path)
    assert read_profile(path) == replace(written, path=str(path))


def test_a_host_is_found_by_its_name_with_or_without_its_domain() -> None:
    both = profile(machine("Studio.local"), machine("mini", 2.0))
    assert both.machine("studio").host == "Studio.local"
    assert both.machine("mini.lan").host == "mini"


def test_a_host_that_was_not_measured_may_be_of_the_kind_of_one_that_was() -> None:
    both = profile(machine("studio", chip="M2 Ultra"), machine("mini", 2.0))
    assert both.machine("studio2", kind="M2 Ultra").host == "studio"
    assert both.machine("mini2", kind="mini").host == "mini"
    with pytest.raises(
        UserError, match=r"no measurement of air, only of studio, mini: .*kind=NAME"
    ):
        both.machine("air", kind="M4")
    with pytest.raises(UserError, match="no measurement of air"):
        both.machine("air")


def test_of_ranks_that_share_a_host_the_slowest_counts() -> None:
    shared = profile(machine("mac", 1.0), machine("mac", 1.5), machine("mac", 1.2))
    assert shared.machine("mac").samples[0].layer.forward == 1.5


def test_other_work_is_refused_by_what_differs() -> None:
    full = TrainConfig(fine_tune_type="full")
    with pytest.raises(UserError, match="fine_tune_type 'lora', not 'full': measure again"):
        profile(machine("a")).check(work_of(full, SHAPE, "float32"))
    with pytest.raises(UserError, match="dtype 'float32', not 'bfloat16'"):
        profile(machine("a")).check(work_of(TrainConfig(), SHAPE, "bfloat16"))


def test_how_many_layers_are_trained_and_how_long_the_run_is_does_not_matter() -> None:
    deeper = ModelShape.from_config(tiny_config(layers=12))
    other = TrainConfig(num_layers=4, iters=7, batch_size=2, learning_rate=1.0)
    profile(machine("a")).check(work_of(other, deeper, "float32"))


def test_profiles_of_several_files_are_one() -> None:
    one = merge([profile(machine("a")), profile(machine("b"))])
    assert [each.host for each in one.machines] == ["a", "b"]
    with pytest.raises(UserError, match="optimizer 'sgd', not 'adam'"):
        merge([profile(machine("a")), profile(machine("b"), config=TrainConfig(optimizer="sgd"))])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "is no profile"),
        ("{}", "is no profile"),
        ('{"format": 2}', "has format 2, this shardmlx reads 1"),
        ('{"format": 1, "work": {}, "machines": []}', "no machines"),
        ('{"format": 1, "work": {}, "machines": [{"host": "a"}]}', "is no profile"),
        ('{"format": 1, "work": 7, "machines": [1]}', "is no profile"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(
    text: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_times_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(profile(machine("a")), path)
    content = json.loads(path.read_text())
    content["machines"][0]["samples"][0]["layer"]["forward"] = "soon"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="is no profile"):
        read_profile(path)
    content["machines"][0]["samples"] = []
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="no samples of a"):
        read_profile(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere.json: No such file"):
        read_profile(tmp_path / "nowhere.json")
