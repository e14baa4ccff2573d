"""Experts that a checkpoint stores one by one: supplied so, and stacked as a stage loads them."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from shardmlx.loading.manifest import is_needed
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from tests.helpers.models_and_batches import build, tiny_config

LAYERS, EXPERTS = 4, 8
CONFIG = tiny_config(
    "mixtral",
    layers=LAYERS,
    hidden_size=64,
    intermediate_size=256,
    num_local_experts=EXPERTS,
)
STACKED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
OF_EXPERT = re.compile(r"layers\.(\d+)\.block_sparse_moe\.experts\.\d+\.")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Hugging Face stores it: a tensor for each matrix of each expert."""
    directory = tmp_path_factory.mktemp("mixtral")
    tensors = {}
    for name, array in tree_flatten(build(CONFIG).parameters()):
        match = re.match(r"(.*)\.switch_mlp\.(\w+)\.weight", name)
        if match is None:
            tensors[name] = array
            continue
        for expert in range(EXPERTS):
            own = f"{match[1]}.experts.{expert}.{STACKED[match[2]]}.weight"
            tensors[own] = mx.contiguous(array[expert])
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def test_a_stage_is_sent_the_experts_of_its_layers_each_by_itself(stored: Path) -> None:
    tensors = mx.load(str(stored / "model.safetensors"))
    assert isinstance(tensors, dict)
    needed = [name for name in tensors if is_needed(name, ModelShape.from_config(CONFIG), 1, 3)]
    experts = [match for name in needed if (match := OF_EXPERT.search(name))]
    assert {int(match[1]) for match in experts} == {1, 2}
    assert len(experts) == 2 * EXPERTS * len(STACKED)


def test_stacking_them_holds_one_matrix_of_one_layer_twice(stored: Path) -> None:
    """Not those of all layers, nor even of all three matrices."""
    model, _ = load_model(stored, lazy=True)
    part = Slice(model, 1, 3)
    del model
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    part.load()
    largest = max(array.nbytes for array in part.parameters().values())
    assert largest == 4 * EXPERTS * 64 * 256
    assert mx.get_active_memory() - before == pytest.approx(part.nbytes, rel=0.01)
    # MLX's thread may free the experts of the matrix before only while the next are read.
    assert mx.get_peak_memory() - before <= part.nbytes + 2.01 * largest
