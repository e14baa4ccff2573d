"""Keep checkpoints on one disk: which are complete, which are sound, which may go.

::

    checkpoints/
        step-0000100/
            weights-00.safetensors    what rank 0 of a replica trains, by global names
            optimizer-00.safetensors  its optimizer state: the name of the weight, and of the state
            errors-00-01.safetensors  what its replica 1 has rounded off of sums, where that is kept
            ...
            checkpoint.json           all else, and the checksums of the files above
            COMMITTED                 the checksum of checkpoint.json: written last
        partial-step-0000200/         being written, or what a run that died left behind

A directory gets its final name only when all of it is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmlx.common.digests import bytes_digest
from shardmlx.common.durable_files import PARTIAL, DirectoryLock, flush_directory, write_durably
from shardmlx.distributed.shared_disks import PROBE
from shardmlx.errors import UserError, refusing

MANIFEST = "checkpoint.json"
MARKER = "COMMITTED"

FORMAT = 1

_NAME = re.compile(r"step-(\d{7,})")


def name_of(step: int) -> str:
    """Return the name of a checkpoint's directory: ``step-0000100``."""
    return f"step-{step:07d}"


def step_of(name: str) -> int | None:
    """Return the step that a directory's name says; None for other names."""
    match = _NAME.fullmatch(name)
    if match is None or name_of(step := int(match[1])) != name:
        return None
    return step


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a checkpoint as it was when it was written."""

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w-]+\.safetensors", self.name, re.ASCII):
            raise ValueError(f"{self.name!r} is not a file of a checkpoint")
        if self.nbytes < 0 or not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise ValueError(f"{self.name}: {self.nbytes} bytes, sha256 {self.sha256!r}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint without its tensors. ``identity`` and the progress, ``state``, are needed to go
    on; layout (``plan``) and ``versions`` of packages inform."""

    step: int
    files: tuple[FileInfo, ...]
    identity: Mapping[str, Any]
    state: Mapping[str, Any]
    plan: Mapping[str, Any]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if self.step < 1 or len(set(names)) != len(names):
            raise ValueError(f"step {self.step} with the files {', '.join(names)}")

    def to_json(self) -> bytes:
        """Return the content of ``checkpoint.json``, which ``from_json`` reads."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "files": [asdict(file) for file in self.files],
            "identity": self.identity,
            "state": self.state,
            "plan": self.plan,
            "versions": self.versions,
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, text: bytes, where: str | Path) -> Manifest:
        """Read a text of ``to_json``. Raises ``UserError`` for anything else."""
        with refusing(f"{where} is not a checkpoint's manifest", "take another one"):
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            files = tuple(FileInfo(**file) for file in content["files"])
            parts = {key: content[key] for key in ("identity", "state", "plan", "versions")}
            if not files or not all(isinstance(part, dict) for part in parts.values()):
                raise TypeError("a part is missing, or no object")
            if not isinstance(content["step"], int):
                raise TypeError("no step")
            return cls(step=content["step"], files=files, **parts)


@dataclass(frozen=True, slots=True)
class Store:
    """The checkpoints in one directory. Methods raise ``OSError`` if the disk fails."""

    directory: Path

    def path(self, step: int) -> Path:
        """Return the directory of a complete checkpoint."""
        return self.directory / name_of(step)

    def partial(self, step: int) -> Path:
        """Return the directory of a checkpoint that is being written, or deleted."""
        return self.directory / (PARTIAL + name_of(step))

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first; they may be damaged."""
        if not self.directory.is_dir():
            return []
        found = {step_of(path.name) for path in self.directory.iterdir()}
        return sorted(s for s in found if s is not None and (self.path(s) / MARKER).exists())

    def lock(self) -> DirectoryLock:
        """Keep other runs out until the lock is released. Raises ``UserError`` if one writes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        problem = f"--checkpoint-dir {self.directory}: another run writes there"
        refusal = UserError(problem, "wait for its end, or name another directory")
        return DirectoryLock(self.directory, refusal)

    def begin(self, step: int) -> Path:
        """Make an empty directory for a new checkpoint; remove an unfinished one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob(f"{PARTIAL}step-*"):
            shutil.rmtree(path)
        for path in self.directory.glob(f"{PROBE}*"):
            path.unlink(missing_ok=True)  # another rank may be about to remove its own
        partial = self.partial(step)
        partial.mkdir()
        return partial

    def commit(self, manifest: Manifest) -> None:
        """Make the begun checkpoint complete, once all its files are on the disk."""
        text = manifest.to_json()
        partial = self.partial(manifest.step)
        final = self.path(manifest.step)
        write_durably(partial / MANIFEST, text)
        write_durably(partial / MARKER, _marker(text))
        flush_directory(partial)
        if final.exists():  # a user put it there: a run sets newer ones aside before it begins
            self.set_aside(manifest.step, "superseded")
        os.rename(partial, final)
        flush_directory(self.directory)

    def set_aside(self, step: int, why: str) -> Path:
        """Rename a complete checkpoint, so that it is none any more; delete nothing."""
        target = self.directory / f"{why}-{name_of(step)}"
        number = 1
        while target.exists():
            number += 1
            target = self.directory / f"{why}-{number}-{name_of(step)}"
        os.rename(self.path(step), target)
        flush_directory(self.directory)
        return target

    def prune(self, keep: int) -> list[int]:
        """Delete all complete checkpoints but the ``keep`` newest; return the steps that went."""
        old = self.steps()[: -max(1, keep)]
        for step in old:
            # Rename first: a half deleted directory is then no checkpoint.
            os.rename(self.path(step), self.partial(step))
            flush_directory(self.directory)
            shutil.rmtree(self.partial(step))
        return old

    def manifest(self, step: int) -> Manifest:
        """Read a complete checkpoint's manifest. Raises ``UserError``, which names the file."""
        path = self.path(step) / MANIFEST
        try:
            text = path.read_bytes()
            marker = (self.path(step) / MARKER).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from None
        if marker != _marker(text):
            raise UserError(
                f"{path}: its sha256 is {bytes_digest(text)[:16]}..., not the one in {MARKER}"
            )
        manifest = Manifest.from_json(text, path)
        if manifest.step != step:
            raise UserError(f"{path} is of step {manifest.step}: the directory was renamed")
        return manifest

    def fault(self, step: int, file: FileInfo) -> str | None:
        """Return the fault of a file; None if its bytes are as written."""
        path = self.path(step) / file.name
        try:
            size = path.stat().st_size
            if size != file.nbytes:
                return f"{path} has {size} bytes, not {file.nbytes}"
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except FileNotFoundError:
            return f"{path} is missing"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
        if digest != file.sha256:
            return f"{path}: its sha256 is {digest[:16]}..., not {file.sha256[:16]}..."
        return None


def _marker(manifest: bytes) -> bytes:
    return f"{bytes_digest(manifest)}  {MANIFEST}\n".encode()
