"""A rank reads from disk, and holds in memory, the tensors of its own stages and no others.

That tied matrices are needed at both ends is in ``tests/unit/loading/test_manifest.py``.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.small_models import SMALL_VOCABULARY
from testbed.tiny_models import tiny_config
from tests.helpers.models_and_batches import load_arrays, save_in_two_files
from tests.helpers.mpirun import mpirun
from tests.helpers.programs import PROGRAMS

LAYERS, RANKS = 8, 2
SLACK = 1_500_000
"""Bytes for headers, configuration, tokenizer, data, and modules imported late, as source the first
time; a layer of the model has nearly three times as many."""


@dataclass(frozen=True)
class Model:
    path: Path
    sizes: dict[str, int]

    def bytes_of(self, layers: list[tuple[int, int]]) -> int:
        return sum(size for name, size in self.sizes.items() if self._is_in(name, layers))

    def _is_in(self, name: str, layers: list[tuple[int, int]]) -> bool:
        has_first = any(start == 0 for start, _ in layers)
        has_last = any(stop == LAYERS for _, stop in layers)
        if name.startswith("model.layers."):
            number = int(name.split(".")[2])
            return any(start <= number < stop for start, stop in layers)
        if name.startswith("model.embed_tokens."):
            return has_first
        return has_last


@pytest.fixture
def model(small_tokenizer: Path, tmp_path: Path) -> Model:
    """Two files of some 20 MB: eight layers of 4 MB, and matrices of 2 MB at both ends."""
    size: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024}
    size["vocab_size"] = 5 * SMALL_VOCABULARY
    config = tiny_config(layers=LAYERS, **size)
    path = save_in_two_files(tmp_path / "model", config)
    shutil.copytree(small_tokenizer, path, dirs_exist_ok=True)
    arrays = load_arrays(*path.glob("*.safetensors"))
    return Model(path, {name: array.nbytes for name, array in arrays.items()})


def test_a_rank_reads_and_holds_only_its_stages(model: Model, pirate: Path, tmp_path: Path) -> None:
    """Of a V, cast from float32 to bfloat16."""
    arguments: list[str | Path] = ["--model", model.path, "--data", pirate]
    arguments += ["--adapter-path", tmp_path / "adapters"]
    arguments += ["--num-layers", "2", "--iters", "1", "--batch-size", "2", "--val-batches", "0"]
    arguments += ["--memory-limit", "700MB", "--schedule", "zb-v", "--dtype", "bfloat16"]
    mpirun(RANKS, PROGRAMS / "load_stages.py", tmp_path, *arguments).well()
    seen = []
    for rank in range(RANKS):
        report = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        seen += report["layers"]
        # Of the limit of the process MLX has what the rest of it leaves.
        assert 400_000_000 < report["limit"] < 640_000_000
        expected = model.bytes_of(report["layers"])
        assert expected < sum(model.sizes.values()) * 0.8
        if report["loading"]:
            assert expected <= report["loading"] <= expected + SLACK
            assert report["running"] <= expected + 2 * SLACK
        # A tensor exists twice while it is cast, and one at a time is.
        held = expected / 2
        assert held <= report["peak"] <= held + max(model.sizes.values()) + SLACK
    layers = [layer for start, stop in seen for layer in range(start, stop)]
    assert sorted(layers) == list(range(LAYERS))
