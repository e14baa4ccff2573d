"""Sums of differences of which nobody sees a single one: pairwise masks that cancel out (Bonawitz
et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, for a hub
that is honest but curious).

Each member u of a sum has a key, from which it makes a seed with each other member v, and a seed
b of its own. It sends its numbers x, whole multiples of ``GRID``, modulo 2**64::

    y_u = x_u + mask(b_u) + the sum of mask(s_uv) for v > u - the sum of mask(s_uv) for v < u

It gives each other member a share of its key and of its own seed, which only that one can read. If
u has sent y_u, the others then tell the hub their shares of b_u; if it has not, those of its key:
never both. More than half of the members are needed for either.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

GRID = 2.0**-32
"""Distance of the numbers that can be summed."""

LARGEST = 2.0**52
"""Limit of a member's number, in ``GRID``s: the sum of a thousand members has 62 bits."""

CHUNK = 1 << 18
"""Numbers that are in memory at a time."""

_PRIME = 2**521 - 1
_SHARE_BYTES = 66
_NONCE_BYTES = 12

Mask = tuple[int, bytes]
"""The sign with which a mask is added, and the seed that it is made of."""


class Member:
    """A member of one sum, with keys that it uses for no other. Bytes are in hex."""

    def __init__(self) -> None:
        self._name = ""
        self._attempt = ""
        self._sealing = X25519PrivateKey.generate()
        self._masking = X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(32)
        self._keys: Mapping[str, Sequence[str]] = {}
        self._shares: dict[str, bytes] = {}

    @property
    def public_keys(self) -> list[str]:
        """The keys by which shares are sealed, and by which seeds are made."""
        return [_public(self._sealing), _public(self._masking)]

    def seal(self, name: str, attempt: str, keys: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Take the name of this member and of the sum; return for each other member its shares,
        which it alone can read. ``keys`` are the public ones of all. Raises ``ValueError`` for
        fewer than two members."""
        if len(keys) < 2 or keys.get(name) != self.public_keys or self._keys:
            raise ValueError("a sum in which this member could be seen")
        self._name = name
        self._attempt = attempt
        self._keys = keys
        places = range(1, len(keys) + 1)
        needed = threshold(len(keys))
        of_key = split(self._masking.private_bytes_raw(), places, needed)
        of_seed = split(self._seed, places, needed)
        sealed = {}
        for other, *pair in zip(sorted(keys), of_key, of_seed, strict=True):
            shares = b"".join(pair)
            if other == name:
                self._shares[name] = shares
                continue
            nonce = secrets.token_bytes(_NONCE_BYTES)
            said = f"{attempt} {name} {other}".encode()
            sealed[other] = (nonce + self._cipher(other).encrypt(nonce, shares, said)).hex()
        return sealed

    def masks(self, sealed: Mapping[str, str]) -> list[Mask]:
        """Return the masks to be added to the numbers, with the other members whose shares have
        come. Raises ``ValueError`` for fewer than are needed, or for others' shares."""
        if len(sealed) + 1 < threshold(len(self._keys)):
            raise ValueError("a sum of too few members")
        found = [(1, self._seed)]
        for name in sealed:
            data = bytes.fromhex(sealed[name])
            said = f"{self._attempt} {name} {self._name}".encode()
            try:
                shares = self._cipher(name).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], said)
            except (KeyError, InvalidTag):
                raise ValueError(f"shares that {name} did not send") from None
            self._shares[name] = bytes(shares)
            found.append(pair_mask(self._name, self._masking, name, self._keys[name][1]))
        return found

    def reveal(self, survivors: Sequence[str]) -> dict[str, str]:
        """Return this member's share of the seed of each one that has sent its numbers, and of the
        key of each other one: once. Raises ``ValueError`` for survivors that are too few."""
        shares = self._shares
        self._shares = {}
        survived = set(survivors)
        if len(survived) < threshold(len(self._keys)) or not survived <= shares.keys():
            raise ValueError("a sum of too few members")
        return {
            name: (both[_SHARE_BYTES:] if name in survived else both[:_SHARE_BYTES]).hex()
            for name, both in shares.items()
        }

    def _cipher(self, name: str) -> ChaCha20Poly1305:
        return ChaCha20Poly1305(_agreed(self._sealing, self._keys[name][0], b"shares"))


def threshold(members: int) -> int:
    """Return how many of the members are needed: more than half."""
    return members // 2 + 1


def pair_mask(name: str, own: X25519PrivateKey, other: str, public: str) -> Mask:
    """Return the mask that a member adds to cancel out with the ``other``'s."""
    return (1 if name < other else -1), _agreed(own, public, b"masks")


def key_of(shares: Mapping[int, bytes], public: str) -> X25519PrivateKey:
    """Return a member's key of its shares. Raises ``ValueError`` unless ``public`` is its."""
    key = X25519PrivateKey.from_private_bytes(joined(shares))
    if _public(key) != public:
        raise ValueError("shares of another key")
    return key


def split(secret: bytes, places: Sequence[int], needed: int) -> list[bytes]:
    """Return shares of a secret of 32 bytes, of which so many are needed to get it (Shamir, "How to
    share a secret", 1979)."""
    factors = [int.from_bytes(secret), *(secrets.randbelow(_PRIME) for _ in range(needed - 1))]
    values = (sum(each * place**i for i, each in enumerate(factors)) % _PRIME for place in places)
    return [value.to_bytes(_SHARE_BYTES) for value in values]


def joined(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of shares by their places. Raises ``ValueError`` for others' shares."""
    secret = 0
    for place, share in shares.items():
        others = [each for each in shares if each != place]
        above = math.prod(-each for each in others)
        below = math.prod(place - each for each in others)
        secret += int.from_bytes(share) * above * pow(below, -1, _PRIME)
    if (secret := secret % _PRIME) >= 2**256:
        raise ValueError("shares of no secret")
    return secret.to_bytes(32)


def write_masked(plain: IO[bytes], into: IO[bytes], weight: int, masks: Sequence[Mask]) -> None:
    """Write the numbers of ``on_grid``, masked, into another file."""
    streams = [_stream(*each) for each in masks]
    for numbers in on_grid(plain, weight):
        for stream in streams:
            numbers += next(stream)[: len(numbers)]
        into.write(numbers.tobytes())


def on_grid(plain: IO[bytes], weight: int) -> Iterator[np.ndarray]:
    """Yield ``weight`` times the float32 numbers of a file as multiples of ``GRID``, modulo 2**64,
    a chunk at a time. Raises ``ValueError`` for a number that is too large, or not finite."""
    plain.seek(0)
    while data := plain.read(4 * CHUNK):
        exact = np.frombuffer(data, "<f4").astype(np.float64) * (weight / GRID)
        if not (np.abs(exact) < LARGEST).all():
            raise ValueError("it has a number that is too large for a secure sum, or not finite")
        yield np.rint(exact).astype("<i8").view("<u8")


def read_sum(bodies: Sequence[Path], masks: Iterable[Mask], weight: int) -> Iterator[np.ndarray]:
    """Yield the sum of masked numbers in files, with masks that take theirs away, divided by
    ``weight``: float32 numbers, a chunk at a time."""
    streams = [_stream(*each) for each in masks]
    at = 0
    while at < bodies[0].stat().st_size:
        parts = [np.fromfile(body, "<u8", CHUNK, offset=at) for body in bodies]
        total = np.sum(parts, axis=0, dtype="<u8")
        for stream in streams:
            total += next(stream)[: len(total)]
        yield (total.view("<i8") * (GRID / weight)).astype("<f4")
        at += total.nbytes


def _stream(sign: int, seed: bytes) -> Iterator[np.ndarray]:
    """Yield the numbers of a mask, a chunk at a time."""
    encryptor = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    while True:
        numbers = np.frombuffer(encryptor.update(bytes(8 * CHUNK)), "<u8")
        yield numbers if sign > 0 else np.negative(numbers)


def _agreed(own: X25519PrivateKey, public: str, purpose: bytes) -> bytes:
    other: Any = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return bytes(HKDF(SHA256(), 32, salt=None, info=purpose).derive(own.exchange(other)))


def _public(key: X25519PrivateKey) -> str:
    return str(key.public_key().public_bytes_raw().hex())
