"""How other programs packed a model, and what it becomes when mlx-lm loads it."""

from typing import Any

import pytest

from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles
from shardmlx.modelfiles.parts import inspect_files, planned_tensors, read_shape
from shardmlx.modelfiles.published_packing import check_packing, published_packing
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from shardmlx.modelfiles.tensors import Quantisation, read_quantisation
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.weight_split import Split, divide, generation_of
from testbed.family_configs import CONFIGS
from testbed.tiny_models import tiny_config

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
LAYER = "model.layers.3.mlp.up_proj"


def packed(**said: Any) -> dict[str, Any]:
    return {**tiny_config(), "quantization_config": said}


def check(config: dict[str, Any]) -> None:
    check_packing(config, read_shape(config))


@pytest.mark.parametrize(
    ("said", "loaded"),
    [
        ({"quant_method": "mxfp4"}, Quantisation(4, 32, "mxfp4")),
        ({"quant_method": "mxfp8"}, Quantisation(8, 32, "mxfp8")),
        (
            {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
            Quantisation(8, 32, "mxfp8"),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            Quantisation(4, 16, "nvfp4"),
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}},
            Quantisation(4, 16, "nvfp4"),
        ),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, Quantisation(4, 64)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, Quantisation(4, 128)),
    ],
)
def test_a_format_becomes_what_mlx_lm_loads(
    said: dict[str, Any], loaded: Quantisation | None
) -> None:
    found = read_quantisation(packed(**said))
    assert (None if found is None else found.of(LAYER)) == loaded


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "'float-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "'FP8'"),
        ({"quant_method": "gptq", "bits": 8}, "8"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act"),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, "-1"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "32"),
        ({"quant_method": "modelopt", "quantization": None}, "None"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["re:["]}, "re:["),
        ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, "lm_head"),
        ({"bits": 4}, "None"),
    ],
)
def test_what_mlx_lm_does_not_read_is_refused_before_a_download(
    said: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError) as error:
        check(packed(**said))
    assert named in error.value.problem
    assert "16 bits" in error.value.remedy


def test_fp8_is_refused_where_the_family_does_not_unpack_it() -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(UserError, match="fp8 of type qwen3"):
        check(CONFIGS["qwen3"] | fp8)
    check(CONFIGS["deepseek_v3"] | fp8)


@pytest.mark.parametrize(
    ("module", "is_packed"),
    [
        (LAYER, True),
        ("model.layers.3.self_attn.q_proj", False),
        ("model.layers.3.mlp.router", False),
        ("model.embed_tokens", False),
        ("lm_head", False),
    ],
)
def test_what_the_file_leaves_out_is_not_packed(module: str, is_packed: bool) -> None:
    packing = published_packing({"quantization_config": MXFP4})
    assert packing is not None
    assert packing.packs(module) is is_packed


def test_what_mlx_lm_packed_is_not_taken_for_others() -> None:
    own = {"group_size": 64, "bits": 4}
    assert published_packing({"quantization": own, "quantization_config": own}) is None


def test_fp8_is_shown_as_stored_and_planned_as_it_is_loaded() -> None:
    config = CONFIGS["deepseek_v3"] | {"quantization_config": {"quant_method": "fp8"}}
    plain = planned_tensors(config)
    stored = {
        name: PlacedTensor("model.safetensors", "F8_E4M3", each.shape, 0, each.nbytes // 2)
        if ".mlp." in name
        else each
        for name, each in plain.items()
    }
    files = ModelFiles(name="m", config=config, tensors=stored)
    inspection = inspect_files(files)
    assert "fp8" in inspection.packing
    assert "bfloat16" in inspection.packing
    sizes = model_sizes(files, None).weight_sizes
    assert sum(sizes.layers) == sum(
        each.nbytes for name, each in plain.items() if ".layers." in name
    )
    assert sum(layer.nbytes for layer in inspection.layers) < sum(sizes.layers)
    generation = generation_of(inspection, sequences=1, context=1)
    stage_map = divide(inspection, "uniform", 1, generation=generation)
    assert Split(inspection, stage_map, (), generation).nbytes(0, 0) > sum(sizes.layers)


def test_headers_without_a_packed_tensor_contradict_the_config() -> None:
    config = packed(quant_method="mxfp4")
    tensors = planned_tensors(tiny_config())
    inspection = inspect_files(ModelFiles(name="m", config=config, tensors=tensors))
    assert "no tensor is packed" in inspection.packing


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_plain_weights_that_the_config_calls_packed_are_refused(method: str) -> None:
    config = packed(quant_method=method, bits=4)
    tensors = planned_tensors(tiny_config())
    with pytest.raises(UserError, match=f"quantization_config is of {method}, and no tensor is"):
        check_packing(config, read_shape(config), tensors)


def test_zeros_of_awq_are_biases_in_memory_and_gptq_with_an_index_is_refused() -> None:
    said: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 64}
    path = "model.layers.0.mlp.up_proj"
    own = {
        f"{path}.qzeros": PlacedTensor("m.safetensors", "I32", (2, 16), 0, 128),
        "lm_head.qweight": PlacedTensor("m.safetensors", "I32", (0, 16), 0, 0),
        "model.norm.weight": PlacedTensor("m.safetensors", "F16", (128,), 128, 384),
    }
    files = ModelFiles(name="m", config=packed(**said), tensors=own)
    assert model_sizes(files, None).weight_sizes.layers[0] == 2 * (2 * 16 * 8)
    said |= {"quant_method": "gptq"}
    own |= {f"{path}.g_idx": PlacedTensor("m.safetensors", "I32", (128,), 384, 896)}
    with pytest.raises(UserError, match="g_idx"):
        model_sizes(ModelFiles(name="m", config=packed(**said), tensors=own), None)
