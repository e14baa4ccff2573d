"""How a run goes on when hosts are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.hosts.launch_options import plan_again, read_options


def layout(ranks: int, *options: str) -> tuple[tuple[str, ...], str]:
    return plan_again(read_options(["-n", "4", "--max-restarts", "0", "train", *options]), ranks)


@pytest.mark.parametrize(
    "options",
    [
        "--pipeline-stages 4",
        "--pipeline-stages=2",
        "--data-parallel 2 --replica-rows auto",
        "--stage-map map.yaml --schedule zb-v",
        "--tensor-parallel 2 --data-parallel 2",
        "",
    ],
)
def test_the_run_chooses_a_layout_for_what_is_left(options: str) -> None:
    words, line = layout(3, "--train", *options.split(), "--batch-size", "6")
    assert words[-3:] == ("--train", "--batch-size", "6")
    assert line == "layout for 3 ranks: the run chooses it"


@pytest.mark.parametrize(
    ("settled", "flags"),
    [
        ("pipeline_stages: 2", "--pipeline-stages 3"),
        ("{data_parallel: 2, tensor_parallel: 2}", "--data-parallel 1 --tensor-parallel 1"),
        ("{pipeline_stages: 1, schedule: zb-v}", "--pipeline-stages 3 --schedule auto"),
    ],
)
def test_a_layout_in_the_file_is_overruled_by_one_pipeline(
    settled: str, flags: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{settled}\n")
    words, line = layout(3, "--train", "-c", str(file))
    assert words[words.index(str(file)) + 1 :] == (*flags.split(),)
    assert line == "layout for 3 ranks: one pipeline"


@pytest.mark.parametrize(
    ("settled", "remedy"),
    [
        ("stage_map: map.yaml", "--stage-map"),
        ("{tensor_parallel: 2, tensor_shares: '2,1'}", "leave it out"),
        ("{tensor_parallel: 2, expert_parallel: true}", "leave it out"),
    ],
)
def test_what_suits_its_hosts_alone_cannot_be_taken_out(
    settled: str, remedy: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{settled}\n")
    with pytest.raises(UserError) as error:
        layout(1, "--train", "-c", str(file))
    assert str(file) in error.value.problem
    assert remedy in error.value.remedy
