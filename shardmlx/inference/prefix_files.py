"""The prefix cache on the disk: a server that starts anew finds the sequences of the one before.

Each rank writes a file a layer of every kept sequence, in mlx-lm's own format, so that another
stage map finds them too. A file's name ends with the digest of its content: files that were
half written, or damaged, are found by it. Rank 0 also writes which tokens the sequences have.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from shardmlx.common.digests import bytes_digest, json_digest, new_digest
from shardmlx.common.durable_files import PARTIAL, why_not_written
from shardmlx.errors import UserError, one_line, refusing
from shardmlx.inference.kv_caches import KeptCaches, can_be_cut
from shardmlx.inference.prefix_cache import KeptPrefix
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.kv_cache import parts_of

INDEX = "prefixes.json"

UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
"""Types of so many bytes, as which bits are summed."""

RULE = 2
"""Number of the rules by which keys and values are computed: files of others are not theirs."""

SUFFIX = ".safetensors"


@dataclass
class PrefixFiles:
    """The files of a rank, in a directory for one model. ``layers`` names each of its caches."""

    directory: Path
    layers: tuple[str, ...]
    is_broken: bool = False

    @classmethod
    def opened(cls, directory: Path, layers: tuple[str, ...]) -> PrefixFiles:
        """Return the files in a directory, which is made. Raises ``UserError``."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for partial in directory.glob(f"{PARTIAL}*"):
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"--prefix-cache-dir {directory}: {why_not_written(error, directory, 0)}"
            ) from None
        return cls(directory, layers)

    def faults(self, keys: Iterable[str]) -> dict[str, str]:
        """Return why sequences cannot be read, by their keys."""
        found = {}
        for key in keys:
            try:
                self.read(key)
            except UserError as error:
                found[key] = error.problem
        return found

    def mirror(self, kept: Mapping[str, KeptCaches]) -> None:
        """Have files of the ``kept`` sequences, by their keys, and of no others."""
        with self._written():
            for path, key in self._files().items():
                if key not in kept:
                    path.unlink(missing_ok=True)
            there = {(key, _layer_of(path)) for path, key in self._files().items()}
            for key, caches in kept.items():
                if any((key, layer) not in there for layer in self.layers):
                    self._write(key, caches)

    def write_index(self, kept: Sequence[KeptPrefix]) -> None:
        """Write which tokens the sequences have, the least recently used first."""
        with self._written():
            lines = [{"tokens": each.tokens.tolist(), "borders": each.borders} for each in kept]
            partial = self.directory / f"{PARTIAL}{INDEX}"
            partial.write_text(json.dumps(lines), encoding="utf-8")
            os.replace(partial, self.directory / INDEX)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Write on while the disk takes what is written; say once that it does not."""
        try:
            yield
        except OSError as error:
            if not self.is_broken:
                reason = why_not_written(error, self.directory, 0)
                print(f"shardmlx: --prefix-cache-dir {self.directory}: {reason}", file=sys.stderr)
            self.is_broken = True

    def read_index(self) -> list[KeptPrefix]:
        """Return the sequences that a server kept; none if there is no index that can be read."""
        try:
            found = json.loads((self.directory / INDEX).read_bytes())
            return [KeptPrefix.of(each["tokens"], each["borders"]) for each in found]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def read(self, key: str) -> KeptCaches:
        """Return the caches of a sequence, which MLX reads when they are evaluated. Raises
        ``UserError`` for a layer that is missing or damaged."""
        paths = {_layer_of(path): path for path, at in self._files().items() if at == key}
        read = [self._read_layer(paths.get(layer), layer) for layer in self.layers]
        borders = [int(each) for each in read[0][1].get("borders", "").split()]
        copies: dict[int, list[list[Any]]] = {each: [] for each in borders}
        for (cache, *uncut), _ in read:
            left = iter(uncut)
            for border in borders:
                parts = parts_of(cache)
                copies[border].append([None if can_be_cut(part) else next(left) for part in parts])
        return KeptCaches([cache for (cache, *_), _ in read], copies)

    def _read_layer(self, path: Path | None, layer: str) -> tuple[list[Any], dict[str, str]]:
        if path is None:
            raise UserError(f"layer {layer} is missing")
        with refusing(path.name):
            is_whole = path.stem.rpartition("-")[2] == _digest_of(path)
            caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        if not is_whole:
            raise UserError(f"{path.name} is damaged")
        return caches, metadata

    def _write(self, key: str, kept: KeptCaches) -> None:
        borders = " ".join(map(str, kept.borders))
        for i, layer in enumerate(self.layers):
            uncut = [part for copies in kept.borders.values() for part in copies[i] if part]
            partial = self.directory / f"{PARTIAL}{key}-{layer}{SUFFIX}"
            try:
                save_prompt_cache(str(partial), [kept.caches[i], *uncut], {"borders": borders})
            except RuntimeError as error:  # MLX says so that a file cannot be written
                raise OSError(one_line(error)) from None
            os.replace(partial, self.directory / f"{key}-{layer}-{_digest_of(partial)}{SUFFIX}")

    def _files(self) -> dict[Path, str]:
        """Return all complete files, of other ranks on this disk too, and the keys of each."""
        files = self.directory.glob(f"[!{PARTIAL[0]}]*{SUFFIX}")
        return {path: path.name.split("-")[0] for path in files}


def place_of(directory: str, content: Iterable[Mapping[str, str]], settings: Sequence[Any]) -> Path:
    """Return the place in ``directory`` for a model of this ``content``, as ``content_of`` says of
    each rank's. ``settings`` say what beside weights decides on keys and values."""
    everything = {name: digest for mine in content for name, digest in mine.items()}
    model = json_digest([everything, *settings, version("mlx-lm"), RULE])[:16]
    return Path(directory).expanduser() / model


def content_of(part: Slice) -> dict[str, str]:
    """Return a digest of each parameter's shape, type and content, and the scales of adapters."""
    content = {}
    for name, array in part.parameters().items():
        bits = array.reshape(-1) if array.ndim < 2 else array
        bits = bits.view(UNSIGNED[array.dtype.size])
        # A sum for each row takes less time than to read the weights did.
        sums = bits.sum(axis=-1) if array.ndim > 1 else bits
        about = f"{array.shape} {array.dtype}".encode()
        content[name] = bytes_digest(about + np.array(sums).tobytes())
    named = {"embedding": part.embedding, **{f"{i}": each for i, each in part.layers.items()}}
    for place, layer in named.items():
        for name, module in layer.named_modules():
            scale = getattr(module, "scale", None)
            if isinstance(scale, (int, float)):
                content[f"{place}.{name}.scale"] = repr(float(scale))
    return content


def _layer_of(path: Path) -> str:
    return path.name.split("-")[1]


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, new_digest).hexdigest()
