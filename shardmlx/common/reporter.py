"""Tells the user, on rank 0: messages, progress, and one JSON line for each report."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardmlx.common.durable_files import FileLock
from shardmlx.common.formatting import columns, without_controls
from shardmlx.errors import UserError, file_access

T = TypeVar("T")

Listener = Callable[[str, Mapping[str, Any]], None]
"""Function called with the name and the values of an event."""

SHOW_PROGRESS_FROM = 2000
"""Number of items from which a bar is of use."""


class Reporter:
    """The only output of a job to its user. ``quiet`` ranks have one too, which prints nothing.

    A ``name`` says of which of several runs it tells; it then prints neither tables nor bars.
    """

    def __init__(
        self,
        metrics_file: Path | None = None,
        *,
        quiet: bool = False,
        listeners: Sequence[Listener] = (),
        name: str = "",
    ) -> None:
        self._name = name
        self._listeners = () if quiet else tuple(listeners)
        live = not (quiet or name) and _shown_in_terminal()
        self._console = Console(
            quiet=quiet,
            highlight=False,
            soft_wrap=True,
            force_terminal=live,
            no_color=None if live else True,  # NO_COLOR then decides
        )
        self._metrics_file = None if quiet else metrics_file
        self._mode = "w"
        self._lock: FileLock | None = None
        if self._metrics_file is not None:
            check_writable(self._metrics_file, "--metrics-file")
            if self._metrics_file.exists():
                _locked(self._metrics_file).release()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not live,
            transient=True,
            refresh_per_second=4,  # each refresh takes time from the computing core
        )

    def of_run(self, name: str, metrics_file: Path | None) -> Reporter:
        """Return the reporter of a run, with the same listeners."""
        quiet = self._console.quiet
        return Reporter(metrics_file, quiet=quiet, listeners=self._listeners, name=name)

    def listen(self, listener: Listener) -> None:
        """Tell one more listener of events, where any are told."""
        if not self._console.quiet:
            self._listeners += (listener,)

    def say(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}" if self._name else text, markup=False)

    def warn(self, text: str) -> None:
        what = f"warning: {self._name}: {text}" if self._name else f"warning: {text}"
        self._console.print(what, markup=False, style="yellow")

    def say_marked(self, pieces: Iterable[tuple[str, bool]]) -> None:
        """Print text of which some is marked: green in a terminal, «so» elsewhere."""
        text = Text()
        for piece, is_marked in pieces:
            shown = without_controls(piece)  # data may hold what steers a terminal
            if is_marked and self._console.no_color:
                shown = f"«{shown}»"
            text.append(shown, style="bold green" if is_marked else "dim")
        self._console.print(text)

    def table(self, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        """Print text in columns, those of numbers to the right."""
        if not self._name:
            self.say(columns(header, lines))

    def event(self, event: str, values: Mapping[str, Any]) -> None:
        """Tell the listeners of an event with its ``time``; write its line of the metrics file."""
        values = {**values, "time": round(time.time(), 3)}
        if self._name:
            values["run"] = self._name
        for listener in self._listeners:
            listener(event, values)
        if self._metrics_file is None:
            return
        if self._lock is None:
            with file_access("write", self._metrics_file):
                self._lock = _locked(self._metrics_file)
        with (
            file_access("write", self._metrics_file),
            # Opened late: a refused run leaves the metrics of the last one.
            self._metrics_file.open(self._mode, encoding="utf-8") as file,
        ):
            file.write(json.dumps({"event": event, **finite(values)}) + "\n")
        self.go_on()

    def close(self) -> None:
        """Let other runs write the metrics file."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def go_on(self) -> None:
        """Keep the metrics file's content; otherwise events replace it."""
        self._mode = "a"

    @contextmanager
    def bar(self, description: str, total: int, done: int = 0) -> Iterator[Bar]:
        """Show a progress bar, only in a terminal."""
        started = not self._progress.live.is_started
        if started:
            self._progress.start()
        task = self._progress.add_task(description, total=total, completed=done, note="")
        try:
            yield Bar(self._progress, task)
        finally:
            self._progress.remove_task(task)
            if started:
                self._progress.stop()

    def track(self, description: str, items: Sequence[T]) -> Iterator[T]:
        """Iterate with a bar if there is much to do."""
        if len(items) < SHOW_PROGRESS_FROM:
            yield from items
            return
        with self.bar(description, len(items)) as bar:
            for item in items:
                yield item
                bar.advance()


def _locked(metrics_file: Path) -> FileLock:
    """Keep other runs from a metrics file. Raises ``UserError`` if one writes it, ``OSError``."""
    problem = f"--metrics-file {metrics_file}: another run writes it"
    return FileLock(metrics_file, UserError(problem, "wait for its end, or name another file"))


@dataclass(frozen=True, slots=True)
class Bar:
    progress: Progress
    task: TaskID

    def advance(self, count: float = 1) -> None:
        self.progress.update(self.task, advance=count)

    def show(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)

    def note(self, text: str) -> None:
        self.progress.update(self.task, note=text)


def finite(value: Any) -> Any:
    """Return a copy of plain data with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def _shown_in_terminal() -> bool:
    """Return whether a person watches; mpirun's own terminal tells more than rank 0's."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return False
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts", "/dev/tty"))
    except OSError:
        return True


def check_writable(path: Path, flag: str) -> None:
    """Raise ``UserError`` unless a file can be written there, whose content stays unchanged."""
    with file_access("write", f"{flag} {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
