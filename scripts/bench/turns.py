"""Contenders: programs that run at the same time, but work one at a time, each when it is asked.

A contender starts, warms up and then rests: its processes wait in a read, and take no core while
another works. So two programs can be compared step by step within one run, and neither starts
anew between its turns. This module imports nothing of the project: torch's Python runs it too.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

T = TypeVar("T")

SOCKET = "BENCH_SOCKET"
"""Variable in a contender's environment: the socket on which its processes are asked."""

SECONDS_TO_START = 600.0
"""Limit from the start to the end of the warm-up."""

SECONDS_TO_END = 60.0


class Turns:
    """A contender's end, one in each of its processes."""

    def __init__(self, rank: int) -> None:
        with socket.socket(socket.AF_UNIX) as connection:  # the file keeps it open
            connection.connect(os.environ[SOCKET])
            self._file: IO[str] = connection.makefile("rw")
        self.answer(rank)

    def answer(self, value: Any) -> None:
        """Answer the result of the turn, as JSON."""
        self._file.write(json.dumps(value) + "\n")
        self._file.flush()

    def rest(self) -> Any:
        """Wait for the next turn and return its request; end the process if there is none."""
        line = self._file.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def serve(self, work: Callable[..., Any]) -> None:
        """Say that this process is warm; answer ``work(*request)`` to each request until one is
        None."""
        self.answer(None)
        while (asked := self.rest()) is not None:
            self.answer(work(*asked))
        self.answer(None)


class Contender:
    """Programs that make one contender; ``ranks`` processes of them use ``Turns``.

    They answer once more than they are asked: at the end of their warm-up. One that ``sums_up``
    answers a summary in the turn after its last.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        *,
        ranks: int = 1,
        environments: Sequence[Mapping[str, str]] = (),
        sums_up: bool = False,
    ) -> None:
        """Add ``environments[i]`` to the environment of command i."""
        self.name = name
        self.sums_up = sums_up
        self._directory = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._log = Path(self._directory.name, "log")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(Path(self._directory.name, "socket")))
        listener.listen(ranks)
        listener.settimeout(0.1)
        common = {**os.environ, SOCKET: listener.getsockname()}
        given = list(environments) or [{}] * len(commands)
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen(
                    list(map(str, command)),
                    env={**common, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                for command, environment in zip(commands, given, strict=True)
            ]
        self._files: list[IO[str]] = []
        with listener:
            self._meet(listener, ranks)
        by_rank = dict(zip(self._answers(), self._files, strict=True))
        self._files = [by_rank[rank] for rank in sorted(by_rank)]
        self.warm_up = self._answers()

    def _meet(self, listener: socket.socket, ranks: int) -> None:
        end = time.monotonic() + SECONDS_TO_START
        while len(self._files) < ranks:
            if time.monotonic() > end or any(each.poll() is not None for each in self._processes):
                self._fail()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:  # the file keeps it open
                connection.settimeout(SECONDS_TO_START)
                self._files.append(connection.makefile("rw"))

    def turn(self, request: Any = None) -> list[Any]:
        """Return the answers of all ranks to ``request``."""
        for file in self._files:
            file.write(json.dumps(request) + "\n")
            file.flush()
        return self._answers()

    def close(self) -> None:
        """Say that there are no more turns."""
        for file in self._files:
            file.close()
        for process in self._processes:
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait(SECONDS_TO_END)
        self._directory.cleanup()

    def _answers(self) -> list[Any]:
        lines = []
        for file in self._files:
            try:
                line = file.readline()
            except OSError:
                line = ""
            if not line:
                self._fail()
            lines.append(json.loads(line))
        return lines

    def _fail(self) -> NoReturn:
        for process in self._processes:
            process.terminate()
        text = self._log.read_text()[-3000:]
        self.close()
        raise SystemExit(f"{self.name} failed:\n{text}")


@contextmanager
def warmed_up(contenders: Iterable[Contender]) -> Iterator[list[Contender]]:
    """Start the contenders one after the other; none outlives the ``with`` block."""
    running: list[Contender] = []
    try:
        for contender in contenders:
            running.append(contender)
            print(f"{contender.name} is warm", file=sys.stderr, flush=True)
        yield running
    finally:
        for contender in running:
            contender.close()


def by_turns(contenders: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run the contenders by turns, A B A B, so that all meet the same machine."""
    results: dict[str, list[T]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, work in contenders.items():
            results[name].append(work())
    return results


@dataclass(frozen=True)
class Found:
    """What contenders have answered: in each turn what each rank did, and at their end."""

    turns: Mapping[str, Sequence[Sequence[Any]]]
    summaries: Mapping[str, Any]

    @property
    def step_seconds(self) -> dict[str, list[float]]:
        """Return the seconds of a step in each turn, by the rank that took longest."""
        return {
            name: [max(float(each["step_seconds"]) for each in answers if each) for answers in own]
            for name, own in self.turns.items()
        }

    def of_rank_0(self, key: str) -> dict[str, list[float]]:
        """Return a number that rank 0 answers, in each turn."""
        return {
            name: [float(answers[0][key]) for answers in own] for name, own in self.turns.items()
        }


def in_turns(contenders: Iterable[Contender], rounds: int) -> Found:
    """Let the contenders work by turns, and end."""
    with warmed_up(contenders) as running:
        turns = by_turns({each.name: each.turn for each in running}, rounds)
        return Found(turns, {each.name: each.turn()[0] for each in running if each.sums_up})
