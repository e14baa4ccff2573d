"""Adapters that were trained before, here or by PEFT: all of them are used, or none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from shardmlx.config.specs import FineTune
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.adapters import convert
from shardmlx.loading.build import build_model, build_to_generate
from tests.helpers.models_and_batches import load_arrays, save_model_directory, tiny_config
from tests.helpers.peft_adapters import CONFIG, save_peft

LAYERS = 3
TOKENS = mx.array([[1, 5, 9, 2, 7]])
LORA = {"rank": 4, "scale": 5.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    return save_model_directory(path, tiny_config(layers=LAYERS))


@pytest.fixture(scope="module")
def shapes(model: Path) -> dict[str, tuple[int, int]]:
    """The weights of the modules that ``LORA`` names, (out, in)."""
    return {
        name.removesuffix(".weight"): array.shape
        for name, array in weights(model).items()
        if name.endswith(("q_proj.weight", "down_proj.weight"))
    }


def weights(model: Path) -> dict[str, Any]:
    return load_arrays(model / "model.safetensors")


def generated(model: Path, adapters: Path | None) -> nn.Module:
    path = None if adapters is None else str(adapters)
    return build_to_generate(model, dtype=None, adapter_path=path, seed=None)


def trained(model: Path, file: Path, **options: Any) -> nn.Module:
    config = TrainConfig(
        **{"num_layers": -1, "lora_parameters": LORA, "resume_adapter_file": str(file), **options}
    )
    return build_model(model, FineTune.of(config), 0, config.resume_adapter_file)[0]


def error_of(act: Any) -> UserError:
    with pytest.raises(UserError) as error:
        act()
    assert "\n" not in str(error.value)
    assert "SimpleNamespace" not in str(error.value)
    return error.value


# PEFT


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        pytest.param({}, {}, id="alpha / r"),
        pytest.param({"use_rslora": True}, {"": 12 / math.sqrt(4)}, id="rslora"),
        pytest.param(
            {
                "rank_pattern": {"model.layers.1.mlp.down_proj": 2},
                "alpha_pattern": {r"layers\.[02]\.self_attn\.q_proj": 8},
            },
            {"1.mlp.down_proj": 12 / 2, "0.self_attn.q_proj": 2.0, "2.self_attn.q_proj": 2.0},
            id="patterns",
        ),
    ],
)
def test_a_lora_of_peft_computes_what_its_formula_says(
    config: dict[str, Any],
    scales: dict[str, float],
    model: Path,
    shapes: dict[str, tuple[int, int]],
    tmp_path: Path,
) -> None:
    """W + alpha / r B A, of layers, of the embedding and of the head."""
    ends = {"model.embed_tokens": "embed", "lm_head": "head"}
    ends_shapes = {name: weights(model)[f"{name}.weight"].shape for name in ends}
    pairs = save_peft(tmp_path / "peft", {**shapes, **ends_shapes}, **config)
    expected = generated(model, None)
    changed = {}
    for module, (b, a) in pairs.items():
        scale = next((s for end, s in scales.items() if module.endswith(end)), 12 / 4)
        changed[f"{module}.weight"] = weights(model)[f"{module}.weight"] + scale * (b @ a)
    expected.update(tree_unflatten(list(changed.items())))
    ours, plain = (generated(model, path)(TOKENS) for path in (tmp_path / "peft", None))
    assert mx.abs(ours - expected(TOKENS)).max() < 1e-4 * mx.abs(ours).max()
    assert mx.abs(ours - plain).max() > 0.1 * mx.abs(ours).max()


def test_training_goes_on_from_a_lora_of_peft_with_another_scale(
    model: Path, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    pairs = save_peft(tmp_path / "peft", shapes)
    file = tmp_path / "peft" / "adapter_model.safetensors"
    found = dict(tree_flatten(trained(model, file).trainable_parameters()))
    for module, (b, a) in pairs.items():
        product = LORA["scale"] * found[f"{module}.lora_a"] @ found[f"{module}.lora_b"]
        assert mx.allclose(product.T, 12 / 4 * (b @ a), atol=1e-4)
        assert found[f"{module}.lora_a"].dtype == mx.float32
    rank = {"lora_parameters": {**LORA, "rank": 8}}
    assert "rank: 4 in lora_parameters" in error_of(lambda: trained(model, file, **rank)).remedy
    (tmp_path / "peft" / "adapter_config.json").unlink()
    assert "adapter_config.json" in error_of(lambda: trained(model, file)).problem


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"use_qalora": True}, "use_qalora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"lora_alpha": "many"}, "many"),
        ({"r": 0}, "r is 0"),
        ({"alpha_pattern": {"(": 3}}, "'('"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_its_name(
    config: dict[str, Any], named: str, model: Path, shapes: dict[str, tuple[int, int]],
    tmp_path: Path,
) -> None:  # fmt: skip
    save_peft(tmp_path / "peft", shapes)
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    file = tmp_path / "peft" / "adapter_model.safetensors"
    for act in (lambda: generated(model, tmp_path / "peft"), lambda: trained(model, file)):
        assert named in error_of(act).problem


def test_tensors_that_are_no_lora_of_this_model_are_refused(
    model: Path, shapes: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    save_peft(tmp_path / "other", {"model.layers.9.mlp.up_proj": (64, 32)})
    assert "layers.9.mlp.up_proj" in error_of(lambda: generated(model, tmp_path / "other")).problem
    save_peft(tmp_path / "half", shapes)
    file = tmp_path / "half" / "adapter_model.safetensors"
    half = load_arrays(file)
    mx.eval(half)
    del half["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    mx.save_safetensors(str(file), half)
    assert "layers.0.self_attn.q_proj" in error_of(lambda: generated(model, file.parent)).problem
    mx.save_safetensors(str(file), half | {"base_model.model.lm_head.weight": mx.ones((2, 2))})
    assert "lm_head.weight" in error_of(lambda: generated(model, file.parent)).problem
    file.rename(file.with_name("adapter_model.bin"))
    assert "adapter_model.bin" in error_of(lambda: generated(model, file.parent)).problem


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.language_model.layers.0.mlp.up_proj", "language_model.model.layers.0.mlp.up_proj"),
        ("model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("transformer.h.0.attn.c_attn", "model.h.0.attn.c_attn"),
        ("lm_head", "language_model.lm_head"),
    ],
)
@pytest.mark.parametrize("suffix", ["weight", "default.weight"])
def test_a_module_is_found_where_transformers_calls_it_otherwise(
    path: str, module: str, suffix: str
) -> None:
    pair = {"A": mx.ones((2, 8)), "B": mx.ones((4, 2))}
    tensors = {f"base_model.model.{path}.lora_{part}.{suffix}": pair[part] for part in pair}
    modules = [module, "vision_tower.layers.0.mlp.up_proj"]
    arrays, parameters = convert(CONFIG, tensors, modules)
    assert parameters == {"rank": 2, "scale": 6.0, "dropout": 0.0, "keys": [module]}
    assert arrays[f"{module}.lora_a"].shape == (8, 2)
    assert arrays[f"{module}.lora_b"].shape == (2, 4)


def test_a_tied_embedding_of_peft_is_refused(tmp_path: Path) -> None:
    """There PEFT changes the embedding alone, and mlx-lm would change the head too."""
    tied = save_model_directory(tmp_path / "tied", tiny_config(layers=1, tied=True))
    shape = weights(tied)["model.embed_tokens.weight"].shape
    save_peft(tmp_path / "peft", {"model.embed_tokens": shape})
    error = error_of(lambda: generated(tied, tmp_path / "peft"))
    assert "model.embed_tokens" in error.problem


# Ours


def save_own(directory: Path, model: Path, **options: Any) -> Path:
    config = TrainConfig(**{"num_layers": -1, "lora_parameters": LORA, **options})
    made, _ = build_model(model, FineTune.of(config), 0, None)
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
    config = TrainConfig(num_layers=-1, lora_parameters=parameters)
    error = error_of(lambda: build_model(model, FineTune.of(config), 0, None))
    assert repr(wrong) in error.problem
    assert "mlp.down_proj" in error.remedy
    whole = {**LORA, "keys": ["mlp.down_proj", "lm_head"]}
    config = TrainConfig(num_layers=-1, lora_parameters=whole)
    made, _ = build_model(model, FineTune.of(config), 0, None)
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
        ('{"peft_type": "LORA"}', "r is None"),
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
