"""``--verify``: sound models pass, and every kind of damage is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmlx.main import main
from shardmlx.modelfiles.model_files import find_source, read_model
from shardmlx.modelfiles.verify import verify
from testbed.family_configs import CONFIGS
from testbed.further_configs import FURTHER
from testbed.tiny_models import save_model_directory, tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.fake_models import TINY, Tensors, model_files, tensors_of, write

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def verified(path: Path) -> tuple[list[str], list[str]]:
    return verify(read_model(find_source(str(path))))


def faults(path: Path) -> list[str]:
    _, found = verified(path)
    assert all("\n" not in fault for fault in found)
    return found


def model(path: Path, config: dict[str, Any] = TINY, **changes: Any) -> Path:
    """A model with some of its tensors changed, or taken out where the change is None."""
    tensors: Tensors = tensors_of(config) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return write(path, model_files(config, tensors=kept))


@pytest.mark.parametrize("quantisation", [{}, {"quantization": {"bits": 4, "group_size": 32}}])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_oss", "mistral3", "qwen3_5"])
def test_what_mlx_writes_is_sound(family: str, quantisation: Any, tmp_path: Path) -> None:
    """Plain and tied, experts, inside a wrapper, recurrent.

    test_inspect_tensors.py compares the tensors of every family with mlx-lm's.
    """
    save_model_directory(tmp_path, (UNDECLARED | FURTHER | CONFIGS)[family] | quantisation)
    checked, wrong = verified(tmp_path)
    assert wrong == []
    assert any(f"the family {family}" in line for line in checked)


def test_a_mixtral_with_single_experts_is_sound_unless_one_is_missing(tmp_path: Path) -> None:
    config = tiny_config("mixtral", layers=1)
    stacked = tensors_of(config)
    tensors: Tensors = {}
    for name, (dtype, shape, nbytes) in stacked.items():
        if "switch_mlp" not in name:
            tensors[name] = (dtype, shape, nbytes)
            continue
        for letter, projection in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            if projection in name:
                for expert in range(shape[0]):
                    single = f"model.layers.0.block_sparse_moe.experts.{expert}.{letter}.weight"
                    tensors[single] = (dtype, shape[1:], nbytes // shape[0])
    assert faults(write(tmp_path / "whole", model_files(config, tensors=tensors))) == []
    del tensors[single]
    (fault,) = faults(write(tmp_path / "damaged", model_files(config, tensors=tensors)))
    assert f"{single!r} is missing" in fault


def test_layers_after_the_last_are_passed_over_where_mlx_lm_does(tmp_path: Path) -> None:
    further = {"model.layers.4.eh_proj.weight": ("BF16", [64, 32], 4096)}
    assert faults(model(tmp_path / "glm", CONFIGS["glm4_moe"], **further)) == []
    for family in ("qwen3_moe", "gemma"):
        (fault,) = faults(model(tmp_path / family, CONFIGS[family], **further))
        assert "is unexpected" in fault


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Q_PROJ: None}, "is missing"),
        ({Q_PROJ: ("BF16", [64, 32], 4096)}, "has shape [64, 32]"),
        ({Q_PROJ: ("I8", [64, 64], 4096)}, "is int8"),
        ({"model.layers.4.mlp.up_proj.weight": ("BF16", [2], 4)}, "is unexpected"),
    ],
)
def test_what_differs_from_the_family_is_listed(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (fault,) = faults(model(tmp_path, TINY, **changes))
    assert message in fault
    assert next(iter(changes)) in fault


def test_a_packed_weight_without_scales_does_not_pass_for_a_plain_one(tmp_path: Path) -> None:
    config = TINY | {"quantization": {"bits": 4, "group_size": 32}}
    changes = {Q_PROJ.replace("weight", part): None for part in ("scales", "biases")}
    (fault,) = faults(model(tmp_path, config, **changes))
    assert f"'{Q_PROJ}' of model.safetensors has shape [64, 8]" in fault


def test_all_files_are_looked_at_not_only_the_first_that_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, model_files(TINY, shards=3))
    for number in (1, 3):
        path = tmp_path / f"model-0000{number}-of-00003.safetensors"
        path.write_bytes(path.read_bytes()[:-5])
    found = faults(tmp_path)
    assert sum("is truncated: 5 bytes are missing" in fault for fault in found) == 2


def test_a_model_that_mlx_lm_does_not_build_is_said(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY.items() if key != "rms_norm_eps"}
    (fault,) = faults(model(tmp_path, config))
    assert "rms_norm_eps" in fault


def test_status_1_and_a_list_when_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, broken = write(tmp_path / "a", model_files(TINY)), tmp_path / "b"
    assert main(["inspect", str(sound), "--verify"]) == 0
    assert capsys.readouterr().out.endswith("all is well\n")
    model(broken, TINY, **{Q_PROJ: None})
    assert main(["inspect", str(broken), "--verify"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines()[-2:] == [
        f"wrong: tensor '{Q_PROJ}' is missing: copy or download the model again",
        "1 fault",
    ]
