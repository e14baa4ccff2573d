"""Tokenised data sets, kept on disk for the next run. No MLX, no MPI.

A file holds one set. Its name is a digest of all that decided its tokens, so that it is never out
of date: other rows, another tokenizer, chat template or version make another file. It appears under
that name when it is whole, and holds a digest of what is in it: one that was damaged since, or that
something else wrote, is made anew.

What no run has used for ``MAX_AGE`` is removed; of the rest, while all together have more than
``MAX_BYTES``, what was not used for longest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from shardmlx.common.digests import json_digest, new_digest, text_digest
from shardmlx.common.durable_files import replace_durably
from shardmlx.common.environment import cache_directory
from shardmlx.config.specs import DataOptions
from shardmlx.engine.batches import Samples
from shardmlx.modelfiles.sources import RECORD

MAX_BYTES = 4 << 30
"""Bytes of all files together at most: a thousand million tokens."""

MAX_AGE = 30 * 24 * 3600.0
"""Seconds."""

FORMAT = 1
"""The version of the files, and of the way from rows to tokens."""

_OPTIONS = (
    "mask_prompt",
    "prompt_feature",
    "completion_feature",
    "chat_feature",
    "text_feature",
)
_PACKAGES = (
    *("mlx-lm", "transformers", "tokenizers", "jinja2"),
    *("sentencepiece", "tiktoken", "mistral-common"),
)
_WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".npz", ".h5", ".msgpack", ".onnx"}
_DATED = b"strftime_now"
"""The function with which a chat template asks for the date."""

_NAME = re.compile(r"tokens-[0-9a-f]{64}\.safetensors")
_PARTIAL = "partial-tokens-"
_PARTIAL_AGE = 24 * 3600.0
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Tokenised:
    """A set's rows as tokens: a sample each, and the ``order`` in which they become batches."""

    samples: Samples
    order: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays by name."""
        return {
            "tokens": self.samples.tokens,
            "bounds": self.samples.bounds,
            "order": self.order,
        }


class DataCache:
    """The sets in one directory that were tokenised by one ``recipe``.

    What goes wrong on the disk ends no run: ``warn`` is told, once.
    """

    def __init__(self, directory: Path, recipe: str, warn: Callable[[str], None]) -> None:
        self._directory = directory
        self._recipe = recipe
        self._warn = warn
        self._usable = True

    def find(self, rows: str) -> Tokenised | None:
        """Return the set whose rows have that digest; None unless it is there, and sound."""
        path = self._path(rows)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # so that it is not the next to go
        return _unpack(content, path.name)

    def keep(self, rows: str, tokenised: Tokenised) -> None:
        """Write a set for the next run, unless it alone has more than ``MAX_BYTES``."""
        path = self._path(rows)
        if not self._usable:
            return
        content = _pack(tokenised, path.name)
        if len(content) > MAX_BYTES:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(path, content)
            _tidy(self._directory)
        except OSError as error:
            self._usable = False
            self._warn(
                f"--data-cache: {self._directory} does not keep the tokens for the next run: "
                f"{error.strerror or error}: name another directory, or none"
            )

    def _path(self, rows: str) -> Path:
        key = text_digest(f"{self._recipe} {rows}")
        return self._directory / f"tokens-{key}.safetensors"

    def _write(self, path: Path, content: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=_PARTIAL, dir=self._directory)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
            replace_durably(Path(name), path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def open_cache(
    options: DataOptions, model_path: Path, warn: Callable[[str], None]
) -> DataCache | None:
    """Open the cache that ``--data-cache`` names.

    Returns None where it names none, or where nobody can know what decides the tokens.
    """
    if options.data_cache == "none":
        return None
    recipe = recipe_of(options, model_path)
    if recipe is None:
        return None
    try:
        return DataCache(_directory(options.data_cache), recipe, warn)
    except RuntimeError as error:  # there is no such home
        warn(f"--data-cache {options.data_cache}: {error}: name a directory, or none")
        return None


def _directory(option: str) -> Path:
    if option != "auto":
        return Path(option).expanduser().absolute()
    return cache_directory("data")


def recipe_of(options: DataOptions, model_path: Path) -> str | None:
    """Return a digest of all that decides, for given rows, their tokens.

    Returns None where that cannot be known: code that comes with the tokenizer may do anything,
    and a chat template may ask for the date.
    """
    if options.trust_remote_code:
        return None
    files: dict[str, str] = {}
    try:
        for path in _tokenizer_files(model_path):
            digest = _digest(path)
            if digest is None:
                return None
            files[str(path.relative_to(model_path))] = digest
        code = [_digest(path) for path in _code()]
    except OSError:
        return None  # whoever reads the tokenizer will say so
    recipe = {
        "format": FORMAT,
        "files": files,
        "code": code,
        "options": {name: getattr(options, name) for name in _OPTIONS},
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
    }
    return json_digest(recipe)


def _tokenizer_files(model_path: Path) -> Iterator[Path]:
    """Yield all files that a tokenizer might be made of: those that are no weights."""
    for path in [*model_path.iterdir(), *model_path.glob("*/*.jinja")]:
        is_other = path.suffix in _WEIGHTS or path.name.startswith(".") or path.name == RECORD
        if not is_other and path.is_file():
            yield path


def _digest(path: Path) -> str | None:
    """Return the digest of a file; None if it asks for the date."""
    digest, tail = hashlib.sha256(), b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            tail = tail[-len(_DATED) :] + chunk
            if _DATED in tail:
                return None
    return digest.hexdigest()


def _code() -> Iterator[Path]:
    """Yield the files of code that makes samples of rows, or refuses them: other code may have the
    same version."""
    for name in ("datasets.py", "data_files.py", "data_rows.py"):
        yield Path(__file__).with_name(name)
    for name in ("tuner/datasets.py", "tokenizer_utils.py"):
        yield Path(str(metadata.distribution("mlx-lm").locate_file(f"mlx_lm/{name}")))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pack(tokenised: Tokenised, name: str) -> bytes:
    arrays = {key: np.ascontiguousarray(array) for key, array in tokenised.arrays().items()}
    return save({**arrays, "digest": _digest_of(arrays, name)})


def _unpack(content: bytes, name: str) -> Tokenised | None:
    """Return the set that was packed under that name; None if the content is anything else."""
    try:
        arrays = load(content)
        digest = arrays.pop("digest")
        tokenised = Tokenised(Samples(arrays["tokens"], arrays["bounds"]), arrays["order"])
        is_sound = np.array_equal(digest, _digest_of(arrays, name))
    except (SafetensorError, KeyError, ValueError, TypeError):
        return None
    return tokenised if is_sound else None


def _digest_of(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    digest = new_digest()
    digest.update(name.encode())
    for key in sorted(arrays):
        digest.update(f" {key} {arrays[key].dtype.str} {arrays[key].shape} ".encode())
        digest.update(arrays[key].data)
    return np.frombuffer(digest.digest(), np.uint8)


def _tidy(directory: Path) -> None:
    """Remove our own files that are old, and those that are too much."""
    found = []
    for path in directory.iterdir():
        if _NAME.fullmatch(path.name) or path.name.startswith(_PARTIAL):
            with contextlib.suppress(OSError):  # another run has removed it
                found.append((path.stat().st_mtime, path.stat().st_size, path))
    now, total = time.time(), 0
    for used, nbytes, path in sorted(found, reverse=True):
        oldest = now - (_PARTIAL_AGE if path.name.startswith(_PARTIAL) else MAX_AGE)
        total += nbytes
        if used < oldest or total > MAX_BYTES:
            with contextlib.suppress(OSError):  # it may be another user's
                path.unlink()
