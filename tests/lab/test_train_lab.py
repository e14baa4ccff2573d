"""Training on hosts that share nothing, of which the first alone has model and data."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from testbed.hosts import Lab, hosts
from testbed.jobs import Job, Running, patience
from testbed.runs import events, in_file
from tests.helpers.loaded_runs import train_alone
from tests.helpers.mpirun import mpirun
from tests.helpers.programs import PROGRAMS

STEPS, SAVED_EVERY = 24, 4  # so many that none has ended when a test harms it
TRAIN = (
    *("--model", "model", "--data", "data", "--num-layers", "-1", "--iters", str(STEPS)),
    *("--batch-size", "4", "--micro-batch-size", "1", "--learning-rate", "1e-3"),
    *("--val-batches", "0", "--steps-per-report", "1", "--metrics-file", "metrics"),
)


@pytest.fixture(scope="module")
def expected(small: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    home = tmp_path_factory.mktemp("alone")
    files = ("--model", small, "--data", pirate, "--adapter-path", home / "adapters")
    train_alone(*TRAIN, *files, "--metrics-file", home / "metrics")
    return [event["loss"] for event in events(home / "metrics", "train")]


def furnish(home: Path, model: Path, data: Path) -> None:
    shutil.copytree(model, home / "model")
    shutil.copytree(data, home / "data")


def check_losses(metrics: Path, expected: list[float], steps: int = STEPS) -> None:
    """Those of all steps, of which some may have been made twice."""
    made = [(event["step"], event["loss"]) for event in events(metrics, "train")]
    assert {step for step, _ in made} == set(range(1, steps + 1))
    for step, loss in made:
        assert loss == pytest.approx(expected[step - 1], rel=1e-5), step


def test_two_replicas_of_two_stages_over_a_slow_link(
    small: Path, pirate: Path, expected: list[float], tmp_path: Path
) -> None:
    with hosts(tmp_path, 2, slots=2, rate="20mbit") as lab:
        furnish(lab.home("mac1"), small, pirate)
        two = (*TRAIN, "--pipeline-stages", "2", "--iters", "3")
        # Four replicas, two a host: sums go through two levels.
        four = (*TRAIN, "--pipeline-stages", "1", "--iters", "3", "--adapter-path", "four")
        program = PROGRAMS / "train_in_turn.py"
        command = lab.mpirun(4, program, *two, "--", *four, "--metrics-file", "metrics-of-four")
        mpirun(4, command=command).well()
        check_losses(lab.home("mac1") / "metrics", expected, 3)
        check_losses(lab.home("mac1") / "metrics-of-four", expected, 3)
        assert (lab.home("mac1") / "adapters" / "adapters.safetensors").exists()
        # But for what transformers has looked up, nothing is left there.
        left = [path for path in lab.home("mac2").rglob("*") if not path.is_dir()]
        assert left == []


def until_mac2_goes(lab: Lab, ranks: int) -> Job:
    """The job of so many stages, a rank a host: mac2 is powered off after the first checkpoint, of
    which each host's part has a copy on its neighbour's disk."""
    home = lab.home("mac1")
    in_file(home / "options.yaml", checkpoint_storage="neighbour")

    def power_off(pid: int) -> None:
        wait_for(home / "checkpoints" / f"step-{SAVED_EVERY:07d}" / "COMMITTED")
        lab.power_off("mac2")

    command = lab.command(
        "mac1",
        *(sys.executable, "-m", "shardmlx.launch", "--hostfile", lab.hostfile, "-n", str(ranks)),
        *("--ssh-command", lab.agent, f"--mpirun-options={' '.join(lab.mpirun_options)}"),
        *("train", *TRAIN, "--checkpoint-dir", "checkpoints"),
        *("--timeout", str(math.ceil(patience(6))), "--checkpoint-every", str(SAVED_EVERY)),
        *("--pipeline-stages", str(ranks), "-c", "options.yaml"),
    )
    return mpirun(ranks, command=command, meanwhile=power_off).well()


def test_of_three_hosts_one_goes_and_the_others_go_on(
    small: Path, pirate: Path, expected: list[float], tmp_path: Path
) -> None:
    """Its part of the checkpoint has a copy on its neighbour's disk."""
    with hosts(tmp_path, 3) as lab:
        home = lab.home("mac1")
        furnish(home, small, pirate)
        job = until_mac2_goes(lab, 3)
        (line,) = job.error_lines
        assert "rank 1 on mac2" in line
        assert "launch: goes on without mac2: no login (" in job.stdout
        assert "launch: layout for 2 ranks: the run chooses it" in job.stdout
        (resumed,) = events(home / "metrics", "resume")
        assert resumed["step"] >= SAVED_EVERY
        check_losses(home / "metrics", expected)


def test_of_three_hosts_one_is_a_spare_and_takes_the_place_of_the_one_that_goes(
    small: Path, pirate: Path, expected: list[float], tmp_path: Path
) -> None:
    """As many ranks, in the same layout, with the same losses; what the lost host had of the
    checkpoint, the first has too."""
    with hosts(tmp_path, 3) as lab:
        home = lab.home("mac1")
        furnish(home, small, pirate)
        job = until_mac2_goes(lab, 2)
        assert "launch: mac3 would take the place of a host that is lost" in job.stdout
        assert "launch: goes on without mac2: no login (" in job.stdout
        assert "launch: mac3 takes over" in job.stdout
        assert "layout for" not in job.stdout
        first, second = events(home / "metrics", "start")
        assert first["layout"]["ranks"] != second["layout"]["ranks"], "they name their hosts"
        assert [len(each["layout"]["ranks"]) for each in (first, second)] == [2, 2]
        (resumed,) = events(home / "metrics", "resume")
        assert resumed["step"] >= SAVED_EVERY
        check_losses(home / "metrics", expected)


def test_where_launch_sees_no_checkpoint_a_run_that_must_not_resume_goes_on_from_its_own(
    small: Path, pirate: Path, expected: list[float], tmp_path: Path
) -> None:
    """Launch runs on mac3, whose disk has nothing of the run: rank 0 is on mac1."""
    with hosts(tmp_path, 3) as lab:
        home = lab.home("mac1")
        furnish(home, small, pirate)
        for host in ("mac1", "mac3"):  # rank 0 reads it, too
            (lab.home(host).parent / "two").write_text("mac1 slots=1\nmac2 slots=1\n")
        command = lab.command(
            "mac3",
            *(sys.executable, "-m", "shardmlx.launch", "--hostfile", "/tmp/two"),
            *("--ssh-command", lab.agent, f"--mpirun-options={' '.join(lab.mpirun_options)}"),
            *("train", *TRAIN, "--checkpoint-dir", "checkpoints", "--resume", "never"),
            *("--checkpoint-every", str(SAVED_EVERY), "--pipeline-stages", "2"),
        )
        with Running(command) as running:
            running.until((home / "checkpoints" / "step-0000004" / "COMMITTED").exists)
            running.kill_rank(1, signal.SIGKILL)
            assert running.wait(patience(120)) == 0, running.job().output
            job = running.job()
        starts = [line for line in job.stdout.splitlines() if line.startswith("$ ")]
        assert ["--resume auto" in line for line in starts] == [False, True]
        (resumed,) = events(home / "metrics", "resume")
        assert resumed["step"] >= SAVED_EVERY
        check_losses(home / "metrics", expected)
        assert not (lab.home("mac3") / "checkpoints").exists()


def wait_for(path: Path, seconds: float = 60.0) -> None:
    end = time.monotonic() + patience(seconds)
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.005)
