"""Partitioners of other packages, found by entry point."""

import sys
from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.partitioners import LayerCosts, balanced, get_partitioner, partitioner_names
from tests.helpers.partitions import homogeneous

MODULE = """\
from shardmlx.errors import UserError

def mine(problem):
    "The last machine takes all that it can."
    from shardmlx.partitioners import Partition
    ones = [1] * (problem.num_stages - 1)
    return problem.stage_map(Partition.from_sizes([*ones, problem.num_layers - len(ones)]))

def nothing(problem):
    return None

def few(problem):
    from shardmlx.partitioners import Partition, StageMap
    return StageMap(Partition.from_sizes([problem.num_layers - 1]), (0,))
"""
PROBLEM = homogeneous(LayerCosts((1.0,) * 8), (0, 1, 2))


def install(site: Path, package: str, **names: str) -> None:
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in names.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[shardmlx.partitioners]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "lean_on_last.py").write_text(MODULE)
    (tmp_path / "broken_one.py").write_text("raise OSError('no\\nlicence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lean_on_last", raising=False)
    return tmp_path


def test_a_package_brings_a_partitioner(site: Path) -> None:
    install(site, "lean", last="lean_on_last:mine")
    assert get_partitioner("last")(PROBLEM).partition.sizes == (1, 1, 6)
    assert get_partitioner("last").__doc__ == "The last machine takes all that it can."
    assert partitioner_names()[-1] == "last"
    install(site, "ours", balanced="lean_on_last:mine")
    assert get_partitioner("balanced") is balanced
    with pytest.raises(UserError, match=r"first.*last"):
        get_partitioner("first")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("broken_one:mine", "OSError: no licence"),
        ("no_such_module:mine", "No module named 'no_such_module'"),
        ("lean_on_last:nothing", "returned None"),
        ("lean_on_last:few", "7 layers into 1 stages on 1 ranks, not 8 into 3 on 3"),
    ],
)
def test_a_bad_partitioner_is_named(site: Path, value: str, fault: str) -> None:
    install(site, "lean", bad=value)
    with pytest.raises(UserError) as caught:
        get_partitioner("bad")(PROBLEM)
    assert f"'bad' of package lean ({value})" in caught.value.problem
    assert fault in caught.value.problem
    assert get_partitioner("balanced") is balanced


def test_two_packages_may_not_bring_the_same_name(site: Path) -> None:
    install(site, "lean", last="lean_on_last:mine")
    install(site, "more", last="lean_on_last:mine")
    with pytest.raises(UserError, match="package lean and package more"):
        get_partitioner("last")
