"""Compare the code of all ranks: with different code they would misunderstand each other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

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
    digest = hashlib.sha256()
    for directory in sorted(_directories(package)):
        for path in sorted(directory.glob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _directories(directory: Path) -> Iterator[Path]:
    """Yield a directory and those below it, through links: models and partitioners are linked."""
    yield directory
    for path in directory.iterdir():
        if path.is_dir():
            yield from _directories(path)


def compare_versions(transport: Transport) -> None:
    """Raise ``AgreedError`` unless all ranks run the same versions. All ranks must call it, first
    of all."""
    everyone = transport.all_gather((package_versions(), source_digest()), "comparing versions")
    wanted, source = everyone[0]
    for rank, (versions, other_source) in enumerate(everyone):
        who = f"{transport.name(rank)}, unlike {transport.name(0)},"
        for package, number in wanted.items():
            if versions.get(package) != number:
                raise AgreedError(
                    f"{who} has {package} {versions.get(package)} instead of {number}: install "
                    "the same version on all machines"
                )
        if other_source != source:
            raise AgreedError(
                f"{who} has other files of shardmlx {wanted['shardmlx']}: install the same on all "
                "machines"
            )
