"""An exported model is that of mlx_lm.convert and mlx_lm.fuse, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.convert import convert
from mlx_lm.fuse import main as fuse_command
from mlx_lm.utils import make_shards

from shardmlx.checkpoint.export import TensorSpec
from shardmlx.config.export import ExportOptions, PackingOptions
from shardmlx.conversion.export import divide
from shardmlx.modelfiles.safetensors_header import read_header
from shardmlx.models.sizes.rope_parameters import with_rope
from testbed.family_configs import CONFIGS, LAYERS, has_experts
from testbed.further_configs import FURTHER
from testbed.tiny_models import save_model_directory, tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.exports import export_alone
from tests.helpers.hugging_face_experts import save_experts_one_by_one
from tests.helpers.saved_adapters import save_lora, save_random_lora


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm writes neither tokenizer nor card, and nobody waits for the disk."""
    tokenizer = SimpleNamespace(save_pretrained=lambda path: None)
    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", lambda *args, **kwargs: tokenizer)
    monkeypatch.setattr(mlx_lm.utils, "create_model_card", lambda *args: None)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def contents(directory: Path) -> dict[str, Any]:
    """The bytes of each tensor, with type and shape; the index, and config.json with the fields
    that say what ``rope_parameters`` does."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        header, data = read_header(path), path.read_bytes()
        for name, tensor in header.tensors.items():
            content = data[tensor.start : tensor.end]
            found[name] = (path.name, tensor.dtype, tensor.shape, content)
    for name in ("config.json", "model.safetensors.index.json"):
        found[name] = (directory / name).read_bytes()
    config = json.loads(found["config.json"])
    if with_rope(config) != config:
        said = dict(sorted(with_rope(config).items()))
        found["config.json"] = json.dumps(said, indent=4).encode()
    return found


def assert_same(ours: Path, theirs: Path) -> None:
    found, expected = contents(ours), contents(theirs)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def fuse(
    monkeypatch: pytest.MonkeyPatch, model: Path, adapters: Path, to: Path, *more: str
) -> None:
    words = "--model", model, "--adapter-path", adapters, "--save-path", to, *more
    monkeypatch.setattr("sys.argv", ["fuse", *map(str, words)])
    fuse_command()


def exported(model: Path, to: Path, **options: Any) -> Path:
    export_alone(ExportOptions.from_flat(model=str(model), output_dir=str(to), **options))
    return to


OTHERS = ("qwen3_5", "lfm2", "gemma3n", "hunyuan", "bailing_hybrid", "rwkv7", "bailing_moe_linear")
"""Types that no row declares."""

GROUPS_OF_64 = (
    "granite", "qwen3_moe", "gpt_oss", "minimax", "minimax_m2", "granitemoe", "bailing_moe",
    "bailing_hybrid", "bailing_moe_linear", "rwkv7",
)  # fmt: skip
"""Families of which mlx-lm quantises some layers in groups of 64, whatever is asked for."""


@pytest.mark.parametrize("family", [*CONFIGS, *OTHERS])
def test_every_family_is_fused_and_quantised_as_by_fuse_and_then_convert(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIGS, **UNDECLARED, **FURTHER}[family]
    wide = {"hidden_size": 64} if family in GROUPS_OF_64 else {}
    model, adapters, theirs = (tmp_path / name for name in ("model", "adapters", "theirs"))
    save_model_directory(model, {**config, **wide, "torch_dtype": "bfloat16"})
    save_random_lora(adapters, model, LAYERS, dora=not has_experts(config))
    fuse(monkeypatch, model, adapters, theirs)
    packed = convert_to(tmp_path / "packed", theirs, quantize=True, q_bits=4, q_group_size=32)
    given = {"adapter_path": str(adapters), "quantize": "4:32"}
    assert_same(exported(model, tmp_path / "ours", **given), packed)


WAYS = [
    "2:32", "3:64", "4", "5:32", "6:128", "8", "mxfp4", "nvfp4", "mxfp8", "mixed_3_6:32",
    "mixed_2_6",
]  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have columns enough for groups of 128, tied, in float16."""
    config = tiny_config(layers=2, tied=True, hidden_size=128, intermediate_size=256)
    path = tmp_path_factory.mktemp("wide") / "model"
    return save_model_directory(path, {**config, "torch_dtype": "float16"})


def convert_to(to: Path, model: Path, **how: Any) -> Path:
    convert(str(model), str(to), **how)
    return to


def arguments(how: PackingOptions) -> dict[str, Any]:
    group = {"quantize": True, "q_group_size": how.group_size}
    if how.recipe is not None:
        return {**group, "quant_predicate": how.recipe}
    return {**group, "q_bits": how.bits, "q_mode": how.mode}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_quantising_is_that_of_convert(way: str, wide: Path, tmp_path: Path) -> None:
    how = PackingOptions.parse(way)
    theirs = convert_to(tmp_path / "theirs", wide, **arguments(how))
    assert_same(exported(wide, tmp_path / "ours", quantize=way), theirs)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_weights_are_cast_as_by_convert(dtype: str | None, wide: Path, tmp_path: Path) -> None:
    theirs = convert_to(tmp_path / "theirs", wide, dtype=dtype)
    assert_same(exported(wide, tmp_path / "ours", dtype=dtype), theirs)


@pytest.fixture(scope="module")
def mixed(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same quantised, with bits of its own for some modules."""
    path = tmp_path_factory.mktemp("mixed") / "model"
    return exported(wide, path, quantize="mixed_3_6")


def test_a_quantised_model_becomes_plain_or_is_packed_otherwise(
    mixed: Path, tmp_path: Path
) -> None:
    plain = convert_to(tmp_path / "plain", mixed, dequantize=True)
    assert_same(exported(mixed, tmp_path / "ours", dequantize=True), plain)
    again = convert_to(tmp_path / "again", plain, quantize=True, q_bits=8, q_group_size=32)
    both = exported(mixed, tmp_path / "both", dequantize=True, quantize="8:32")
    assert_same(both, again)
    assert_same(exported(mixed, tmp_path / "same"), convert_to(tmp_path / "same-theirs", mixed))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_a_quantised_model_are_fused_as_by_fuse_and_then_convert(
    kind: str, wide: Path, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters, base = tmp_path / "adapters", mixed
    if kind == "dora":  # mlx-lm miscounts the columns of 3 and 6 bits
        base = exported(wide, tmp_path / "base", quantize="4:64")
    save_random_lora(adapters, base, 2, dora=kind == "dora")
    fuse(monkeypatch, base, adapters, tmp_path / "fused")
    fuse(monkeypatch, base, adapters, tmp_path / "plain", "--dequantize")
    packed = convert_to(
        tmp_path / "packed", tmp_path / "plain", quantize=True, q_bits=4, q_group_size=32
    )
    given = {"adapter_path": str(adapters)}
    assert_same(exported(base, tmp_path / "1", **given), tmp_path / "fused")
    assert_same(exported(base, tmp_path / "2", **given, dequantize=True), tmp_path / "plain")
    ours = exported(base, tmp_path / "3", **given, dequantize=True, quantize="4:32")
    assert_same(ours, packed)


def test_a_fully_trained_file_beside_its_adapter_config_is_taken_in(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"model.layers.1.mlp.up_proj.weight": mx.ones((256, 128))}
    adapters = save_lora(tmp_path / "adapters", weights, 1, {}, "full")
    fuse(monkeypatch, wide, adapters, tmp_path / "theirs")
    assert_same(exported(wide, tmp_path / "ours", adapter_path=str(adapters)), tmp_path / "theirs")


def test_experts_that_hugging_face_stores_one_by_one_are_stacked_as_by_convert(
    tmp_path: Path,
) -> None:
    published = tmp_path / "published"
    save_experts_one_by_one(published, {**CONFIGS["mixtral"], "torch_dtype": "bfloat16"})
    theirs = convert_to(tmp_path / "theirs", published, quantize=True, q_bits=4, q_group_size=32)
    assert_same(exported(published, tmp_path / "ours", quantize="4:32"), theirs)


def test_files_are_divided_as_by_mlx_lm() -> None:
    sizes = [3, 1, 2, 6, 7, 1, 4, 1, 5, 12, 1, 1]  # GiB
    specs = [TensorSpec(f"t{i}", (size << 30,), "U8") for i, size in enumerate(sizes)]
    theirs = make_shards({spec.name: SimpleNamespace(nbytes=spec.nbytes) for spec in specs}, 5)
    assert [[spec.name for spec in each] for each in divide(specs, 5 << 30)] == [*map(list, theirs)]
