"""Which end of a job leads to what, and the words that mpirun is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.hosts.mpirun import MpirunJob, replaced
from shardmlx.hosts.restart_policy import Attempt, Decision, after, changes, status_of

HOSTS = ("a", "b")
USED_UP = "2 restarts used up (see --max-restarts)"


def failed(gained: bool | None = True, hosts: tuple[str, ...] = HOSTS) -> Attempt:
    return Attempt(1, hosts, gained)


@pytest.mark.parametrize(
    ("status", "stopped_by", "decision"),
    [
        (0, None, Decision(0)),
        (0, 15, Decision(0)),  # it was done before it heard of it
        (2, None, Decision(2)),
        (138, 2, Decision(130)),
        (1, 15, Decision(143)),
        (2, 15, Decision(143)),
        (1, None, Decision(None, pause=1.0)),
        (137, None, Decision(None, pause=1.0)),
        (143, None, Decision(None, pause=1.0)),  # not by us: a machine that shuts down
    ],
)
def test_the_end_of_the_first_start(
    status: int, stopped_by: int | None, decision: Decision
) -> None:
    assert after([Attempt(status, HOSTS, False)], 3, stopped_by) == decision


def test_pauses_grow() -> None:
    attempts = [failed()] * 9
    pauses = [after(attempts[:count], 9, None).pause for count in range(1, 10)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(
    ("attempts", "reason"),
    [
        ([failed()] * 2, ""),
        ([failed()] * 3, USED_UP),
        ([failed(gained=None)] * 2, ""),
        ([failed(gained=False), failed(gained=True)], ""),
        ([failed(gained=False, hosts=("a",)), failed(gained=False)], ""),
        ([failed(gained=False)] * 3, USED_UP),
    ],
)
def test_reasons_to_give_up(attempts: list[Attempt], reason: str) -> None:
    assert after(attempts, 2, None).reason == reason


def test_a_job_that_loses_the_same_work_twice_is_given_up() -> None:
    decision = after([failed(gained=False)] * 2, 3, None)
    assert decision.status == 1
    assert "twice in a row on the same hosts without a new checkpoint" in decision.reason


def test_no_restarts_need_no_reason() -> None:
    assert after([failed()], 0, None) == Decision(1)


def test_a_process_that_a_signal_ends() -> None:
    assert [status_of(code) for code in (0, 3, -9)] == [0, 3, 137]


def test_hosts_that_go_and_come() -> None:
    assert changes(["a", "b", "c"], ["a", "d", "c"]) == (["b"], ["d"])


def test_the_command_line() -> None:
    job = MpirunJob(
        mpirun=Path("/v/bin/mpirun"),
        python="/v/bin/python",
        command="train",
        options=("--model", "my model"),
        ranks=4,
        hostfile="hosts",
        agent="rsh agent",
        extra=("--mca", "btl", "tcp,self"),
    )
    assert str(job) == (
        "$ /v/bin/mpirun --hostfile hosts -n 4 --prtemca plm_ssh_agent 'rsh agent' --mca btl "
        "tcp,self /v/bin/python -m shardmlx.train --model 'my model'"
    )


def test_the_command_line_of_one_machine() -> None:
    job = MpirunJob(
        mpirun=Path("/v/bin/mpirun"), python="python", command="profile", options=("M",), ranks=2
    )
    assert job.words == ["/v/bin/mpirun", "-n", "2", "python", "-m", "shardmlx.profile", "M"]


@pytest.mark.parametrize(
    "options",
    [
        "--iters 5 --resume never",
        "--resume=never --iters 5",
        "--resume x --iters 5 --resume never",
        "--iters 5",
    ],
)
def test_an_option_is_given_anew(options: str) -> None:
    assert replaced(options.split(), resume="auto") == ("--iters", "5", "--resume", "auto")


def test_an_option_is_taken_out() -> None:
    options = ["--stage-map", "a.yaml", "--test", "--stage-map=b.yaml", "--pipeline-stages", "2"]
    assert replaced(options, stage_map=None) == ("--test", "--pipeline-stages", "2")
