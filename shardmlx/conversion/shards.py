"""Divide a model's tensors into files, as mlx-lm does, and know the files' headers at once.

Only names, shapes and types of the tensors are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardmlx.checkpoint.export import TensorSpec, safetensors_header
from shardmlx.loading.manifest import ModelManifest


def divide(specs: Iterable[TensorSpec], most: int) -> list[list[TensorSpec]]:
    """Return the tensors of each file of at most ``most`` bytes; a larger tensor is alone."""
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a model, by name, and the rank that writes each."""

    files: Mapping[str, Sequence[TensorSpec]]
    writers: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(spec.nbytes for specs in self.files.values() for spec in specs)

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor, sorted by name."""
        places = {spec.name: file for file, specs in self.files.items() for spec in specs}
        return dict(sorted(places.items()))

    def of(self, rank: int) -> dict[str, Sequence[TensorSpec]]:
        """Return the files that a rank writes."""
        return {file: each for file, each in self.files.items() if self.writers[file] == rank}

    def manifest(self, rank: int, key: str) -> ModelManifest:
        """Return the beginning of the files that a rank writes; ``key`` names the export."""
        heads = {file: safetensors_header(specs) for file, specs in self.of(rank).items()}
        sizes = {
            file: len(heads[file]) + sum(spec.nbytes for spec in specs)
            for file, specs in self.of(rank).items()
        }
        return ModelManifest(key, {}, heads, sizes)


def plan_shards(of_ranks: Sequence[Sequence[TensorSpec]], most: int) -> Shards:
    """Divide each rank's tensors into files; one rank has the files that mlx-lm writes."""
    divided = [(rank, each) for rank, specs in enumerate(of_ranks) for each in divide(specs, most)]
    count = len(divided)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if count == 1:
        names = ["model.safetensors"]
    return Shards(
        files={name: specs for name, (_, specs) in zip(names, divided, strict=True)},
        writers={name: rank for name, (rank, _) in zip(names, divided, strict=True)},
    )
