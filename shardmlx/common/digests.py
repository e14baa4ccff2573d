"""Digests that name content. Files on disk bear them, so they must never change.

SHA-256 names models, runs, plans and caches; BLAKE2b, which is faster, finds damage in tensors.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

DIGEST_BYTES = 16
"""Length of a digest of tensors."""


def new_digest() -> hashlib.blake2b:
    """Return an empty digest of the bytes of tensors."""
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def json_digest(value: Any) -> str:
    """Return the SHA-256 of a JSON-able value, independent of the order of keys."""
    return bytes_digest(canonical_json(value))


def bytes_digest(content: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Return a JSON-able value as text with sorted keys."""
    return json.dumps(value, sort_keys=True).encode()
