"""Commands that log in on hosts: to ask them, and to try the login alone. No MLX, no MPI."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from shardmlx.common import mlx_build

_BOOT = "import json,sys;exec(json.loads(next(filter(str.strip,sys.stdin))))"
"""Runs the program in the first line of stdin that has one: no shell on the way can mistake it, and
a login script that reads a line gets an empty one."""

_SSH_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
"""A terminal (without -T) would mix up what is sent and what is said."""

NOWHERE_ELSE: Mapping[str, str] = MappingProxyType({})
"""The Pythons of hosts, where all have theirs at one path."""

WORD_OF_TRIAL = "shardmlx-login"
"""Word that a second login is to say, after the first one has not run Python."""


@dataclass(frozen=True, slots=True)
class Login:
    """A host as ssh is told it, perhaps with a user, and the port of its ssh."""

    name: str
    port: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """Words for ssh in mpirun's order."""
        return (self.name,) if self.port is None else (self.name, "-p", str(self.port))

    @property
    def is_plain(self) -> bool:
        """True if ssh needs neither user nor port."""
        return self.port is None and "@" not in self.name

    def __str__(self) -> str:
        return self.name if self.port is None else f"-p {self.port} {self.name}"


@dataclass(frozen=True, slots=True)
class RemoteLogin:
    """Login on other hosts: the agent with its arguments, the Python, and mpirun's daemon. Ranks
    start in ``directory``; the one of rank 0 reads the ``files``. Hosts among ``pythons`` have
    their Python elsewhere; each host links its own to the ``place``, unless that is ""."""

    agent: tuple[str, ...]
    python: str
    daemon: str
    directory: str = ""
    files: tuple[str, ...] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)
    place: str = ""

    @classmethod
    def of(
        cls,
        agent: str | None,
        python: str,
        mpirun: Path,
        files: Sequence[str] = (),
        pythons: Mapping[str, str] = NOWHERE_ELSE,
        place: str = "",
    ) -> RemoteLogin:
        """Return the login by an agent, ssh if None, on hosts that have mpirun at the same path, or
        beside their own Python."""
        words = tuple(shlex.split(agent or "ssh"))
        paths = tuple(map(os.path.abspath, files))
        daemon = str(mpirun.with_name("prted"))
        return cls(words, python, daemon, os.getcwd(), paths, pythons, place)

    def to(self, host: str) -> RemoteLogin:
        """Return the login on one host, with the Python and the daemon of that host."""
        python = self.pythons.get(host, self.python)
        if python == self.python:
            return self
        daemon = self.daemon if self.place else str(Path(python).with_name("prted"))
        return replace(self, python=python, daemon=daemon)

    @property
    def is_ssh(self) -> bool:
        return Path(self.agent[0]).name == "ssh"

    def command(self, login: Login | None) -> list[str]:
        """Return the command line that starts the probe; on this machine without a ``login``."""
        libraries = ",".join(mlx_build.EXTRAS)
        words = [self.python, "-c", _BOOT, self.daemon, self.directory, libraries]
        words += [self.python, self.place, *self.files]
        if login is None:
            return words
        options = _SSH_OPTIONS if self.is_ssh else ()
        return [*self.agent, *options, *login.words, shlex.join(words)]

    def trial(self, login: Login) -> list[str]:
        """Return the command line of an ssh that says what it does, and that only says a word."""
        return [*self.agent, *_SSH_OPTIONS, "-v", *login.words, f"echo {WORD_OF_TRIAL}"]
