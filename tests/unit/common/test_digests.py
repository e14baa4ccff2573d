"""Digests stand in checkpoints and name caches: those of the last version must be found again."""

from __future__ import annotations

from shardmlx.common.digests import bytes_digest, canonical_json, json_digest, new_digest

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
"""SHA-256 of ``abc``: FIPS 180-2, appendix B.1."""


def test_json_is_the_same_whatever_the_order_of_its_keys() -> None:
    assert canonical_json({"b": [1, {"d": None, "c": "é"}], "a": 0.5}) == (
        b'{"a": 0.5, "b": [1, {"c": "\\u00e9", "d": null}]}'
    )
    assert json_digest({"b": 1, "a": 2}) == json_digest({"a": 2, "b": 1})
    assert bytes_digest(b"abc") == ABC
    assert json_digest({}) == bytes_digest(b"{}")


def test_the_digest_of_tensors_is_blake2b_of_16_bytes() -> None:
    digest = new_digest()
    digest.update(b"abc")
    assert digest.hexdigest() == "cf4ab791c62b8d2b2109c90275287816"
