"""Adapters that were trained before: all of them are used, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.build import build_model, build_to_generate
from testbed.tiny_models import save_model_directory, tiny_config

LAYERS = 3
LORA = {"rank": 4, "scale": 5.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    return save_model_directory(path, tiny_config(layers=LAYERS))


def generated(model: Path, adapters: Path | None) -> nn.Module:
    path = None if adapters is None else str(adapters)
    return build_to_generate(model, dtype=None, adapter_path=path, seed=None)


def trained(model: Path, file: Path, **options: Any) -> nn.Module:
    config = TrainConfig.from_flat(
        **{"num_layers": -1, "lora_parameters": LORA, "resume_adapter_file": str(file), **options}
    )
    return build_model(model, config.tune, 0, config.resume_adapter_file)[0]


def error_of(act: Any) -> UserError:
    with pytest.raises(UserError) as error:
        act()
    assert "\n" not in str(error.value)
    assert "SimpleNamespace" not in str(error.value)
    return error.value


def save_own(directory: Path, model: Path, **options: Any) -> Path:
    config = TrainConfig.from_flat(**{"num_layers": -1, "lora_parameters": LORA, **options})
    made, _ = build_model(model, config.tune, 0, None)
    directory.mkdir()
    file = directory / "adapters.safetensors"
    mx.save_safetensors(str(file), dict(tree_flatten(made.trainable_parameters())))
    (directory / "adapter_config.json").write_text(json.dumps(config.to_adapter_config()))
    return file


@pytest.mark.parametrize(
    "less", [{"num_layers": 1}, {"lora_parameters": {**LORA, "keys": ["self_attn.q_proj"]}}]
)
def test_a_run_that_trains_less_than_its_file_has_is_refused(
    less: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    file = save_own(tmp_path / "own", model)
    trained(model, file)
    error = error_of(lambda: trained(model, file, **less))
    assert "lora_" in error.problem
    assert "--num-layers" in error.remedy
    assert "keys in lora_parameters" in error.remedy


@pytest.mark.parametrize("wrong", ["mlp.dwn_proj", "down_proj"])
def test_a_module_that_is_not_there_is_refused_beside_others_that_are(
    wrong: str, model: Path
) -> None:
    parameters = {**LORA, "keys": ["self_attn.q_proj", wrong]}
    config = TrainConfig.from_flat(num_layers=-1, lora_parameters=parameters)
    error = error_of(lambda: build_model(model, config.tune, 0, None))
    assert repr(wrong) in error.problem
    assert "mlp.down_proj" in error.remedy
    whole = {**LORA, "keys": ["mlp.down_proj", "lm_head"]}
    config = TrainConfig.from_flat(num_layers=-1, lora_parameters=whole)
    made, _ = build_model(model, config.tune, 0, None)
    assert "lm_head.lora_a" in dict(tree_flatten(made.trainable_parameters()))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not valid JSON"),
        ("[]", "no JSON object"),
        ("{}", "num_layers"),
        ('{"num_layers": 3}', "lora_parameters"),
        ('{"num_layers": "3", "lora_parameters": {}}', "num_layers is '3'"),
        ('{"num_layers": 3, "lora_parameters": []}', "lora_parameters is []"),
        ('{"num_layers": 3, "lora_parameters": {"rank": 4}}', "scale"),
        ('{"num_layers": 3, "lora_parameters": {"rank": "4", "scale": 1, "dropout": 0}}', "'4'"),
        ('{"fine_tune_type": "qlora"}', "qlora"),
        ('{"peft_type": "LORA"}', "PEFT"),
    ],
)
def test_a_broken_adapter_config_is_named(
    text: str, named: str, model: Path, tmp_path: Path
) -> None:
    save_own(tmp_path / "own", model)
    file = tmp_path / "own" / "adapter_config.json"
    file.write_text(text)
    error = error_of(lambda: generated(model, tmp_path / "own"))
    assert str(file) in error.problem
    assert named in error.problem


def test_a_key_that_mlx_lm_once_wrote_is_no_fault(model: Path, tmp_path: Path) -> None:
    save_own(tmp_path / "own", model)
    file = tmp_path / "own" / "adapter_config.json"
    content = json.loads(file.read_text())
    content["lora_parameters"]["alpha"] = 16
    file.write_text(json.dumps(content))
    generated(model, tmp_path / "own")
