"""``shardmlx schedule``: what it prints, and how it ends on bad input."""

import pytest

from shardmlx.main import main
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions
from tests.helpers.grids import parse_grid

SIZE = ["--pipeline-stages", "4", "--micro-batches", "8"]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["schedule", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_actions_are_one_line_a_rank_compute_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--schedule", "1f1b", *SIZE, "--print", "actions") == (
        "r0 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7\n"
        "r1 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7\n"
        "r2 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7\n"
        "r3 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7\n"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_printed_actions_parse_back_to_the_schedule(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output(capsys, "--schedule", name, *SIZE, "--print", "actions").splitlines()
    assert [line.split()[0] for line in lines] == ["r0", "r1", "r2", "r3"]
    rows = "\n".join(line.split(maxsplit=1)[1] for line in lines)
    assert parse_grid(rows) == compute_actions(name, 4, 8)


def test_lowered_shows_the_messages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--pipeline-stages", "2", "--micro-batches", "1", "--print", "lowered"]
    assert output(capsys, "--schedule", "zb-h1", *arguments) == (
        "r0 0F0 0SEND_F0 0RECV_B0 0W0\nr1 1RECV_F0 1F0 1I0 1SEND_B0 1W0\n"
    )


def test_timeline_draws_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--pipeline-stages", "2", "--micro-batches", "3", "--print", "timeline"]
    assert output(capsys, "--schedule", "zb-h1", *arguments) == (
        "r0 0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2\nr1 .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2\n"
    )


def test_without_print_there_is_a_summary_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "--schedule", "1f1b", *SIZE)
    assert text.startswith(
        "makespan        33\n"
        "bubble          27.3%\n"
        "peak in flight  4 3 2 1  (stage-micro-batches, ranks 0 to 3)\n\n"
        "r0 0F0 0F1 "
    )


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--schedule", "2f2b", *SIZE], "2f2b"),
        (["--pipeline-stages", "0", "--micro-batches", "8"], "0"),
        ([*SIZE, "--virtual-stages", "2"], "2"),
        ([*SIZE, "--costs", "1,2"], "1,2"),
        ([*SIZE, "--costs", "1,-2,1"], "1,-2,1"),
        (["--pipeline-stages", "four", "--micro-batches", "8"], "--pipeline-stages"),
        (["--pipeline-stages", "4"], "--micro-batches"),
    ],
)
def test_bad_input_ends_in_one_line_and_status_2(
    arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert value in captured.err
    assert captured.err.count("\n") == 1
