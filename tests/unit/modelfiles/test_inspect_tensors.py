"""The tensors that a family has are those that mlx-lm's own models have."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import planned_tensors
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from shardmlx.modelfiles.tensors import (
    Quantisation,
    packing_of,
    read_quantisation,
)
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build
from tests.helpers.fake_models import MISTRAL_7B, MISTRAL_LARGE

QUANTISATIONS: list[dict[str, Any]] = [
    {"bits": 4, "group_size": 32},
    {"bits": 3, "group_size": 32},
    {"bits": 8, "group_size": 32},
    {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    {"bits": 8, "group_size": 32, "mode": "mxfp8"},
]


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in tree_flatten(build(config).parameters())}


@pytest.mark.parametrize(("number", "family"), [*enumerate(CONFIGS)])
def test_names_and_shapes_are_mlx_lms(number: int, family: str) -> None:
    """Modes take turns: the family decides which modules are packed, the mode into which shapes."""
    config = CONFIGS[family] | {"quantization": QUANTISATIONS[number % len(QUANTISATIONS)]}
    planned = planned_tensors(config)
    assert {name: place.shape for name, place in planned.items()} == shapes_of(config)


def test_bytes_are_those_of_the_published_models() -> None:
    """Counted from the files on the hub: DESIGN, section 6."""
    plain = planned_tensors(MISTRAL_7B)
    assert len(plain) == 291
    assert sum(place.nbytes for place in plain.values()) == 14_496_047_104
    packed = planned_tensors(MISTRAL_7B | {"quantization": {"bits": 4, "group_size": 64}})
    assert len(packed) == 743
    assert sum(place.nbytes for place in packed.values()) == 4_077_395_968
    assert sum(place.nbytes for place in planned_tensors(MISTRAL_LARGE).values()) == 245_220_139_008


def test_a_module_has_the_quantisation_that_the_config_gives_it() -> None:
    entry = {
        "bits": 4,
        "group_size": 64,
        "lm_head": {"bits": 8},
        "model.layers.0.mlp.up_proj": False,
    }
    config = read_quantisation({"quantization": entry})
    assert config is not None
    assert config.of("model.layers.1.mlp.up_proj") == Quantisation(4, 64)
    assert config.of("lm_head") == Quantisation(8, 64)
    assert config.of("model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("4-bit", "'4-bit'"),
        ({"bits": 7}, "7 bits"),
        ({"group_size": "x"}, "group_size 'x'"),
        ({"mode": "int4"}, "'int4'"),
        ({"lm_head": {"bits": 1}}, "lm_head: 1 bits"),
    ],
)
def test_a_quantisation_that_mlx_does_not_have_is_refused(entry: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_quantisation({"quantization": entry})


def test_packing_is_told_from_shapes_as_mlx_lm_tells_it() -> None:
    hint = Quantisation(8, 32)
    for how in (Quantisation(4, 64), Quantisation(3, 32), Quantisation(4, 16, "nvfp4")):
        dtype = "BF16" if how.mode == "affine" else "U8"
        weight, scales = (
            PlacedTensor("", dtype, how.shapes((10, 512))[part], 0, 0)
            for part in ("weight", "scales")
        )
        assert packing_of(weight, scales, 512, hint) == how
        assert packing_of(weight, scales, None, hint) == packing_of(weight, scales, 7, hint) == hint
        assert packing_of(weight, None, 512, hint) is None


def test_mlx_reads_back_what_is_said_of_packed_weights() -> None:
    weight = mx.random.normal((10, 512))
    for mode, bits, group in (("affine", 5, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)):
        arrays = mx.quantize(weight, group_size=group, bits=bits, mode=mode)
        shapes = Quantisation(bits, group, mode).shapes((10, 512))
        assert [tuple(array.shape) for array in arrays] == list(shapes.values())
