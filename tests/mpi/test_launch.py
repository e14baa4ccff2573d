"""launch with a real mpirun: jobs that die, hosts that go, and a signal that stops all in order."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.jobs import PYTHONPATH, Running
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import events, train_well

STEPS = 16

# In every rank's Python: the one of that number kills itself once, when there is a checkpoint.
SUICIDE = """\
import os, pathlib, signal, threading, time

def wait_and_die():
    while not list(pathlib.Path({checkpoints!r}).glob("step-*/COMMITTED")):
        time.sleep(0.01)
    pathlib.Path({killed!r}).touch()
    pathlib.Path({down!r}).write_text({host!r})
    os.kill(os.getpid(), signal.SIGKILL)

is_the_one = os.environ.get("OMPI_COMM_WORLD_RANK") == "{rank}"
if is_the_one and not pathlib.Path({killed!r}).exists():
    threading.Thread(target=wait_and_die, daemon=True).start()
"""

# Logs in on hosts that are all this machine, but for those that are down.
AGENT = """\
#!/bin/sh
if grep -qx "$1" {down}; then
    echo "ssh: connect to host $1 port 22: No route to host" >&2
    exit 255
fi
shift
exec sh -c "$*"
"""


class Lab:
    """Files of one test, and a way to run launch in it."""

    def __init__(self, path: Path, model: Path, data: Path) -> None:
        self.path = path
        self.down = path / "down"
        self.down.touch()
        self.checkpoints = path / "checkpoints"
        self.training = [
            *("--model", str(model), "--data", str(data), "--num-layers", "-1"),
            *("--iters", str(STEPS), "--batch-size", "6", "--micro-batch-size", "1"),
            *("--steps-per-report", "1", "--val-batches", "0", "--learning-rate", "1e-3"),
        ]
        self.agent = path / "agent"
        self.agent.write_text(AGENT.format(down=self.down))
        self.agent.chmod(0o755)

    def kill_once(self, rank: int, host: str = "") -> None:
        """A rank kills itself after the first checkpoint, and its host is gone with it."""
        (self.path / "sitecustomize.py").write_text(
            SUICIDE.format(
                checkpoints=str(self.checkpoints),
                killed=str(self.path / "killed"),
                down=str(self.down),
                host=host,
                rank=rank,
            )
        )

    def launch(self, *flags: str, training: tuple[str, ...] = ()) -> Running:
        options = ["--mpirun-options", "--oversubscribe --bind-to none", *flags]
        return Running(
            [
                *(sys.executable, "-m", "shardmlx.launch", *options, "train", *self.training),
                *("--checkpoint-dir", str(self.checkpoints), "--checkpoint-every", "5"),
                *("--adapter-path", str(self.path / "adapters")),
                *("--metrics-file", str(self.path / "metrics"), *training),
            ],
            env={"PYTHONPATH": f"{self.path}:{PYTHONPATH}"},
        )

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
    """The weights of the run that nothing happens to."""
    path = tmp_path_factory.mktemp("reference")
    train_well(1, *Lab(path, small, pirate).training, "--adapter-path", path / "adapters")
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


def test_a_host_that_dies_is_left_behind(lab: Lab, expected: dict[str, np.ndarray]) -> None:
    hostfile = lab.path / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in ("localhost", "north", "south")))
    lab.kill_once(rank=2, host="south")
    with lab.launch(
        *("--hostfile", str(hostfile), "--agent", str(lab.agent)),
        training=("--pipeline-stages", "3"),
    ) as running:
        output = finished(running, 0)
    assert "launch: goes on without south: there is no way to it" in output
    assert "launch: layout for 2 ranks: one pipeline of 2, instead of --pipeline-stages 3" in output
    assert difference(lab.weights, expected) <= 1e-5


def test_a_signal_saves_and_stops_in_order(lab: Lab) -> None:
    """Ctrl-C does the same, as test_serve tells of a server."""
    with lab.launch("-n", "2", training=("--iters", "100000")) as running:
        end = time.monotonic() + 100
        while not list(lab.checkpoints.glob("step-*/COMMITTED")):
            assert running.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        output = finished(running, 143)
    assert output.count("$ ") == 1
    assert "launch: asked all ranks to save and stop" in output
    newest = max(lab.checkpoints.glob("step-*/COMMITTED"))
    last = max(event["step"] for event in events(lab.path / "metrics", "train"))
    assert newest.parent.name == f"step-{last:07d}"
