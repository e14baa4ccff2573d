"""launch with a real mpirun: a job that dies, and a signal that stops all in order.

A prompt that is piped through is in test_generate.py, hosts that go in tests/lab/test_train_lab.py.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from testbed.jobs import PYTHONPATH, Running, patience
from testbed.runs import events
from tests.helpers.loaded_runs import train_alone
from tests.helpers.models_and_batches import load_weights

STEPS = 16

# In every rank's Python: the one of that number kills itself once, when there is a checkpoint.
SUICIDE = """\
import os, pathlib, signal, threading, time

def wait_and_die():
    while not list(pathlib.Path({checkpoints!r}).glob("step-*/COMMITTED")):
        time.sleep(0.01)
    pathlib.Path({killed!r}).touch()
    os.kill(os.getpid(), signal.SIGKILL)

is_the_one = os.environ.get("OMPI_COMM_WORLD_RANK") == "{rank}"
if is_the_one and not pathlib.Path({killed!r}).exists():
    threading.Thread(target=wait_and_die, daemon=True).start()
"""


# In rank 1's Python: the number by which launch asks to stop is that of a signal that kills there,
# as between Linux and macOS.
OTHER_SYSTEM = """\
import os, signal

real = signal.signal

def of_other_system(number, handler):
    return real(number, signal.SIG_DFL if number == signal.SIGUSR1 else handler)

if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
    signal.signal = of_other_system
"""


class Lab:
    """Files of one test, and a way to run launch in it."""

    def __init__(self, path: Path, model: Path, data: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.training = [
            *("--model", str(model), "--data", str(data), "--num-layers", "-1"),
            *("--iters", str(STEPS), "--batch-size", "6", "--micro-batch-size", "1"),
            *("--steps-per-report", "1", "--val-batches", "0", "--learning-rate", "1e-3"),
        ]

    def kill_once(self, rank: int) -> None:
        (self.path / "sitecustomize.py").write_text(
            SUICIDE.format(
                checkpoints=str(self.checkpoints), killed=str(self.path / "killed"), rank=rank
            )
        )

    def launch(
        self, *flags: str, training: tuple[str, ...] = (), reader: str | None = None
    ) -> Running:
        """Start launch; ``reader`` is a command that reads its output."""
        options = ["--mpirun-options", "--oversubscribe --bind-to none", *flags]
        command = [
            *(sys.executable, "-m", "shardmlx.launch", *options, "train", *self.training),
            *("--checkpoint-dir", str(self.checkpoints), "--checkpoint-every", "5"),
            *("--adapter-path", str(self.path / "adapters")),
            *("--metrics-file", str(self.path / "metrics"), *training),
        ]
        if reader is not None:
            command = ["bash", "-o", "pipefail", "-c", f"{shlex.join(command)} | {reader}"]
        return Running(command, env={"PYTHONPATH": f"{self.path}:{PYTHONPATH}"})

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return load_weights(self.path / "adapters")


@pytest.fixture
def lab(small: Path, pirate: Path, tmp_path: Path) -> Lab:
    return Lab(tmp_path, small, pirate)


@pytest.fixture(scope="module")
def expected(
    small: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    path = tmp_path_factory.mktemp("reference")
    train_alone(*Lab(path, small, pirate).training, "--adapter-path", path / "adapters")
    return load_weights(path / "adapters")


def finished(running: Running, status: int) -> str:
    """What a launch has said, that must end with ``status`` and leave nobody behind."""
    assert running.wait(200) is not None, running.where_it_hangs().output
    assert running.left_behind() == []
    job = running.job()
    assert job.returncode == status, job.output
    return job.output


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)


def test_a_job_that_is_killed_goes_on_to_the_same_end(
    lab: Lab, expected: dict[str, np.ndarray]
) -> None:
    lab.kill_once(rank=1)
    with lab.launch("-n", "2") as running:
        output = finished(running, 0)
    assert (lab.path / "killed").exists()
    assert "launch: the job failed with status " in output
    commands = [line for line in output.splitlines() if line.startswith("$ ")]
    assert [command.endswith(" --resume auto") for command in commands] == [False, True]
    (resumed,) = events(lab.path / "metrics", "resume")
    assert resumed["step"] >= 5
    assert difference(lab.weights, expected) <= 1e-6


def test_a_signal_saves_and_stops_in_order(lab: Lab) -> None:
    """Ctrl-C does the same, as test_serve tells of a server. Rank 0 alone is sent a signal, whose
    number may be another one's on other machines."""
    (lab.path / "sitecustomize.py").write_text(OTHER_SYSTEM)
    with lab.launch("-n", "2", training=("--iters", "100000")) as running:
        end = time.monotonic() + patience(100)
        while not list(lab.checkpoints.glob("step-*/COMMITTED")):
            assert running.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        output = finished(running, 143)
    assert output.count("$ ") == 1
    assert "launch: asked all ranks to save and stop" in output
    assert "launch: run the same command to go on" in output
    assert "-----" not in output  # mpirun's block of alarm
    newest = max(lab.checkpoints.glob("step-*/COMMITTED"))
    last = max(event["step"] for event in events(lab.path / "metrics", "train"))
    assert newest.parent.name == f"step-{last:07d}"
    # Of launch's own signal nobody is told.
    assert "shardmlx: stopped by SIGTERM: the run up to step" in output
    assert "SIGUSR1" not in output
    (stop,) = events(lab.path / "metrics", "stop")
    assert (stop["step"], stop["signal"]) == (last, "SIGTERM")


def test_a_reader_that_goes_away_saves_and_stops_in_order(lab: Lab) -> None:
    """At a broken pipe mpirun would kill its ranks."""
    until_a_checkpoint = "grep -m 1 --line-buffered checkpoint.of"
    with lab.launch(
        "-n", "1", training=("--iters", "100000"), reader=until_a_checkpoint
    ) as running:
        output = finished(running, 128 + signal.SIGHUP)
    assert "shardmlx: nobody reads the output any more" in output
    assert "launch: asked all ranks to save and stop" in output
    newest = max(lab.checkpoints.glob("step-*/COMMITTED"))
    last = max(event["step"] for event in events(lab.path / "metrics", "train"))
    assert newest.parent.name == f"step-{last:07d}"
