"""Saved states of models: a file each, in one directory of rank 0. Needs no MLX to be listed.

A state is one safetensors file with the tensors of a LoRA and, if wanted, of its optimizer, whole,
so that any layout loads it. It gets its name once it is on the disk: it is whole, or not there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardmlx.api.requests import LoraOptions, SavedState
from shardmlx.common.digests import bytes_digest
from shardmlx.common.durable_files import PARTIAL, DirectoryLock, flush_directory
from shardmlx.common.reporter import Reporter
from shardmlx.errors import UserError, file_access
from shardmlx.modelfiles.safetensors_header import read_header

SUFFIX = ".safetensors"

_ENTRY = "shardmlx"
"""Name of what is known of a state in the metadata of its file."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """A saved state: its ``file``, the digest of its ``base``'s config.json, the ``modules`` that
    have adapters, and the number of updates that were made."""

    saved: SavedState
    file: Path
    base: str
    modules: Sequence[str]
    steps: int

    def metadata(self) -> dict[str, str]:
        """Return what the file's header says of it."""
        entry = asdict(self.saved) | {"base": self.base, "steps": self.steps}
        return {_ENTRY: json.dumps(entry | {"modules": list(self.modules)})}

    @classmethod
    def of(cls, file: Path, metadata: Mapping[str, str]) -> StateFile:
        """Return the state of a file, whose header says ``metadata``. Raises ``ValueError``."""
        try:
            entry = json.loads(metadata[_ENTRY])
            base = str(entry.pop("base"))
            steps = int(entry.pop("steps"))
            modules = [str(each) for each in entry.pop("modules")]
            lora = LoraOptions(**entry.pop("lora"))
            return cls(SavedState(lora=lora, **entry), file, base, modules, steps)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its header is none of a state ({error})") from None


class StateStore:
    """The saved states in a directory, which is made, and kept from other servers until ``close``.
    Files that cannot be read are named in a warning. Raises ``UserError``."""

    def __init__(self, directory: Path, reporter: Reporter) -> None:
        self.directory = directory
        option = f"--state-dir {directory}"
        with file_access("make", option, "name another directory"):
            directory.mkdir(parents=True, exist_ok=True)
            refusal = UserError(f"{option}: another server saves there", "name another directory")
            self._lock = DirectoryLock(directory, refusal)
            for partial in directory.glob(f"{PARTIAL}*{SUFFIX}"):
                partial.unlink()
        self._found: dict[str, StateFile] = {}
        for file in sorted(directory.glob(f"*{SUFFIX}")):
            try:
                state = StateFile.of(file, read_header(file).metadata)
            except (UserError, ValueError) as error:
                reporter.warn(f"{file} is left out of the saved states: {error}")
                continue
            self._found[state.saved.state] = state

    def close(self) -> None:
        """Let other servers have the directory."""
        self._lock.release()

    def all(self) -> list[SavedState]:
        """Return all states, the oldest first."""
        return sorted((each.saved for each in [*self._found.values()]), key=lambda e: e.saved_at)

    def find(self, state: str) -> StateFile:
        """Return a state. Raises ``UserError`` if there is none of that name."""
        try:
            return self._found[state]
        except KeyError:
            raise UserError(
                f"no state is called {state!r}", "list the saved states to see their names"
            ) from None

    def check_new(self, state: str, *, overwrite: bool) -> None:
        """Raise ``UserError`` if there is a state of that name, unless it may be replaced."""
        if state in self._found and not overwrite:
            raise UserError(
                f"there is a state {state!r} already", "give another name, or ask to overwrite it"
            )

    def new(self, saved: SavedState, base: str, modules: Sequence[str], steps: int) -> StateFile:
        """Return a state that is to be written now."""
        # Names may differ in upper and lower case alone, which file systems of a Mac do not tell
        # apart, and be longer than these take.
        name = bytes_digest(saved.state.encode())
        now = replace(saved, saved_at=time.time())
        return StateFile(now, self.directory / f"{name}{SUFFIX}", base, modules, steps)

    def add(self, state: StateFile) -> SavedState:
        """Take in a state that was written, in the place of another of its name."""
        saved = replace(state.saved, nbytes=state.file.stat().st_size)
        self._found[saved.state] = replace(state, saved=saved)
        return saved

    def delete(self, state: str) -> None:
        """Delete a state. Raises ``UserError``."""
        file = self.find(state).file
        with file_access("delete", file):
            file.unlink(missing_ok=True)
            flush_directory(self.directory)
        del self._found[state]
