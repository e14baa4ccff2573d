"""A directory whose disk fails at a call that the test names: the process dies there, the power is
cut, or nothing more fits.

The real code writes to a real directory. What it asks of the operating system is watched: files
opened to be written, flushes, and changes of names. Nothing of the product is patched.

- When a process dies, all that it had given to the operating system is on the disk; of the file
  that it was writing last, some part.
- When the power is cut, each file that was not flushed since it was opened has some part of its
  bytes. The changes of names in a directory are there up to some point, which is not before its
  last flush. A flush of a directory keeps the way to it, too.
- A full disk refuses whatever needs room, and takes the last bytes of a file only as it is flushed.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest


class Crash(BaseException):
    """The process is no more."""


_NEEDS_ROOM = ("open", "fsync", "mkdir", "rename", "replace")
_NEXT_TO = ".undo-"
_WRITES = frozenset("wax+")


@dataclass
class Faults:
    """What is to fail of the calls that change the disk, counted from 0: the process dies at
    ``death``, with the power if ``cuts_power``; nothing fits from ``full`` on, up to ``emptied``.
    """

    death: int | None = None
    cuts_power: bool = False
    full: int | None = None
    emptied: int | None = None


@dataclass
class _Change:
    """A change of a name that was made: ``before`` became ``after``, either of which may be none;
    ``kept`` is the file that had the name ``after``, or that went."""

    before: str | None
    after: str | None
    is_directory: bool
    kept: str | None = None

    @property
    def directory(self) -> str:
        """The directory whose names changed."""
        return os.path.dirname(self.after or self.before or "")

    def move(self, old: str, new: str) -> None:
        """Take note that a directory has another name."""
        self.before = self.before and _moved(self.before, old, new)
        self.after = self.after and _moved(self.after, old, new)

    def undo(self) -> None:
        """Make the names what they were."""
        if self.before is not None and not os.path.isdir(os.path.dirname(self.before)):
            return  # its directory is not there either
        if self.before is None:
            _remove(self.after or "")
        elif self.after is not None:
            os.rename(self.after, self.before)
            if self.kept is not None:
                os.rename(self.kept, self.after)
        elif self.is_directory:
            os.mkdir(self.before)
        elif self.kept is not None:
            os.rename(self.kept, self.before)


@dataclass
class FailingDisk:
    """The disk of a directory, ``root``, all below which is watched by ``failing``."""

    root: Path
    random: Random
    calls: list[str] = field(default_factory=list)
    """The calls that changed the disk, in order, since ``failing`` began: name and file."""
    has_crashed: bool = False
    _dirty: dict[str, None] = field(default_factory=dict)
    _changes: list[_Change] = field(default_factory=list)
    _stash: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root = self.root.resolve()
        self._root = str(self.root)
        self._inside = self._root + os.sep
        self._stash = Path(f"{self._root}{_NEXT_TO}{secrets.token_hex(4)}")
        self._numbers = itertools.count()
        self._files: dict[int, str] = {}
        self._faults = Faults()

    def life(self, faults: Faults) -> contextlib.AbstractContextManager[list[str]]:
        """Let calls in the block fail, as ``failing`` does. Where none is to fail, nobody looks,
        and there are no ``calls``: that takes half the time."""
        if faults != Faults():
            return self.failing(faults)
        self.calls.clear()
        self.has_crashed = False
        return contextlib.nullcontext(self.calls)

    @contextlib.contextmanager
    def failing(self, faults: Faults | None = None) -> Iterator[list[str]]:
        """Let calls in the block fail: each that comes after a death raises ``Crash``, too. Yields
        ``calls``."""
        self._faults = faults or Faults()
        self.calls.clear()
        self.has_crashed = False
        if self._faults.cuts_power:
            self._stash.mkdir()
        try:
            with pytest.MonkeyPatch.context() as patch:
                self._watch(patch)
                yield self.calls
        finally:
            if self.has_crashed and self._faults.cuts_power:
                self._cut_power()
            self._forget()

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("rename", "replace", "unlink", "remove", "rmdir", "mkdir"):
            patch.setattr(os, name, self._changing(name, getattr(os, name)))
        patch.setattr(os, "open", self._opening(os.open))
        patch.setattr(os, "fsync", self._flushing(os.fsync))
        opened = self._opening_file(io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(threading, "excepthook", _quiet_at_crashes(threading.excepthook))

    def _place(self, path: Any, directory: int | None = None) -> str | None:
        """Return the whole path of what a call names, if it is on this disk."""
        if isinstance(path, int):
            return self._files.get(path)
        text: str = os.fspath(path)
        if directory is not None:
            text = os.path.join(self._files.get(directory, "/"), text)
        if not text.startswith(os.sep) or ".." in text:
            text = os.path.abspath(text)
        inside = text.startswith(self._inside) or text == self._root
        return text if inside else None

    def _come(self, name: str, place: str) -> None:
        """Count a call, and fail as planned."""
        faults = self._faults
        if self.has_crashed:
            raise Crash
        at = len(self.calls)
        if at == faults.death:
            self.has_crashed = True
            if self._dirty and not faults.cuts_power:
                self._cut_short([*self._dirty][-1])
            raise Crash
        self.calls.append(f"{name} {place.rpartition(os.sep)[2]}")
        if faults.full is None or at < faults.full:
            return
        was_emptied = faults.emptied is not None and at >= faults.emptied
        if not was_emptied and name in _NEEDS_ROOM and not os.path.isdir(place):
            if name == "fsync":
                self._cut_short(place)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)

    def _changing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **options: Any) -> Any:
            place = self._place(path, options.get("dir_fd"))
            if place is None:
                return real(path, *rest, **options)
            self._come(name, place)
            change = self._change(name, place, rest)
            result = real(path, *rest, **options)
            if change.before is not None and change.after is not None:
                self._move(change.before, change.after)
            self._remember(change)
            return result

        return call

    def _remember(self, change: _Change) -> None:
        """Keep a change of names, which a cut of the power would take back."""
        if self._faults.cuts_power:
            self._changes.append(change)

    def _change(self, name: str, place: str, rest: tuple[Any, ...]) -> _Change:
        """Return a change of names that is about to be made."""
        if name in ("rename", "replace"):
            target = os.path.abspath(os.fspath(rest[0]))
            return _Change(place, target, os.path.isdir(place), self._kept(target))
        if name == "mkdir":
            return _Change(None, place, True)
        if name == "rmdir":
            return _Change(place, None, True)
        self._dirty.pop(place, None)
        return _Change(place, None, False, self._kept(place))

    def _move(self, old: str, new: str) -> None:
        self._dirty.pop(new, None)
        self._dirty = {_moved(each, old, new): None for each in self._dirty}
        if os.path.isdir(new):
            for change in self._changes:
                change.move(old, new)

    def _kept(self, place: str) -> str | None:
        """Keep a file whose name goes, in case that is undone."""
        if not self._faults.cuts_power or not os.path.isfile(place):
            return None
        kept = f"{self._stash}{os.sep}{next(self._numbers)}"
        os.link(place, kept)
        return kept

    def _opening(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            place = self._place(path, options.get("dir_fd"))
            if place is None:
                descriptor = real(path, flags, *rest, **options)
                self._files.pop(descriptor, None)
                return descriptor
            if flags & os.O_CREAT and not os.path.exists(place):
                self._create(place)
            descriptor = real(path, flags, *rest, **options)
            self._files[descriptor] = place
            return descriptor

        return call

    def _opening_file(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            place = None if isinstance(file, int) else self._place(file)
            if place is None:
                opened = real(file, mode, *rest, **options)
                self._files.pop(opened.fileno(), None)
                return opened
            if not _WRITES.isdisjoint(mode):
                self._create(place)
            opened = real(file, mode, *rest, **options)
            self._files[opened.fileno()] = place
            return opened

        return call

    def _create(self, place: str) -> None:
        self._come("open", place)
        if not os.path.exists(place):
            self._remember(_Change(None, place, False))
        self._dirty.pop(place, None)
        self._dirty[place] = None

    def _flushing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: Any) -> None:
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            place = self._files.get(number)
            if place is not None:
                self._come("fsync", place)
            real(descriptor)
            if place is None:
                return
            if place in self._dirty:
                del self._dirty[place]
            elif self._changes and os.path.isdir(place):
                self._changes = [each for each in self._changes if not _is_above(each, place)]

        return call

    def _cut_short(self, place: str) -> None:
        """Keep some of a file's bytes only."""
        with contextlib.suppress(FileNotFoundError):
            os.truncate(place, int(os.path.getsize(place) * self.random.random()))

    def _cut_power(self) -> None:
        """Take back what need not be on the disk, some of it or all."""
        for place in self._dirty:
            if self.random.random() < 0.7:
                self._cut_short(place)
        kept: dict[str, int] = {}
        for directory in sorted({change.directory for change in self._changes}):
            there = [each for each in self._changes if each.directory == directory]
            kept[directory] = self.random.randint(0, len(there))
        lost = []
        for change in self._changes:
            kept[change.directory] -= 1
            if kept[change.directory] < 0:
                lost.append(change)
        for number, change in reversed([*enumerate(lost)]):
            change.undo()
            if change.is_directory and change.before and change.after:
                for each in lost[:number]:
                    each.move(change.after, change.before)

    def _forget(self) -> None:
        self._dirty.clear()
        self._changes.clear()
        self._files.clear()
        if self._faults.cuts_power:
            shutil.rmtree(self._stash)


def _moved(place: str, old: str, new: str) -> str:
    """Return the path of ``place`` once ``old``, a file or a directory, is called ``new``."""
    is_in_it = place == old or place.startswith(old + os.sep)
    return new + place[len(old) :] if is_in_it else place


def _remove(place: str) -> None:
    if os.path.isdir(place):
        shutil.rmtree(place)
    else:
        Path(place).unlink(missing_ok=True)


def _is_above(change: _Change, directory: str) -> bool:
    """Return whether a change is kept by a flush of a directory."""
    return directory == change.directory or directory.startswith(change.directory + os.sep)


def _quiet_at_crashes(real: Callable[[Any], object]) -> Callable[[Any], None]:
    """Return a hook for errors of threads, of which a ``Crash`` is none."""

    def hook(ended: Any) -> None:
        if ended.exc_type is not Crash:
            real(ended)

    return hook
