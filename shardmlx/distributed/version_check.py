"""Compare the code of all ranks: with different code they would misunderstand each other."""

from __future__ import annotations

import hashlib
import os
import sys
from importlib.metadata import version
from pathlib import Path

from shardmlx.compat import KNOWN_BAD, TESTED, is_untested
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.transport import Transport

PACKAGES = ("shardmlx", "mlx", "mlx-lm")


def package_versions() -> dict[str, str]:
    """Return the versions, on this rank, of the packages that decide the numbers."""
    return {package: version(package) for package in PACKAGES}


ROOT = Path(__file__).parents[1]
"""Directory of the package shardmlx."""


def source_digest(package: Path = ROOT) -> str:
    """Digest all Python files of a package, at any depth, by their names and content."""
    # Through links: models and partitioners are linked.
    walk = os.walk(package, followlinks=True)
    paths = [Path(directory, name) for directory, _, names in walk for name in names]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix == ".py"):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def compare_versions(transport: Transport) -> None:
    """Raise ``AgreedError`` unless all ranks run the same versions, none of them known to be bad.
    Rank 0 warns of versions newer than the tested ones. All ranks must call it, first of all."""
    mine = package_versions() | {"files of shardmlx": source_digest()[:8]}
    wanted, *others = transport.all_gather(mine, "comparing versions")
    for rank, versions in enumerate(others, 1):
        for what, number in wanted.items():
            if versions.get(what) != number:
                raise AgreedError(
                    f"{transport.name(rank)}, unlike {transport.name(0)}, has {what} "
                    f"{versions.get(what)} instead of {number}",
                    "install the same version on all machines",
                )
    for package, bad in KNOWN_BAD.items():
        if why := bad.get(wanted[package]):
            raise AgreedError(f"{package} {wanted[package]} {why}", "install another version")
    for package, tested in TESTED.items():
        if transport.rank == 0 and is_untested(package, wanted[package]):
            print(
                f"shardmlx: warning: {package} {wanted[package]} is newer than {tested}, the "
                "newest tested",
                file=sys.stderr,
            )
