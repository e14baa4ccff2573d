"""Experts are computed one by one: no stack of them is ever in memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.config.export import ExportOptions
from shardmlx.conversion.lazy_model import build_lazily
from testbed.family_configs import CONFIGS, has_experts
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.exports import export_alone
from tests.helpers.hugging_face_experts import save_experts_one_by_one
from tests.helpers.saved_adapters import save_random_lora

HIDDEN, WIDTH, EXPERTS = 128, 512, 16
EXPERT = HIDDEN * WIDTH * 4  # bytes of a matrix in float32
MIXTURE = tiny_config(
    "mixtral", layers=2, hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS
)


@pytest.fixture(scope="module", params=["one by one", "stacked"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "model"
    save = save_model_directory if request.param == "stacked" else save_experts_one_by_one
    return save(path, MIXTURE)


@pytest.mark.parametrize("how", [{"quantize": "4:32"}, {}], ids=["4 bits", "plain"])
def test_no_more_than_three_experts_are_in_memory(
    how: dict[str, Any], mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmlx.conversion.writer._PIECE", EXPERT // 4)
    keys = ["block_sparse_moe.switch_mlp.up_proj"]
    adapters = save_random_lora(tmp_path / "adapters", mixture, 1, rank=2, keys=keys)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    options = ExportOptions.from_flat(
        model=str(mixture), output_dir=str(tmp_path / "out"), adapter_path=str(adapters), **how
    )
    export_alone(options)
    assert EXPERT < mx.get_peak_memory() - before < 3 * EXPERT


MIXTURES = [family for family, config in CONFIGS.items() if has_experts(config)]


def test_every_family_with_experts_has_them_one_by_one(tmp_path: Path) -> None:
    assert len(MIXTURES) > 20
    for family in MIXTURES:
        wide = {"hidden_size": 64} if "hidden_size" in CONFIGS[family] else {}
        save_model_directory(tmp_path / family, {**CONFIGS[family], **wide})
        options = ExportOptions.from_flat(model=family, output_dir="out", dtype="float16")
        model = build_lazily(tmp_path / family, None, options)
        stacked = [name for name in model.weights if "switch_mlp" in name and "bias" not in name]
        assert [name for name in stacked if name not in model.experts] == [], family
