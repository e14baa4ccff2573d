"""Rotary embeddings as transformers 5 writes them: the fields of mlx-lm, and the same logits.

``tests/helpers/rope_logits.json`` has logits of transformers itself (testbed/make_rope_logits.py).
"""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file

from shardmlx.config.export import ExportOptions
from shardmlx.conversion.lazy_model import build_lazily
from shardmlx.loading.build import build_to_generate
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.tensors import expected_tensors, modules
from shardmlx.models.sizes.rope_parameters import with_rope
from shardmlx.models.sizes.undeclared import build_random
from testbed.family_configs import CONFIGS
from testbed.seeded_weights import SHOWN, TOKENS, seeded_weight
from testbed.tiny_models import tiny_config
from tests.helpers.hugging_face_experts import single_experts
from tests.helpers.refusals import refusal

REFERENCE = Path(__file__).parents[2] / "helpers" / "rope_logits.json"
CASES = json.loads(REFERENCE.read_text())["cases"]


def write(directory: Path, config: dict[str, Any]) -> None:
    stacked = expected_tensors(modules(read_shape(with_rope(config))), lambda *_: None)
    shapes = dict(stacked)
    for name, sides in stacked.items():
        if single := single_experts(name, sides[0]):
            shapes |= dict.fromkeys(single, shapes.pop(name)[1:])
    save_file(
        {name: seeded_weight(name, sides) for name, sides in shapes.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))


def logits_of(directory: Path) -> np.ndarray:
    model = build_to_generate(directory, dtype=None, adapter_path=None, seed=None)
    return np.array(model(mx.array([TOKENS]))[0, list(SHOWN)])


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['config']['model_type']}-{c['form']}")
def test_logits_are_those_of_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, case["config"])
    np.testing.assert_allclose(logits_of(tmp_path), case["logits"], atol=1e-4)


LINEAR = {"rope_type": "linear", "factor": 2}
QUARTER = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}


def case_of(family: str, form: str) -> dict[str, Any]:
    return next(c for c in CASES if (c["config"]["model_type"], c["form"]) == (family, form))


def filled(**fields: Any) -> dict[str, Any]:
    return with_rope({"model_type": "llama", "max_position_embeddings": 64, **fields})


def test_an_exported_config_says_it_in_the_fields_of_mlx_lm(tmp_path: Path) -> None:
    write(tmp_path, case_of("llama", "linear")["config"])
    config = build_lazily(tmp_path, None, ExportOptions.from_flat(model="m", output_dir="o")).config
    assert config["rope_theta"] == 500.0
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0}


def test_what_mlx_lm_passes_over_is_computed_here_and_not_exported(tmp_path: Path) -> None:
    write(tmp_path, case_of("mixtral", "yarn")["config"])
    error = refusal(
        build_lazily, tmp_path, None, ExportOptions.from_flat(model="m", output_dir="o")
    )
    assert "mixtral" in error.problem
    assert "yarn" in error.problem


def test_each_type_of_layers_has_its_own_base() -> None:
    said = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    config = filled(model_type="gemma3_text", rope_parameters=said, layer_types=kinds)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"]["factor"] == 8.0
    assert config["sliding_window_pattern"] == 2


def ropes_of(config: dict[str, Any]) -> list[tuple[float, float]]:
    """Base and scale of the rotary embedding of each layer of a model with random weights."""
    ropes = [layer.self_attn.rope for layer in build_random(with_rope(config)).layers]
    return [(rope.base, rope.scale) for rope in ropes]


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
def test_a_family_tells_layers_apart_where_the_file_does_not(family: str) -> None:
    config = {**CONFIGS[family], "rope_theta": None, "rope_scaling": None}
    said = {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}
    scaling = {key: said[key] for key in ("rope_type", "factor")}
    found = ropes_of({**config, "rope_parameters": said})
    assert found == ropes_of({**config, "rope_theta": 500.0, "rope_scaling": scaling})
    assert len({*found}) == 2


def test_layers_whose_types_are_not_listed_are_left_to_the_family() -> None:
    said = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    }
    found = ropes_of({**CONFIGS["gemma3_text"], "rope_parameters": said})
    assert found == [(5e3, 1.0), (1e6, 0.125)] * 2


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        # A null says nothing, and a config without rope_parameters stays as it is.
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": None}}, {"rope_theta": 5.0}),
        ({"rope_scaling": {"type": "linear"}}, {"rope_scaling": {"type": "linear"}}),
        # The rotated share goes where the family reads it.
        ({"model_type": "phi", "rope_parameters": QUARTER}, {"partial_rotary_factor": 0.25}),
        ({"model_type": "gpt_neox", "rope_parameters": QUARTER}, {"rotary_pct": 0.25}),
        ({"model_type": "minimax_m2", "rope_parameters": QUARTER}, {"rotary_dim": 4}),
        # As in transformers, they override an old base, and an old scaling overrides them.
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 5.0}),
        (
            {
                "rope_theta": 1e4,
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_theta": 5.0, **LINEAR},
            },
            {"rope_theta": 1e4, "rope_scaling": {**LINEAR, "type": "linear", "factor": 4.0}},
        ),
        (
            {"text_config": {"head_dim": 16, "rope_parameters": {"rope_theta": 5.0}}},
            {"rope_theta": None},
        ),
    ],
)
def test_fields_are_filled_as_transformers_reads_them(
    fields: dict[str, Any], found: dict[str, Any]
) -> None:
    config = filled(head_dim=16, **fields)
    assert {key: config.get(key) for key in found} == found
    if "text_config" in fields:
        assert config["text_config"]["rope_theta"] == 5.0


def test_filling_a_second_time_changes_nothing() -> None:
    for case in CASES:
        once = with_rope(case["config"])
        assert with_rope(once)["rope_scaling"] == once["rope_scaling"]
        assert with_rope(once)["rope_theta"] == once["rope_theta"]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("default", "'default'"),
        ({"rope_theta": "1e4"}, "'1e4'"),
        ({"rope_theta": 0}, "0"),
        ({"rope_theta": math.inf}, "inf"),
        ({"rope_theta": 1e4, "partial_rotary_factor": "half"}, "'half'"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "num_attention_heads"),
        ({"full_attention": [5], "sliding_attention": {"rope_theta": 1e4}}, "[5]"),
        ({"sliding_attention": {"rope_theta": 1e4}}, "full_attention"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_theta": 1e4, "rope_type": "spiral"}, "'spiral'"),
        ({"rope_theta": 1e4, "rope_type": "linear"}, "factor"),
        ({"rope_theta": 1e4, "rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"some_attention": {"rope_theta": 1e4}}, "'some_attention'"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(said: Any, named: str) -> None:
    error = refusal(filled, rope_parameters=said)
    assert named in error.problem
    assert error.remedy


def test_limits_of_yarn_that_are_not_rounded_are_refused() -> None:
    said = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "truncate": False}
    assert "truncate" in str(refusal(read_shape, {**tiny_config(), **filled(rope_parameters=said)}))


def test_gemma_whose_layers_have_no_period_is_refused() -> None:
    config = case_of("gemma3_text", "default")["config"]
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    own = {"layer_types": kinds, "num_hidden_layers": 3, "sliding_window_pattern": 2}
    assert "layer_types" in str(refusal(read_shape, with_rope(config | own)))


def test_phi3_has_no_scaling_of_this_type(tmp_path: Path) -> None:
    config = case_of("phi3", "default")["config"]
    linear = {**config, "rope_parameters": {"rope_theta": 1e4, **LINEAR}}
    assert "rope_scaling" in str(refusal(write, tmp_path, linear))
    read_shape(config)
