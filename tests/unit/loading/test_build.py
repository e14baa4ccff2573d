"""From a model directory to slices: lazily, with mlx-lm's initial weights, and reading its own."""

import gc
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.build import (
    build_model,
    count_parameters,
    cut,
    trained_layers,
    trained_shapes,
)
from shardmlx.models.runtime.tuner import linear_to_lora_layers
from testbed.family_configs import CONFIGS
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.models_and_batches import load_arrays
from tests.helpers.saved_adapters import save_random_lora

LAYERS = 4
CUTS = [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]]
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 4 layers with an untied head, 1.6 MB."""
    config = tiny_config(layers=LAYERS, hidden_size=96, vocab_size=500)
    return save_model_directory(tmp_path_factory.mktemp("models") / "llama", config)


@pytest.fixture(scope="module")
def quantised_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied qwen2 of 4 layers, in 4 bits with groups of 32."""
    path = tmp_path_factory.mktemp("models") / "qwen2"
    config = tiny_config("qwen2", layers=LAYERS, tied=True, hidden_size=64)
    config["quantization"] = {"group_size": 32, "bits": 4}
    save_model_directory(path, config)
    weights = load_arrays(path / "model.safetensors")
    halves = {
        name: array.astype(mx.float16) if array.dtype == mx.float32 else array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(path / "model.safetensors"), halves)
    return path


def config_for(path: Path, **options: Any) -> TrainConfig:
    options = {"num_layers": 3, "lora_parameters": LORA, **options}
    return TrainConfig.from_flat(model=str(path), **options)


def build(path: Path, **options: Any) -> nn.Module:
    config = config_for(path, **options)
    adapters = config.resume_adapter_file if config.tune.train else config.adapter_path
    model, _ = build_model(path, config.tune, config.seed, adapters)
    return model


def error_of(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        build(path, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


def growth(act: Callable[[], object], measure: Callable[[], int]) -> int:
    gc.collect()
    mx.clear_cache()  # MLX would reuse buffers that are larger than what they hold
    before = measure()
    act()
    mx.synchronize()
    return measure() - before


def bytes_read() -> int:
    """By this process so far, from files; Linux only."""
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text().splitlines() if ": " in line
    )
    return int(fields["rchar"])


# Only what is needed is read.


def test_building_and_cutting_read_no_weight(model_dir: Path) -> None:
    kept: list[object] = []
    grown = growth(lambda: kept.append(cut(build(model_dir), CUTS[2])), mx.get_active_memory)
    assert grown < 2000  # keys of random numbers


@pytest.mark.parametrize("layers", [(0, 1), (1, 3), (3, 4)])
def test_a_slice_holds_its_own_tensors_in_memory_and_no_others(
    model_dir: Path, layers: tuple[int, int]
) -> None:
    model = build(model_dir, fine_tune_type="full")
    (part,) = cut(model, [layers])
    grown = growth(part.load, mx.get_active_memory)
    assert part.nbytes <= grown < part.nbytes + 10_000
    assert grown < sum(array.nbytes for _, array in tree_flatten(model.parameters())) / 1.5


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not count bytes read")
def test_a_slice_reads_its_own_bytes_from_disk_and_no_others(model_dir: Path) -> None:
    (part,) = cut(build(model_dir, fine_tune_type="full"), [(1, 3)])
    grown = growth(part.load, bytes_read)
    assert part.nbytes <= grown < part.nbytes + 10_000


def test_a_tensor_that_is_cast_leaves_nothing_of_its_old_type(model_dir: Path) -> None:
    (part,) = cut(build(model_dir, fine_tune_type="full", dtype="bfloat16"), [(1, 3)])
    assert part.dtype == mx.bfloat16
    grown = growth(part.load, mx.get_active_memory)
    # A tensor may get the buffer that another one left when it was cast, and that is larger.
    assert part.nbytes <= grown < 1.25 * part.nbytes


def test_float32_copies_begin_with_what_is_stored_of_trained_weights(model_dir: Path) -> None:
    def exact(**options: Any) -> dict[str, mx.array]:
        config = config_for(model_dir, num_layers=1, fine_tune_type="full", **options)
        adapters = config.resume_adapter_file
        return build_model(model_dir, config.tune, config.seed, adapters)[1]

    stored = load_arrays(model_dir / "model.safetensors")
    found = exact(dtype="bfloat16", master_weights=True)
    assert set(found) == {name for name in stored if ".layers.3." in name}
    for name, array in found.items():
        assert mx.array_equal(array, stored[name])
    assert not exact(master_weights=True)
    assert not exact(dtype="bfloat16")
    # What the adapters hold is trained already.
    file = str(model_dir / "model.safetensors")
    assert not exact(dtype="bfloat16", master_weights=True, resume_adapter_file=file)


# What is trained, and where it starts from.


@pytest.mark.parametrize(
    ("family", "fine_tune_type", "seed", "ranges"),
    [
        *(("llama", "lora", 7, ranges) for ranges in CUTS),
        ("llama", "dora", 0, CUTS[1]),
        ("quantised qwen2", "lora", 0, CUTS[2]),
        ("quantised qwen2", "dora", 7, CUTS[0]),
    ],
    ids=str,
)
def test_adapters_start_as_those_of_mlx_lm_whatever_the_cut(
    model_dir: Path,
    quantised_dir: Path,
    family: str,
    fine_tune_type: str,
    seed: int,
    ranges: list[tuple[int, int]],
) -> None:
    path = model_dir if family == "llama" else quantised_dir
    theirs, _ = load_model(path)
    mx.random.seed(seed)
    theirs.freeze()
    linear_to_lora_layers(theirs, 3, LORA, use_dora=fine_tune_type == "dora")
    expected = dict(tree_flatten(theirs.trainable_parameters()))

    ours: dict[str, mx.array] = {}
    for part in cut(build(path, fine_tune_type=fine_tune_type, seed=seed), ranges):
        part.load()
        ours |= {name: part[name] for name in part.trainable}

    assert ours.keys() == expected.keys()
    assert all(ours[name].dtype == expected[name].dtype for name in expected)
    assert all(mx.array_equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("num_layers", "trained"), [(1, {3}), (3, {1, 2, 3}), (-1, {0, 1, 2, 3})])
@pytest.mark.parametrize("fine_tune_type", ["lora", "full"])
def test_the_last_layers_are_trained(
    model_dir: Path, fine_tune_type: str, num_layers: int, trained: set[int]
) -> None:
    model = build(model_dir, fine_tune_type=fine_tune_type, num_layers=num_layers)
    names = [name.split(".") for name, _ in tree_flatten(model.trainable_parameters())]
    assert {int(name[2]) for name in names} == trained
    assert all(name[:2] == ["model", "layers"] for name in names)


@pytest.mark.parametrize("train", [True, False])
def test_modules_know_whether_they_are_trained(model_dir: Path, train: bool) -> None:
    """Layers of mlx-lm choose by it between functions with gradients and faster ones."""
    model = build(model_dir, train=train, test=not train, adapter_path="")
    assert {module.training for module in model.modules()} == {train}


@pytest.mark.parametrize("num_layers", [1, -1])
def test_unfreezing_all_trains_embedding_norm_and_head_too(
    model_dir: Path, num_layers: int
) -> None:
    layers = dict(
        tree_flatten(
            build(model_dir, fine_tune_type="full", num_layers=num_layers).trainable_parameters()
        )
    )
    model = build(model_dir, fine_tune_type="full", num_layers=num_layers, unfreeze_all=True)
    trained = dict(tree_flatten(model.trainable_parameters()))
    ends = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert trained.keys() == layers.keys() | ends


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"num_layers": 2}, (False, False, True, True)),
        ({"fine_tune_type": "full", "num_layers": 1}, (False, False, False, True)),
        (
            {"fine_tune_type": "full", "num_layers": 1, "unfreeze_all": True},
            (True, False, False, True),
        ),
    ],
    ids=str,
)
def test_a_layer_is_trained_where_a_slice_of_it_alone_is(
    options: dict[str, Any], trained: tuple[bool, ...], tied: bool, tmp_path: Path
) -> None:
    """The first with the embedding, the last with the head, or with the embedding again."""
    path = save_model_directory(tmp_path / "model", tiny_config(layers=LAYERS, tied=tied))
    model = build(path, **options)
    parts = cut(model, [(layer, layer + 1) for layer in range(LAYERS)])
    assert trained_layers(model) == tuple(bool(part.trainable) for part in parts) == trained
    shapes = {name: part[name].shape for part in parts for name in part.trainable}
    assert trained_shapes(model) == shapes


def test_a_type_that_is_asked_for_is_that_of_weights_but_not_of_adapters(
    quantised_dir: Path,
) -> None:
    (part,) = cut(build(quantised_dir, dtype="float32"), [(1, 4)])
    projection = "model.layers.2.mlp.up_proj"
    assert part.dtype == mx.float32
    assert part[f"{projection}.linear.weight"].dtype == mx.uint32
    assert part[f"{projection}.linear.scales"].dtype == mx.float32
    assert part[f"{projection}.lora_a"].dtype == mx.float32
    (as_stored,) = cut(build(quantised_dir), [(1, 4)])
    assert as_stored.dtype == as_stored[f"{projection}.linear.scales"].dtype == mx.float16


def test_parameters_are_counted_as_mlx_lm_counts_them(quantised_dir: Path) -> None:
    """Quantised weights by what they stand for; the total is that without adapters."""
    total, trained = count_parameters(
        build(quantised_dir, lora_parameters={**LORA, "keys": ["mlp.up_proj"]})
    )
    assert trained == 3 * 4 * (64 + 64)
    projections = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 64
    biases = 64 + 2 * 32
    assert total == 97 * 64 + 4 * (projections + biases + 2 * 64) + 64


def test_a_test_alone_takes_the_adapters_and_trains_nothing(
    model_dir: Path, tmp_path: Path
) -> None:
    path = save_random_lora(tmp_path / "adapters", model_dir, 2)
    stored = load_arrays(path / "adapters.safetensors")

    (part,) = cut(build(model_dir, test=True, adapter_path=str(path)), [(2, 4)])

    assert part.trainable == ()
    part.load()
    assert all(mx.array_equal(part[name], stored[name]) for name in stored)


# Errors, each in one line.


def cut_short(content: bytes) -> bytes:
    return content[:-1000]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("config.json", None, "config.json"),
        ("config.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs"),
        ("config.json", b"\xef\xbb\xbf{}", "config.json"),
        ("config.json", b"", "config.json"),
        ("config.json", b"\xff\xfe", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("generation_config.json", b"[1]", "generation_config.json"),
        ("generation_config.json", b"3", "generation_config.json"),
        ("model.safetensors", None, "model*.safetensors"),
        ("model.safetensors", cut_short, "1000 bytes are missing"),
        ("config.json", lambda text: text.replace(b": 64", b": 65"), "Expected shape (65, 96)"),
    ],
)
def test_a_broken_file_of_a_model_is_named(
    name: str, content: Any, named: str, model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content(file.read_bytes()) if callable(content) else content)
    message = error_of(tmp_path)
    assert str(tmp_path) in message
    assert named in message


@pytest.mark.parametrize("fine_tune_type", ["lora", "dora", "full"])
def test_more_layers_to_train_than_there_are(model_dir: Path, fine_tune_type: str) -> None:
    assert "--num-layers 5" in error_of(model_dir, num_layers=5, fine_tune_type=fine_tune_type)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU computes with them")
def test_adapters_and_types_of_experts_that_there_are_not_are_refused(tmp_path: Path) -> None:
    save_model_directory(tmp_path, tiny_config("mixtral", layers=2))
    assert "DoRA" in error_of(tmp_path, fine_tune_type="dora", num_layers=1)
    message = error_of(tmp_path, fine_tune_type="full", num_layers=1, dtype="bfloat16")
    assert "--dtype float32" in message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "no such file"),
        (b"cut off" * 9, ""),
        ({"transformer.h.0.weight": (3,)}, "no weight of this model"),
        ({"model.layers.3.self_attn.q_proj.lora_a": (96, 8)}, "q_proj.lora_a"),
    ],
)
def test_a_file_to_go_on_from_that_does_not_fit_is_named(
    content: Any, named: str, model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "adapters.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        arrays = {name: mx.ones(shape) for name, shape in content.items()}
        mx.save_safetensors(str(file), arrays)
    message = error_of(model_dir, resume_adapter_file=str(file))
    assert f"--resume-adapter-file {file}" in message
    assert named in message


def test_adapters_to_test_of_another_model_or_a_file_are_refused(
    model_dir: Path, quantised_dir: Path, tmp_path: Path
) -> None:
    path = save_random_lora(tmp_path / "adapters", quantised_dir, 2)
    message = error_of(model_dir, test=True, adapter_path=str(path))
    assert "has the shape (64, 4), in this model (96, 4)" in message
    file = f"{path}/adapters.safetensors"
    assert f"--adapter-path {file}" in error_of(model_dir, test=True, adapter_path=file)
    whole = error_of(model_dir, test=True, adapter_path=str(quantised_dir))
    assert "name a whole model as --model" in whole


@pytest.mark.parametrize("family", ["llama", "gemma", "phi3", "cohere", "olmo2"])
def test_a_spare_lm_head_is_passed_over_by_every_family(family: str, tmp_path: Path) -> None:
    config = {**CONFIGS[family], "tie_word_embeddings": True}
    weights = load_arrays(save_model_directory(tmp_path, config) / "model.safetensors")
    mx.eval(weights)
    spare = {"lm_head.weight": mx.ones((config["vocab_size"], config["hidden_size"]))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights | spare)
    assert "lm_head.weight" not in dict(tree_flatten(build(tmp_path).parameters()))
    if family == "gemma":
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        assert "lm_head.weight" in error_of(tmp_path)
