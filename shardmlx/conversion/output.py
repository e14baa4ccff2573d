"""The directory of an unfinished model: a killed export can go on at any point.

::

    DIR/
        unfinished-export/
            export.json                  what is exported, and how: another export is refused
            source/                      of a model on the hub the tensor that is being read
            weights/model-00001-of-...   its size from the beginning, holes where nothing is yet
            weights/complete-tensors.jsonl   which tensors are there, with their digests
            config.json, ...             all else, once the tensors are complete
            .lock                        locked while an export writes
            finished                     written last: what is left to do is to move files up
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from shardmlx.common.digests import bytes_digest
from shardmlx.common.durable_files import (
    DirectoryLock,
    check_room,
    flush_directory,
    why_not_written,
    write_durably,
)
from shardmlx.config.export import ExportOptions
from shardmlx.errors import UserError, file_access
from shardmlx.loading.manifest import ModelManifest
from shardmlx.modelfiles.sources import CONFIG_FILE, SUFFIX

WORK = "unfinished-export"

SMALL_FILES = 64 << 20
"""Bytes kept free on the disk for configuration and tokenizer."""

_IDENTITY = "export.json"
_FINISHED = "finished"


class OutputDirectory:
    """The directory ``path`` for a finished model. Methods raise ``UserError``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / WORK
        self.source = self.work / "source"
        self.weights = self.work / "weights"
        self._lock: DirectoryLock | None = None

    def check(self) -> None:
        """Refuse a directory that has something in it, other than an unfinished export."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"-o {self.path} is a file", "name a new directory")
        if not self.work.is_dir() and self._visible():
            what = "holds a model" if (self.path / CONFIG_FILE).exists() else "is not empty"
            raise UserError(f"-o {self.path} {what}", "name a new directory")

    def check_same(self, identity: Mapping[str, str]) -> bool:
        """Return whether this very export was begun here; refuse any other."""
        try:
            begun = json.loads((self.work / _IDENTITY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False  # killed before it had begun
        if begun != identity:
            differing = [key for key in identity if begun.get(key) != identity[key]]
            raise UserError(
                f"-o {self.path} has an unfinished export with another {' and '.join(differing)}",
                f"go on with the same command, or remove {self.work}",
            )
        return True

    def check_room(self, shards: ModelManifest, more: int) -> None:
        """Refuse to begin the files, and ``more`` bytes, if the disk is too small."""
        paths = [self.weights / file for file in shards.headers]
        begun = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
        needed = more + sum(each.file_size for each in shards.headers.values()) - begun
        check_room(self.path, needed, "-o")

    def begin(self, identity: Mapping[str, str]) -> None:
        """Make the directory, keep other exports out of it, and record its purpose."""
        with file_access("write -o", self.path, "name another directory"):
            self.work.mkdir(parents=True, exist_ok=True)
            self._keep_others_out()
            write_durably(self.work / _IDENTITY, json.dumps(identity, indent=1).encode())
            flush_directory(self.work)

    @property
    def is_complete(self) -> bool:
        """True once all is written, even if files are still to be moved up."""
        if (self.work / _FINISHED).exists():
            return True
        is_left = self.work.is_dir() and not any(self.work.iterdir())
        return is_left and any(name != WORK for name in self._visible())

    def complete(self, texts: Mapping[str, bytes]) -> None:
        """Write all files but tensors. From now on the export is complete, whatever happens."""
        try:
            for name, text in texts.items():
                write_durably(self.work / name, text)
            flush_directory(self.work)
            write_durably(self.work / _FINISHED, json.dumps(sorted(texts)).encode())
            flush_directory(self.work)
        except OSError as error:
            raise self.not_written(error, sum(map(len, texts.values()))) from None

    def not_written(self, error: OSError, nbytes: int) -> UserError:
        """Return the error for a file of so many bytes that could not be written."""
        return UserError(
            f"-o {self.path}: {why_not_written(error, self.path, nbytes)}, and give the same "
            "command again: it goes on where it was"
        )

    def publish(self) -> None:
        """Move files up, config.json last, which makes the directory a model; remove the rest."""
        marker = self.work / _FINISHED
        if marker.exists():
            self._keep_others_out()
            texts = {self.work / name for name in json.loads(marker.read_text())}
            config = self.work / CONFIG_FILE
            shards = sorted(self.weights.glob("*.*"))
            self._move(path for path in shards if path.suffix == SUFFIX)
            self._move(sorted(texts - {config}))
            self._move([config])
            for path in self.work.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path != marker:
                    path.unlink()
            marker.unlink()
        self.work.rmdir()
        flush_directory(self.path)

    def release(self) -> None:
        """Let other exports have the directory."""
        if self._lock is not None:
            self._lock.release()

    def _keep_others_out(self) -> None:
        if self._lock is None:
            refusal = UserError(f"-o {self.path}: another export writes there", "wait for its end")
            self._lock = DirectoryLock(self.work, refusal)

    def _move(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path.exists():  # otherwise it was moved before this run
                os.replace(path, self.path / path.name)
        flush_directory(self.path)

    def _visible(self) -> Collection[str]:
        if not self.path.is_dir():
            return ()
        with file_access("read -o", self.path, "name another directory"):
            return [name for name in os.listdir(self.path) if not name.startswith(".")]


def identity_of(
    options: ExportOptions, model: str, adapters: str, shards: ModelManifest
) -> dict[str, str]:
    """Return an export's identity, equal for equal bytes: ``model``, ``adapters`` name contents."""
    heads = b"".join(each.head for each in shards.headers.values())
    return {
        "model": options.model,
        "content of the model": model,
        "adapters": adapters,
        "quantize": str(options.quantize),
        "dequantize": str(options.dequantize),
        "dtype": str(options.dtype),
        "layout": bytes_digest(heads),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }
