"""The file of measured times: what is written is read, and what is not one is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.specs import FineTune
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import read_hostfile
from shardmlx.costmodel.profile_file import (
    MachineProfile,
    Profile,
    merge,
    read_profile,
    work_of,
    write_profile,
)
from shardmlx.costmodel.timing import Sample, Seconds
from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape
from tests.helpers.models_and_batches import tiny_config

SHAPE = ModelShape.from_config(tiny_config())


def machine(host: str, seconds: float = 1.0, chip: str = "M2") -> MachineProfile:
    part = Seconds(seconds, 2 * seconds, seconds, 0.1)
    samples = tuple(
        Sample(rows=1, length=length, layer=part, frozen=part, embedding=part, head=part)
        for length in (64, 256)
    )
    return MachineProfile(host, chip, samples)


def tuned(**options: Any) -> FineTune:
    return FineTune.of(TrainConfig(**options))


def profile(*machines: MachineProfile, fine_tune: FineTune | None = None) -> Profile:
    return Profile(work_of(fine_tune or tuned(), SHAPE, "float32"), machines)


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
        UserError, match=r"no measurement of air, only of studio, mini: .*kind=m2-ultra or kind=m2 "
    ):
        both.machine("air", kind="M4")
    with pytest.raises(UserError, match="no measurement of air"):
        both.machine("air")


@pytest.mark.parametrize(
    "chip", ["Apple M2 Ultra", "Intel(R) Xeon(R) CPU @ 2.20GHz", "x86_64", "Zen, 2nd = new; Inc."]
)
def test_the_kind_that_is_asked_for_can_be_written_into_a_hostfile(
    chip: str, tmp_path: Path
) -> None:
    measured = profile(machine("studio.local", chip=chip))
    with pytest.raises(UserError) as caught:
        measured.machine("mini")
    (words,) = re.findall(r"kind=\S+", str(caught.value))
    (tmp_path / "hosts").write_text(f"mini slots=1  # {words} memory=8GiB\n")
    (mini,) = read_hostfile(tmp_path / "hosts")
    assert measured.machine(mini.host, mini.kind).host == "studio.local"


def test_a_kind_may_name_a_measured_host_with_its_domain() -> None:
    assert profile(machine("studio")).machine("mini", kind="Studio.local").host == "studio"


def test_addresses_are_hosts_of_their_own() -> None:
    both = profile(machine("10.0.0.1"), machine("10.0.0.2", 2.0))
    assert both.machine("10.0.0.1").samples[0].layer.forward == 1.0
    with pytest.raises(UserError, match=r"no measurement of 10\.0\.0\.3"):
        both.machine("10.0.0.3")


def test_of_ranks_that_share_a_host_the_slowest_counts() -> None:
    shared = profile(machine("mac", 1.0), machine("mac", 1.5), machine("mac", 1.2))
    assert shared.machine("mac").samples[0].layer.forward == 1.5


def test_other_work_is_refused_by_what_differs() -> None:
    full = tuned(fine_tune_type="full")
    with pytest.raises(UserError, match="fine_tune_type 'lora', not 'full': measure again"):
        profile(machine("a")).check(work_of(full, SHAPE, "float32"))
    with pytest.raises(UserError, match="dtype 'float32', not 'bfloat16'"):
        profile(machine("a")).check(work_of(tuned(), SHAPE, "bfloat16"))


def test_a_quantised_model_is_other_work() -> None:
    def work(quantization: dict[str, Any] | None) -> dict[str, Any]:
        return work_of(tuned(), SHAPE, "float32", quantization)

    floats = Profile(work(None), (machine("a"),))
    with pytest.raises(UserError, match=r"with quantization None, not \{'bits': 4, 'group_size'"):
        floats.check(work({"group_size": 64, "bits": 4}))
    four_bits = Profile(json.loads(json.dumps(work({}))), (machine("a"),))
    four_bits.check(work({"group_size": 64, "bits": 4, "mode": "affine"}))
    with pytest.raises(UserError, match="quantization"):
        four_bits.check(work({"bits": 4, "model.layers.0.self_attn.q_proj": False}))
    with pytest.raises(UserError, match="quantization"):
        four_bits.check(work(None))


def test_how_many_layers_are_trained_and_how_long_the_run_is_does_not_matter() -> None:
    deeper = ModelShape.from_config(tiny_config(layers=12))
    other = tuned(num_layers=4, iters=7, batch_size=2, learning_rate=1.0)
    profile(machine("a")).check(work_of(other, deeper, "float32"))


def test_profiles_of_several_files_are_one() -> None:
    one = merge([profile(machine("a")), profile(machine("b"))])
    assert [each.host for each in one.machines] == ["a", "b"]
    with pytest.raises(UserError, match="optimizer 'sgd', not 'adam'"):
        merge([profile(machine("a")), profile(machine("b"), fine_tune=tuned(optimizer="sgd"))])


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


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("rows", "Infinity", "is no profile"),
        ("rows", "9" * 400, "more than 1073741824 tokens"),
        ("length", "0", "a micro-batch of 1 x 0 tokens"),
        ("rows", "2", "with [1, 2] rows: not as many each"),
        ("length", "256", "with [256, 256] tokens a row: not ascending"),
        ("layer", "{}", "a layer with times of"),
        ("frozen", "{}", "a layer with times of"),
        ("layer", '{"forward": -1}', "a layer with times of"),
        ("layer", '{"forward": 1, "update": -1}', "a layer with times of"),
        ("layer", f'{{"forward": {"9" * 400}}}', "is no profile"),
        ("head", '{"forward": 1e308}', "a time over 1e+06 s"),
        ("layer", '{"forward": NaN}', "times of"),
    ],
)
def test_times_that_no_clock_shows_are_refused_in_one_line(
    where: str, value: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    write_profile(profile(machine("a")), path)
    content = json.loads(path.read_text())
    content["machines"][0]["samples"][0][where] = "VALUE"
    path.write_text(json.dumps(content).replace('"VALUE"', value))
    with pytest.raises(UserError, match=re.escape(complaint)) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere.json: No such file"):
        read_profile(tmp_path / "nowhere.json")
