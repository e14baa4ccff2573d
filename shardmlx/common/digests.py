"""Digests that name content. Files on disk bear them, so they must never change.

SHA-256 names models, runs, plans and caches; BLAKE2b, which is faster, finds damage in tensors;
CRC-32, which is faster still, finds half written ones.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

DIGEST_BYTES = 16


def new_digest() -> hashlib.blake2b:
    """Return an empty digest of the bytes of tensors."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


class Crc32:
    """A CRC-32 in the place of a digest: copying a model takes little more time than its own."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4)


Digest = hashlib.blake2b | Crc32


def json_digest(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value, independent of the order of keys."""
    return bytes_digest(canonical_json(value))


def bytes_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """Return a JSON-able value as text with sorted keys."""
    return json.dumps(value, sort_keys=True).encode()
