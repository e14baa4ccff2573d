"""Partitioners of other packages, found by entry point."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardmlx.config.options import OptionError
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, PartitionerNames, balanced, get_partitioner
from tests.helpers.partitions import homogeneous

EXAMPLE = Path(__file__).parents[2] / "helpers/partitioner_package"

ROOT = Path(__file__).parents[3]

PROBLEM = homogeneous(LayerCosts((1.0,) * 8), (0, 1, 2))

MODULE = """\
from shardmlx.partitioners import Partition, StageMap

def nothing(problem):
    return None

def few(problem):
    return StageMap(Partition.from_sizes([problem.num_layers - 1]), (0,))

def moved(problem):
    return problem.stage_map(Partition.from_sizes([1, 1, 6]), (2, 1, 0))

def failing(problem):
    return problem.what_is_not_there
"""


def install(site: Path, package: str, **names: str) -> None:
    """Write what pip writes of a package with these entry points."""
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in names.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[shardmlx.partitioners]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd_ones.py").write_text(MODULE)
    (tmp_path / "broken_one.py").write_text("raise OSError('no\\nlicence')\n")
    shutil.copy(EXAMPLE / "last_heavy.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("odd_ones", "last_heavy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def test_the_example_is_installed_by_pip_and_divides_a_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(EXAMPLE, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--no-build-isolation", "--target", str(tmp_path / "site"), str(source)]
    subprocess.run(pip, check=True, capture_output=True, timeout=120.0)
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1  # memory=64GiB\nb slots=1  # memory=64GiB\n")
    (tmp_path / "model").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    words = [sys.executable, "-m", "shardmlx.plan", str(tmp_path / "model"), "--json", "-"]
    words += ["--hostfile", str(hosts), "--pipeline-stages", "2", "--partitioner", "last-heavy"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120.0)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_layers"] == [1, 15]


def test_a_package_brings_a_partitioner_and_options_take_its_name(site: Path) -> None:
    install(site, "lean", **{"last-heavy": "last_heavy:last_heavy"})
    assert get_partitioner("last-heavy")(PROBLEM).partition.sizes == (1, 1, 6)
    assert next(iter(PartitionerNames("auto"))) == "auto"
    assert [*PartitionerNames()][-1] == "last-heavy"
    assert TrainConfig.from_flat(partitioner="last-heavy").layout.partitioner == "last-heavy"
    with pytest.raises(OptionError) as caught:
        TrainConfig.from_flat(partitioner="first-heavy")
    assert str(caught.value) == (
        "partitioner is 'first-heavy': choose from auto, balanced, uniform, memory, hetero, "
        "last-heavy"
    )


def test_a_name_of_ours_stays_ours(site: Path) -> None:
    install(site, "ours", balanced="last_heavy:last_heavy")
    assert get_partitioner("balanced") is balanced
    assert [*PartitionerNames()].count("balanced") == 1


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("broken_one:mine", "cannot be imported: OSError: no licence"),
        ("no_such_module:mine", "No module named 'no_such_module'"),
        ("odd_ones:no_such_function", "cannot be imported: AttributeError"),
        ("odd_ones:nothing", "returned None, no StageMap"),
        ("odd_ones:few", "divided 7 layers among stages on ranks [0], not 8 on [0, 1, 2]"),
        ("odd_ones:moved", "on ranks [2, 1, 0], not 8 on [0, 1, 2]"),
        ("odd_ones:failing", "failed: AttributeError"),
    ],
)
def test_a_bad_partitioner_is_named(site: Path, value: str, fault: str) -> None:
    install(site, "lean", bad=value)
    with pytest.raises(UserError) as caught:
        get_partitioner("bad")(PROBLEM)
    assert f"--partitioner bad of package lean ({value})" in caught.value.problem
    assert fault in caught.value.problem


def test_its_own_refusal_stays_its_own(site: Path) -> None:
    install(site, "lean", **{"last-heavy": "last_heavy:last_heavy"})
    full = replace(PROBLEM, capacity=(5.0,) * 3)
    with pytest.raises(UserError, match="rank 2 cannot hold the last stage"):
        get_partitioner("last-heavy")(full)


def test_one_that_is_in_no_package_or_in_two_is_refused(site: Path) -> None:
    install(site, "lean", last="last_heavy:last_heavy")
    install(site, "more", last="last_heavy:last_heavy")
    with pytest.raises(UserError, match="package lean and package more"):
        get_partitioner("last")
    with pytest.raises(UserError, match="--partitioner first is not installed here"):
        get_partitioner("first")
