"""Models that other programs have quantised: read as by mlx-lm, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from shardmlx.config.export import ExportOptions
from shardmlx.errors import UserError
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build, tiny_config
from tests.helpers.exports import export_alone
from tests.helpers.models_and_batches import load_arrays

LLAMA = tiny_config(layers=1, hidden_size=64, intermediate_size=64, num_key_value_heads=4)
DEEPSEEK = {**CONFIGS["deepseek_v3"], "torch_dtype": "bfloat16"}

Tensors = dict[str, tuple[str, Any]]
"""Type in the file, and the numbers as they are stored, by name."""


def write(path: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """Write a model whose tensors are of types that NumPy and MLX do not write."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        end = len(data) + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / "config.json").write_text(json.dumps(config))
    return path


def plain(config: Mapping[str, Any]) -> Tensors:
    parameters = tree_flatten(build(config).parameters())
    return {name: ("F32", np.array(array.astype(mx.float32))) for name, array in parameters}


def packed_by_awq(path: Path, method: str = "awq", *, index: bool = False) -> Path:
    random, tensors = np.random.RandomState(3), plain(LLAMA)
    for name in [name for name in tensors if "_proj" in name]:
        base = name.removesuffix(".weight")
        columns, rows = tensors.pop(name)[1].shape
        numbers = random.randint(0, 2**31, (rows, columns // 8)).astype(np.int32)
        zeros = random.randint(0, 2**31, (rows // 32, columns // 8)).astype(np.int32)
        tensors[f"{base}.qweight"] = "I32", numbers
        tensors[f"{base}.qzeros"] = "I32", zeros
        scales = random.uniform(0.01, 0.02, (rows // 32, columns)).astype(np.float16)
        tensors[f"{base}.scales"] = "F16", scales
        if index:
            tensors[f"{base}.g_idx"] = "I32", np.arange(rows, dtype=np.int32) // 32
    how = {"quant_method": method, "bits": 4, "group_size": 32}
    return write(path, {**LLAMA, "quantization_config": how}, tensors)


def in_8_bits(path: Path, config: Mapping[str, Any], scales: bool) -> Path:
    random, tensors = np.random.RandomState(3), plain(config)
    for name in [name for name in tensors if "_proj.weight" in name and "switch_mlp" not in name]:
        shape = tensors[name][1].shape
        tensors[name] = "F8_E4M3", random.randint(0, 64, shape).astype(np.uint8)
        if scales:
            blocks = tuple(-(-side // 128) for side in shape)
            tensors[f"{name}_scale_inv"] = "F32", random.uniform(1, 2, blocks).astype(np.float32)
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return write(path, {**config, "quantization_config": how}, tensors)


def exported(model: Path, to: Path, **how: Any) -> dict[str, mx.array]:
    export_alone(ExportOptions.from_flat(model=str(model), output_dir=str(to), **how))
    return load_arrays(to / "model.safetensors")


def assert_same(found: Mapping[str, mx.array], model: Any) -> None:
    expected = dict(tree_flatten(model.parameters()))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name], array), name


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_what_awq_and_gptq_packed_is_as_mlx_lm_reads_it(method: str, tmp_path: Path) -> None:
    path = packed_by_awq(tmp_path / "model", method)
    model, _ = load_model(path)
    assert_same(exported(path, tmp_path / "out"), model)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4}


def test_floats_of_8_bits_are_as_mlx_lm_reads_them_of_families_that_have_them(
    tmp_path: Path,
) -> None:
    path = in_8_bits(tmp_path / "model", DEEPSEEK, scales=True)
    model, config = load_model(path)
    model.set_dtype(mx.bfloat16, lambda dtype: mx.issubdtype(dtype, mx.floating))
    model, _ = quantize_model(model, config, 32, 4)
    found = exported(path, tmp_path / "out", quantize="4:32")
    floats = [name for name in found if name.endswith("e_score_correction_bias")]
    for name in floats:  # mlx-lm does not cast it
        found[name] = found[name].astype(mx.bfloat16)
    assert_same(found, model)


def refusal(model: Path, out: Path) -> str:
    with pytest.raises(UserError) as refused:
        exported(model, out)
    assert not out.exists()
    return str(refused.value)


def test_what_mlx_lm_cannot_read_is_refused_by_name(tmp_path: Path) -> None:
    message = refusal(packed_by_awq(tmp_path / "gptq", "gptq", index=True), tmp_path / "out")
    assert "g_idx" in message
    assert "packed by gptq" in message
    message = refusal(in_8_bits(tmp_path / "fp8", LLAMA, scales=True), tmp_path / "out")
    assert "packed by fp8" in message
    message = refusal(in_8_bits(tmp_path / "bare", LLAMA, scales=False), tmp_path / "out")
    assert "model.layers.0.self_attn.q_proj.weight is in F8_E4M3" in message
