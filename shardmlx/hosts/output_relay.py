"""Carries mpirun's output to that of ``launch``. No MLX, no MPI.

At a broken pipe mpirun kills its ranks, which leaves them no time to save: so where stdout or
stderr is a pipe, launch stands between. It does so too where rank 0 runs on another machine, and
says through stdout how the job ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from shardmlx.common.environment import BEGUN, SAVED
from shardmlx.common.hang_up import write_all

SECONDS_OF_REST = 0.2  # without output, after mpirun's end, in which all has been read
_BYTES = 1 << 16
_KEPT_BYTES = 1 << 14  # The end of stderr, of that many bytes, has the last words.

# JobShutdown says the first, and PRRTE 3 the second, whose line it breaks somewhere.
_FAILURE = re.compile(r"^shardmlx: failed: (.+)$", re.MULTILINE)
_LOST = re.compile(
    r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)"
)


class SaidByRank0:
    """The words of ``tell_launch`` about one start of a job. They stand in ``path``, or come in
    lines of output, which ``taken_out_of`` removes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = f"{path} ".encode()
        self._line = re.compile(re.escape(self._start) + rb"(\w+)\n")
        self._heard = ""
        self._held = b""
        self.has_saved = False
        """True once output has told of a complete checkpoint."""

    def taken_out_of(self, data: bytes) -> bytes:
        """Return output without the lines for launch, as far as it can have none: a beginning of
        one is held back until more comes."""
        self._held += data
        for word in map(bytes.decode, self._line.findall(self._held)):
            if word == SAVED:
                self.has_saved = True
            else:
                self._heard = word
        self._held = self._line.sub(b"", self._held)
        known = self._held.rfind(self._start)
        if known < 0:
            known = next(
                at
                for at in range(max(0, len(self._held) - len(self._start)), len(self._held) + 1)
                if self._start.startswith(self._held[at:])
            )
        elif b"\n" in self._held[known:]:
            known = len(self._held)
        passed, self._held = self._held[:known], self._held[known:]
        return passed

    def rest(self) -> bytes:
        """Return what is still held back, once no more output comes."""
        held, self._held = self._held, b""
        return held

    @property
    def has_begun(self) -> bool:
        return bool(self._word())

    @property
    def rank_0(self) -> int | None:
        """The process id of rank 0 on its machine, until the job has come to its end."""
        pid = self._word().removeprefix(BEGUN)
        return int(pid) if pid.isdecimal() and self.status is None else None

    @property
    def status(self) -> int | None:
        """The job's exit status, once its ranks have come to an end."""
        word = self._word()
        return int(word) if word.isdecimal() else None

    def _word(self) -> str:
        with contextlib.suppress(OSError):
            return self.path.read_text(encoding="utf-8")
        return self._heard


class _Filter(Protocol):
    """A filter that output passes through on its way."""

    def taken_out_of(self, data: bytes) -> bytes:
        """Return the part of output that goes on now."""

    def rest(self) -> bytes:
        """Return what was held back."""


class LastWords:
    """The end of what a job says on stderr, in which it tells which rank was lost: the ranks
    themselves, or mpirun, which may end them before they can."""

    def __init__(self) -> None:
        self._end = b""

    def taken_out_of(self, data: bytes) -> bytes:
        """Return output, all of which is passed on, and keep the end of it."""
        self._end = (self._end + data)[-_KEPT_BYTES:]
        return data

    def rest(self) -> bytes:
        """Return nothing: no output is held back."""
        return b""

    @property
    def why(self) -> str:
        """The reason in one line, empty where nobody has told one."""
        text = self._end.decode(errors="replace")
        if failures := _FAILURE.findall(text):
            return str(failures[-1])
        if lost := _LOST.search(text):
            rank, host, number = lost.groups()
            return f"rank {rank} on {host} was ended by signal {number}"
        return ""


class _Both:
    """The words for launch in output, and the last words in the same."""

    def __init__(self, said: SaidByRank0, last: LastWords) -> None:
        self._said = said
        self._last = last

    def taken_out_of(self, data: bytes) -> bytes:
        return self._last.taken_out_of(self._said.taken_out_of(data))

    def rest(self) -> bytes:
        return self._said.rest()


class OutputRelay:
    """Pipes for a process's stdout and stderr, where they are needed, which ``with`` carries on.

    ``stdout`` and ``stderr`` are for Popen: None where the process may write itself. Once stdout
    has no reader, this process is sent SIGHUP, and the rest of the output is dropped.
    """

    def __init__(
        self, said: SaidByRank0, *, listens: bool, last_words: LastWords | None = None
    ) -> None:
        """Make the pipes; if ``listens``, words of rank 0 may come in the output. The
        ``last_words`` are kept of stderr."""
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ours: list[int] = []
        self._abandoned = False
        keeps = last_words is not None
        # One pipe for both, where both go to one, keeps the order of lines.
        together = _are_one(1, 2)
        of_stdout: _Filter = said
        if together and last_words is not None:
            of_stdout = _Both(said, last_words)
        is_piped = listens or _may_break(1) or (together and keeps)
        self.stdout = self._pipe(1, of_stdout) if is_piped else None
        if keeps or _may_break(2):
            together = together and self.stdout is not None
            self.stderr = self.stdout if together else self._pipe(2, last_words)
        else:
            self.stderr = None

    def __enter__(self) -> OutputRelay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.started()
        self._ended.set()
        for thread in self._threads:
            while thread.is_alive() and not self._abandoned:
                thread.join(SECONDS_OF_REST)

    def abandon(self) -> None:
        """Wait no longer for a reader that does not read."""
        self._abandoned = True

    def started(self) -> None:
        """Close the ends that the process has inherited."""
        for fd in self._ours:
            os.close(fd)
        self._ours.clear()

    def _pipe(self, target: int, said: _Filter | None) -> int:
        source, end = os.pipe()
        self._ours.append(end)
        thread = threading.Thread(
            target=_carry, args=(source, target, said, self._ended.is_set), daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return end


def _carry(source: int, target: int, said: _Filter | None, ended: Callable[[], bool]) -> None:
    """Carry output from one file descriptor to another, until it ends, or until the process has
    ended: one that it left behind may keep the other end open."""
    while True:
        has_ended = ended()  # before the look at its output: it may write once more, and end
        if not select.select([source], [], [], SECONDS_OF_REST)[0]:
            if has_ended:
                break
            continue
        data = os.read(source, _BYTES)
        if not data:
            break
        if said is not None:
            data = said.taken_out_of(data)
        _pass_on(target, data)
    if said is not None:
        _pass_on(target, said.rest())
    os.close(source)


def _pass_on(target: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # closed, or a full disk: mpirun itself would go on
        write_all(target, data)


def _are_one(fd: int, other: int) -> bool:
    """Return whether two outputs go to one file or terminal."""
    with contextlib.suppress(OSError):  # one of them is closed
        return os.path.sameopenfile(fd, other)
    return False


def _may_break(fd: int) -> bool:
    """Return whether an output is a pipe or a socket, whose reader may go."""
    with contextlib.suppress(OSError):
        mode = os.fstat(fd).st_mode
        return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
    return False
