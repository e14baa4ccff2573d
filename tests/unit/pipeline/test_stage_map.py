"""Dividing layers into stages, and the file that says so."""

from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.pipeline.stage_map import Partition, StageMap, read_stage_map, write_stage_map

EXAMPLE = """\
model: HuggingFaceTB/SmolLM2-135M-Instruct   # optional
stages:
  - num_layers: 12        # layers 0-11
    rank: 0
    host: mac-mini.local
  - num_layers: 18        # layers 12-29
    rank: 1
"""

TWO_ON_RANK_0 = """\
stages:
  - {num_layers: 2, rank: 0}
  - {num_layers: 3, rank: 1}
  - {num_layers: 1, rank: 1}
  - {num_layers: 2, rank: 0}
"""


def read(directory: Path, text: str) -> StageMap:
    path = directory / "map.yaml"
    path.write_text(text)
    return read_stage_map(path)


# Partition


def test_a_partition_counts_its_layers() -> None:
    partition = Partition.from_sizes([12, 18])
    assert partition.ranges == ((0, 12), (12, 30))
    assert partition.sizes == (12, 18)
    assert (partition.num_layers, partition.num_stages) == (30, 2)


@pytest.mark.parametrize(
    "ranges",
    [
        (),
        ((1, 3),),
        ((0, 2), (3, 4)),
        ((0, 2), (1, 4)),
        ((0, 2), (2, 2)),
        ((0, 2), (2, 1)),
    ],
)
def test_a_partition_has_every_layer_once(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="ranges of layers"):
        Partition(ranges)


# StageMap


def test_a_stage_map_is_read(tmp_path: Path) -> None:
    stage_map = read(tmp_path, EXAMPLE)
    assert stage_map.partition.ranges == ((0, 12), (12, 30))
    assert stage_map.placement == (0, 1)
    assert stage_map.hosts == ("mac-mini.local", None)
    assert stage_map.model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (stage_map.num_stages, stage_map.pp, stage_map.virtual) == (2, 2, 1)


def test_ranks_are_in_order_by_default(tmp_path: Path) -> None:
    stage_map = read(tmp_path, "stages: [{num_layers: 1}, {num_layers: 2}, {num_layers: 1}]")
    assert stage_map.placement == (0, 1, 2)


def test_several_stages_may_be_on_one_rank(tmp_path: Path) -> None:
    stage_map = read(tmp_path, TWO_ON_RANK_0)
    assert (stage_map.num_stages, stage_map.pp, stage_map.virtual) == (4, 2, 2)
    assert stage_map.stages_of(0) == (0, 3)
    assert stage_map.stages_of(1) == (1, 2)
    assert StageMap.from_sizes([3]).virtual == 1


def test_a_map_of_sizes_has_a_stage_on_each_rank_unless_told() -> None:
    assert StageMap.from_sizes([2, 3]) == StageMap(Partition(((0, 2), (2, 5))), (0, 1))
    placed = StageMap.from_sizes([1, 1, 1, 1], (1, 0, 0, 1))
    assert placed.placement == (1, 0, 0, 1)
    assert placed.hosts == (None,) * 4


def test_a_rank_has_the_host_that_any_of_its_stages_names() -> None:
    stage_map = StageMap(Partition.from_sizes([1, 1, 1]), (0, 1, 0), (None, None, "mini"))
    assert stage_map.host_of(0) == "mini"
    assert stage_map.host_of(1) is None


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    for stage_map in (
        read(tmp_path, EXAMPLE),
        read(tmp_path, TWO_ON_RANK_0),
        StageMap(Partition.from_sizes([1]), (0,), ("a: 'b' # \"c\"\\",), "null"),
    ):
        write_stage_map(stage_map, path)
        assert read_stage_map(path) == stage_map


def test_a_written_map_says_which_layers_a_stage_has(tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    write_stage_map(StageMap.from_sizes([2, 1, 3]), path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.partition("# ")[2] for line in lines[1::2]] == [
        "layers 0-1",
        "layer 2",
        "layers 3-5",
    ]


# Bad input


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("12", " holds a int"),
        ("stages: [\n", ", line 2: "),
        ("model: x", "stages is None"),
        ("stages: []", "stages is []"),
        ("stage: []", "'stage'"),
        ("stages: [{num_layers: 1}]\ncolour: red", "'colour'"),
        ("stages: [12, 18]", ", stage 0 is 12"),
        ("stages: [{layers: 12}]", ", stage 0: unknown key 'layers'"),
        ("stages: [{num_layers: 12}, {rank: 1}]", ", stage 1: no num_layers"),
        ("stages: [{num_layers: 0}]", ", stage 0: num_layers is 0"),
        ("stages: [{num_layers: 1.5}]", ", stage 0: num_layers is 1.5"),
        ("stages: [{num_layers: true}]", ", stage 0: num_layers is True"),
        ("stages: [{num_layers: 1, rank: -1}]", ", stage 0: rank is -1"),
        ("stages: [{num_layers: 1, host: 7}]", ", stage 0: host is 7"),
        ("model: 7\nstages: [{num_layers: 1}]", "model is 7"),
        ("stages: [{num_layers: 1, rank: 0}, {num_layers: 1, rank: 2}]", "no stage is on rank 1"),
        ("stages: [{num_layers: 1}, {num_layers: 1, rank: 0}]", ", stage 0: no rank"),
        (
            "stages: [{num_layers: 1, rank: 0, host: a}, {num_layers: 1, rank: 0, host: b}]",
            "the stages of rank 0 are on different hosts, a and b",
        ),
    ],
)
def test_a_bad_stage_map_is_named_with_stage_and_value(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert problem in caught.value.problem
    assert str(tmp_path / "map.yaml") in caught.value.problem


def test_a_missing_stage_map_is_named() -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        read_stage_map("nowhere.yaml")


def test_layers_must_be_the_models_and_stages_the_command_lines(tmp_path: Path) -> None:
    stage_map = read(tmp_path, EXAMPLE)
    stage_map.check_layers(30)
    with pytest.raises(UserError, match=r"30 layers \(12 \+ 18\), but the model has 32"):
        stage_map.check_layers(32)
    stage_map.check_pipeline(None)
    stage_map.check_pipeline(2)
    with pytest.raises(UserError, match="--pipeline-stages is 4"):
        stage_map.check_pipeline(4)


def test_a_map_is_for_the_model_that_it_names(tmp_path: Path) -> None:
    stage_map = read(tmp_path, EXAMPLE)
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    stage_map.check_model(name, 30)
    with pytest.raises(UserError, match="but the model has 31"):
        stage_map.check_model(name, 31)
    with pytest.raises(UserError, match=f"is for the model {name}, not for another"):
        stage_map.check_model("another", 30)
    StageMap.from_sizes([30]).check_model("any", 30)
    home = StageMap(Partition.from_sizes([1]), (0,), model="~/model")
    home.check_model(str(Path.home() / "model"), 1)


@pytest.mark.parametrize(
    ("placement", "hosts", "problem"),
    [
        ((0,), (), "1 ranks for 2 stages"),
        ((0, 1), ("a",), "1 hosts for 2 stages"),
        ((0, -1), (), "a stage on rank -1"),
    ],
)
def test_every_stage_has_its_rank_and_its_host(
    placement: tuple[int, ...], hosts: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        StageMap(Partition.from_sizes([1, 1]), placement, hosts)


def test_ranks_with_unequal_numbers_of_stages_have_no_virtual_count() -> None:
    stage_map = StageMap(Partition.from_sizes([1, 1, 1]), (0, 1, 0))
    with pytest.raises(UserError, match="rank 0 has 2, rank 1 has 1"):
        _ = stage_map.virtual
