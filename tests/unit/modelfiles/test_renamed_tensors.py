"""Tensors that mlx-lm gives other names as it loads: as newer files of Hugging Face have them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from shardmlx.loading.manifest import is_needed
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import inspect_files
from shardmlx.modelfiles.verify import verify
from shardmlx.models.runtime.slice import Slice
from shardmlx.planning.facts.workload import model_sizes
from testbed.family_configs import CONFIGS, LAYERS
from testbed.tiny_models import build

CONFIG = CONFIGS["mistral3"]
LAYOUTS = {
    "with the text model outside": ("language_model.model.", "language_model.lm_head.", ""),
    "with the text model inside": ("model.language_model.", "lm_head.", "model."),
}


def write(directory: Path, layout: str) -> Path:
    body, head, outer = LAYOUTS[layout]
    tensors = {f"{outer}vision_tower.transformer.layers.0.weight": mx.zeros((8, 8))}
    for name, array in tree_flatten(build(CONFIG).parameters()):
        name = name.replace("language_model.model.", body).replace("language_model.lm_head.", head)
        tensors[name] = array
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_are_those_of_the_family(layout: str, tmp_path: Path) -> None:
    files = open_model(str(write(tmp_path, layout)))
    checked, faults = verify(files)
    assert faults == []
    assert "tensors against the family mistral3: names, shapes, packing" in checked
    inspection = inspect_files(files)
    assert inspection.other.tensors == ()
    assert [len(layer.tensors) for layer in inspection.layers] == [9] * LAYERS
    assert len(inspection.dropped.tensors) == 1
    assert model_sizes(files, None).dtype == "float32"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_reads_what_it_is_sent(layout: str, tmp_path: Path) -> None:
    directory = write(tmp_path, layout)
    files = open_model(str(directory))
    shape = inspect_files(files).shape
    assert shape is not None
    needed = {name for name in files.tensors if is_needed(name, shape, 2, LAYERS)}
    assert not any("vision_tower" in name for name in needed)
    model, _ = load_model(directory, lazy=True)
    part = Slice(model, 2, LAYERS)
    assert sum(files.tensors[name].nbytes for name in needed) == part.nbytes
