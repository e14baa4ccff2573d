"""Launch in virtual time: its restarts, with hosts that go and come back, and mpirun and the job
replaced by a model of them.

A job takes steps and commits checkpoints. A start of it comes to its end, fails, meets bad input,
loses a host, or its mpirun is killed, or ends as if all were well; launch is asked to stop at any
moment. The model knows which updates are on the disk, and what each start begins with.
"""

from __future__ import annotations

import signal
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

from shardmlx.common.cli import BAD_INPUT
from shardmlx.errors import Stopped
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.launch_options import LaunchOptions, read_options
from shardmlx.hosts.restarts import (
    FAILED,
    LONGEST_PAUSE,
    SECONDS_FOR_HOSTS,
    SECONDS_OF_SERVICE,
    Attempt,
    GaveUp,
    JobStarts,
    Start,
    job_status,
)
from shardmlx.hosts.supervisor import Ended
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.simulation import Host, Simulation

SLOTS = (("mac1", 1), ("mac2", 2), ("mac3", 1), ("mac4", 1))
RANKS = (5, 3, 2)
"""Of all hosts, or with one or two of them to spare."""

SECONDS_OF_STEP = 30.0
STEPS = 40
"""Of a whole run."""

ASKED = 128 + signal.SIGUSR1.value
"""Status of a job that was asked to stop in order."""


@cache
def options_of(command: str, ranks: int, resume: str) -> LaunchOptions:
    """Return the options of a launch on all hosts."""
    with tempfile.TemporaryDirectory() as name:
        hostfile = Path(name, "hosts")
        hostfile.write_text("".join(f"{host} slots={slots}\n" for host, slots in SLOTS))
        words = ["--hostfile", str(hostfile), "-n", str(ranks), command]
        if command == "serve":
            return read_options([*words, "--model", "nowhere"])
        return read_options([*words, "--data", "nowhere", "--train", "--resume", resume])


class World:
    """A launch of a command, that may start again so often; ``restarts`` drawn if None."""

    def __init__(
        self, simulation: Simulation, command: str | None = None, restarts: int | None = None
    ) -> None:
        self.simulation = simulation
        self.random = draw = simulation.random
        self.command = command or draw.choice(["train", "train", "serve"])
        self.resume = draw.choice(["auto", "auto", "never"])
        ranks = RANKS[0] if restarts is not None else draw.choice(RANKS)
        most = draw.choice([0, 1, 3, 3, 12]) if restarts is None else restarts
        self.launch = replace(options_of(self.command, ranks, self.resume), max_restarts=most)
        self.hosts = [Host(simulation, name) for name, _ in SLOTS]
        self.stopped_by: int | None = None
        self.gave_up: str | None = None
        self.ended_at = 0.0
        """When the last start ended."""
        self.has_come_to_its_end = False
        self.committed = 0
        """The step of the newest checkpoint of this launch."""
        self.older = draw.choice([0, 0, 7])
        """That of another run in the directory."""
        self.said: list[str] = []
        self._lines: list[str] = []
        """What was said since the last start ended, cut before the first colon."""
        self.starts = 0
        self._counted = 0
        """Failures, of a server since it last ran well."""
        self._slept = 0.0
        self._answering: list[str] = [name for name, _ in SLOTS]
        self._before: tuple[list[str], tuple[str, ...]] = (self._answering, ())
        """The hosts that answered before the last start, and those that it had."""
        self._stops_at = draw.uniform(0, 3000) if draw.random() < 0.15 else float("inf")

    def run(self) -> int:
        """Launch; return its exit status, as ``launcher.run`` does."""
        try:
            return JobStarts(self.launch, self).run()
        except Stopped as stop:
            return 128 + stop.signal
        except GaveUp as error:
            self.gave_up = str(error)
            self.simulation.note("gives up:", error)
            return FAILED

    def now(self) -> float:
        """Return the time of the world."""
        return self.simulation.now

    def say(self, text: str) -> None:
        """Hear a line."""
        self.simulation.note("says:", text)
        self.said.append(text)
        self._lines.append(text.partition(":")[0])

    def sleep(self, seconds: float) -> None:
        """Let time pass, unless launch is asked to stop."""
        self._slept += seconds
        self._pass(seconds)
        if self.stopped_by is not None:
            raise Stopped(self.stopped_by, "asked to stop")

    def _pass(self, seconds: float) -> None:
        end = self.simulation.now + seconds
        if self._stops_at <= end and self.stopped_by is None:
            end = max(self._stops_at, self.simulation.now)
            self.stopped_by = signal.SIGTERM
            self.simulation.note("launch is sent SIGTERM")
        self.simulation.now = end

    def ask(self) -> dict[str, Finding]:
        """Return which hosts do not answer."""
        self._answering = [each.name for each in self.hosts if each.is_awake]
        self.simulation.note("answer:", *self._answering)
        missing = [each.name for each in self.hosts if not each.is_awake]
        return {name: Finding(name, "no login", "see that it is on") for name in missing}

    def start(self, start: Start) -> Attempt:
        """Run the job on some hosts, until it ends in one way or another."""
        self._check_start(start)
        assert [*self._lines] == self._expected_lines(start)
        self._lines.clear()
        self._before = (self._answering, start.hosts)
        self.starts += 1
        self._slept = 0.0
        began = self.simulation.now
        step = self._begins_at(start)
        self.simulation.note("starts on", *start.hosts, "ranks", start.ranks, "step", step)
        before = self.committed
        ended, told = self._end_of(start, step)
        status, note = job_status(ended, told, was_stopped=self.stopped_by is not None)
        if note:
            self.say(note)
        assert status != 0 or told == 0
        self.ended_at = self.simulation.now
        if self.command == "serve" and self.ended_at - began > SECONDS_OF_SERVICE:
            self._counted = 0
        self._counted += 1
        self.simulation.note("ends:", ended, told, "committed", self.committed)
        gained = self.committed > before if self.command == "train" else None
        return Attempt(status, start.hosts, gained)

    def _check_start(self, start: Start) -> None:
        """Check what a start is given, and how long launch has waited for it."""
        slots = sum(slots for name, slots in SLOTS if name in start.hosts)
        assert {*start.hosts} <= {*self._answering}
        assert start.hosts[0] == SLOTS[0][0], "rank 0 has what is saved"
        wanted = self.launch.ranks
        possible = sum(slots for name, slots in SLOTS if name in self._answering)
        assert start.ranks <= slots
        assert start.ranks == (wanted if self.command == "serve" else min(wanted, possible))
        if self.starts:
            pause = min(2.0 ** (self._counted - 1), LONGEST_PAUSE)
            assert self._slept >= pause
            assert self.command == "serve" or self._slept == pause

    def _expected_lines(self, start: Start) -> list[str]:
        """Return the beginnings of the lines that were due before a start."""
        answered, had = self._before
        if not self.starts:
            spares = [name for name, _ in SLOTS if name not in start.hosts]
            said = f"{' and '.join(spares)} would take the place of a host that is lost"
            return [said] if spares else []
        lines = [line for line in self._lines if line.startswith(("mpirun", "the job failed"))]
        back = [name for name in self._answering if name not in answered]
        new = [name for name in start.hosts if name not in had]
        if self.command == "serve":
            waits = [line for line in self._lines if line.startswith("waits for")]
            taking = [f"{name} takes over" for name in new]
            return [*lines, *waits, *taking, "the server starts again; its prefix cache is lost"]
        gone = [name for name in answered if name not in self._answering]
        lines += [f"goes on without {name}" for name in gone]
        lines += [f"{name} is back" for name in back]
        lines += [f"{name} takes over" for name in new if name not in back]
        if start.ranks < self.launch.ranks:
            return [*lines, f"layout for {start.ranks} rank{'s' * (start.ranks > 1)}"]
        is_whole = len(self._answering) == len(SLOTS)
        there = f"{'all' if is_whole else 'enough'} hosts are there"
        return [*lines, there] if self._had_fewer(had) else lines

    def _had_fewer(self, hosts: tuple[str, ...]) -> bool:
        """Return whether a start on these hosts had fewer ranks than are wanted."""
        return sum(slots for name, slots in SLOTS if name in hosts) < self.launch.ranks

    def _begins_at(self, start: Start) -> int:
        """Return the step from which the run goes on, as ``train`` finds it."""
        options = [*start.options]
        resume = options[options.index("--resume") + 1] if "--resume" in options else "auto"
        if self.command == "serve":
            return 0
        if resume == "auto":
            assert self.resume == "auto" or self.committed, "an older run was excluded"
            return max(self.committed, self.older if self.resume == "auto" else 0)
        assert not self.committed, "what was saved is trained anew"
        return 0

    def _end_of(self, start: Start, step: int) -> tuple[Ended, int | None]:
        """Let steps pass; return the end of mpirun, and what rank 0 has told."""
        draw = self.random
        kind = draw.choice(["good", "fails", "fails", "host", "host", "killed", "well", "bad"])
        most = draw.choice([0, 1, 5, 30, 60])
        for _ in range(most):
            if step == STEPS and self.command == "train":
                break
            self._pass(SECONDS_OF_STEP)
            if self.stopped_by is not None:
                self.committed = max(self.committed, step)
                return Ended(ASKED, 1), draw.choice([ASKED, None])
            step += 1
            if draw.random() < 0.1:
                self.committed = step
        if (step >= STEPS and self.command == "train") or kind == "good":
            self.has_come_to_its_end = True
            return Ended(draw.choice([0, 0, 143]), 1), 0
        if kind == "host":
            host = draw.choice([each for each in self.hosts if each.name in start.hosts])
            host.sleep(draw.choice([20.0, 100.0, 290.0, 1e9]))
            return Ended(draw.choice([1, 143, 137]), 1, killed=False), draw.choice([1, None])
        if kind == "killed":
            return Ended(137, 1, killed=True), None
        if kind == "well":
            return Ended(0, 1), None
        if kind == "bad" and draw.random() < 0.3:
            return Ended(BAD_INPUT, 1), BAD_INPUT
        return Ended(draw.choice([1, 137, 139]), 1), draw.choice([1, None])


def play(simulation: Simulation) -> None:
    """Status 0 is that of a job that came to its end, and of no other. A start has hosts that
    answered, rank 0's first, and no more ranks than these have slots; a server has all its ranks.
    What a checkpoint of this launch has is not trained anew, and a run that was excluded is none to
    go on from. There are at most so many restarts, the pauses double up to 60 s, and a server waits
    for hosts as long as it should. Launch ends, and has said why: a host that is gone is named."""
    world = World(simulation)
    status = world.run()
    assert (status == 0) == world.has_come_to_its_end
    if world.command == "train":
        assert world.starts <= world.launch.max_restarts + 1
    waited = simulation.now - world.ended_at
    assert waited <= LONGEST_PAUSE + SECONDS_FOR_HOSTS + 20
    if world.stopped_by is not None and status != 0:
        assert status in (128 + world.stopped_by, FAILED)
        assert (status == FAILED) == (world.gave_up is not None)
    elif world.gave_up is not None:
        _check_reason(world, world.gave_up)
    else:
        assert status in (0, BAD_INPUT) or world.launch.max_restarts == 0
    _check_lines(world)


def _check_reason(world: World, reason: str) -> None:
    """Check that launch gives up for a reason that holds."""
    missing = [host.name for host in world.hosts if not host.is_awake]
    if "used up" in reason:
        assert world.starts >= world.launch.max_restarts + 1
    elif "twice in a row" not in reason:
        assert missing
        assert all(f"{name}: no login" in reason for name in missing) or (
            reason.startswith(f"the host of rank 0, {SLOTS[0][0]}: no login")
        )


def _check_lines(world: World) -> None:
    """Check that each restart was said beforehand."""
    restarts = [line for line in world.said if line.startswith("the job failed with status")]
    gave_up_first = world.gave_up is not None or world.stopped_by is not None
    assert len(restarts) in (world.starts - 1, world.starts if gave_up_first else -1)


LAUNCHES = Room("launches", play)
