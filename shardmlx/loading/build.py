"""Build models from their files, lazily: stages read only what they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import get_total_parameters, load_config, load_model

from shardmlx.compat import model_classes
from shardmlx.config.specs import FineTune
from shardmlx.errors import UserError, refusing
from shardmlx.loading.adapters import (
    add_adapters,
    check_keys,
    find_adapters,
    make_adapters,
    resume_from,
)
from shardmlx.modelfiles.model_files import check_model_files, open_model
from shardmlx.modelfiles.published_packing import published_packing
from shardmlx.models.families import ANOTHER, HEADS, is_declared
from shardmlx.models.runtime.draft_head import ONE_LAYER, DraftHead, head_class
from shardmlx.models.runtime.loaded import without_spare_head
from shardmlx.models.runtime.parts import find_parts
from shardmlx.models.runtime.ropes import fit_ropes
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.config_reader import read_config
from shardmlx.models.sizes.rope_parameters import with_rope

_OF_ALL_MODULES = ("bits", "group_size", "mode")
"""Entries of a config.json's ``quantization`` that are of no single module."""


Classes = Callable[[dict[str, Any]], tuple[Any, Any]]
"""Function that returns the classes of a model and of its arguments for a config.json."""


def load_lazily(
    path: Path, classes: Classes | None = None, **changes: Any
) -> tuple[nn.Module, dict[str, Any], list[str]]:
    """Load a model with mlx-lm, without its weights; return also its config.json, with mlx-lm's
    names for transformers' fields, and the fields that mlx-lm would ignore. Other ``classes`` are
    built in place of mlx-lm's, from a config.json with ``changes``. Raises ``UserError``."""
    own = read_config(path)
    packing = published_packing(own)
    file = path / "generation_config.json"
    with refusing(f"{file} cannot be read", "take it away, or copy it again"):
        config = load_config(path)
    filled = with_rope(config) | changes
    remedy = "" if is_declared(own) else ANOTHER
    if packing is not None:
        remedy = f"it is {packing}: take the model in 16 bits"
    with refusing(f"{path}: mlx-lm cannot build this model", remedy):
        model, config = load_model(
            path, lazy=True, model_config=filled, get_model_classes=classes or without_spare_head
        )
    return model, config, fit_ropes(model, filled)


def build_model(
    path: Path, fine_tune: FineTune, seed: int, adapters: str | None
) -> tuple[nn.Module, dict[str, mx.array]]:
    """Build the whole model, lazily, with the trained weights unfrozen. Raises ``UserError``.

    Returns also the stored float32 values where the optimizer keeps float32 copies of 16-bit
    weights. Names and initial LoRA weights for a ``seed`` are mlx-lm's on one machine. ``adapters``
    are a file to start from or, without training, a directory.
    """
    model, stored = _build_whole(path, fine_tune.dtype)
    if not fine_tune.train:
        # Like in mlx-lm, an empty adapter path tests the model as it is.
        if adapters:
            _load_adapters(model, adapters, 'use --adapter-path "" to test')
        model.freeze()
        return model, {}
    mx.random.seed(seed)
    unfreeze(model, fine_tune)
    if adapters is not None:
        resume_from(model, Path(adapters), fine_tune)
    if adapters is not None or not fine_tune.master_weights:
        return model, {}
    exact = {
        name: stored[name]
        for name, array in tree_flatten(model.trainable_parameters())
        if stored[name].dtype == mx.float32 != array.dtype
    }
    return model, exact


def build_to_generate(
    path: Path, *, dtype: str | None, adapter_path: str | None, seed: int | None
) -> nn.Module:
    """Build the whole model lazily, with its adapters; ``seed`` begins MLX's state as in mlx-lm."""
    if seed is not None:
        mx.random.seed(seed)
    model, _ = _build_whole(path, dtype)
    if adapter_path:
        _load_adapters(model, adapter_path, "leave it out to use")
    model.eval()
    return model


def build_draft_head(path: Path, dtype: str | None) -> DraftHead:
    """Build the head that drafts, lazily. Raises ``UserError`` where the files have none."""
    config = read_config(path)
    row = HEADS.get(str(config.get("model_type")))
    names = row and replace(row, prefix=row.prefix.format(config.get("num_hidden_layers")))
    tensors = open_model(str(path)).tensors
    if names is None or f"{names.prefix}{names.projection}.weight" not in tensors:
        raise UserError(
            "--draft mtp: the model's files have no head for further tokens, or of an unknown kind",
            "use --draft lookup, or files that were not quantised",
        )

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        kind, args = model_classes(config)
        return head_class(kind, names), args

    changes = dict(ONE_LAYER)
    if isinstance(quantization := config.get("quantization"), dict):
        # Entries of modules are not of the head's; how these are packed their scales tell.
        packed = {key: each for key, each in quantization.items() if key in _OF_ALL_MODULES}
        changes["quantization"] = packed
    model, _ = _build_whole(path, dtype, classes, **changes)
    model.eval()
    return DraftHead(model, names)


def _build_whole(
    path: Path, dtype: str | None, classes: Classes | None = None, **changes: Any
) -> tuple[nn.Module, dict[str, mx.array]]:
    """Build a model; return it and its parameters as they are stored."""
    check_model_files(path)
    model, _, _ = load_lazily(path, classes, **changes)
    stored = dict(tree_flatten(model.parameters()))
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
    # On the CPU, MLX gathers experts only in float32.
    for module in model.modules() if mx.default_device() == mx.Device(mx.cpu) else ():
        if isinstance(module, SwitchLinear) and module.weight.dtype != mx.float32:
            name = str(module.weight.dtype).rpartition(".")[2]
            raise UserError(
                f"the experts of this model are in {name}, with which MLX cannot compute on a CPU",
                "use --dtype float32",
            )
    return model, stored


def unfreeze(model: nn.Module, fine_tune: FineTune) -> None:
    """Freeze all but the trained weights, and add the adapters. Raises ``UserError``."""
    # Recurrent layers then take functions that have gradients.
    model.train()
    model.freeze()
    layers = model.layers
    if fine_tune.num_layers > len(layers):
        raise UserError(
            f"--num-layers {fine_tune.num_layers}: the model has {len(layers)} layers; "
            "-1 trains all of them"
        )
    if fine_tune.is_full:
        for layer in layers[-max(fine_tune.num_layers, 0) :]:
            layer.unfreeze()
        if fine_tune.unfreeze_all:
            parts = find_parts(model)
            for module in (parts.embedding, *parts.ends.values()):
                module.unfreeze()
        return
    check_keys(model, fine_tune.lora_parameters.get("keys"))
    make_adapters(model, fine_tune.num_layers, fine_tune.lora_parameters, fine_tune.fine_tune_type)


def _load_adapters(model: nn.Module, adapter_path: str, remedy: str) -> None:
    if (path := Path(adapter_path)).is_file():
        raise UserError(f"--adapter-path {path} is a file", f"name its directory, {path.parent}")
    try:
        config, file = find_adapters(Path(adapter_path))
        add_adapters(model, config, [file])
    except UserError as error:
        raise UserError(
            f"--adapter-path {adapter_path} holds no adapters of this model: {error}; "
            f"{remedy} the model without"
        ) from None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the parameters, and the trained ones; quantised weights count as in mlx-lm."""
    trained = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    return get_total_parameters(model), trained


def trained_layers(model: nn.Module) -> tuple[bool, ...]:
    """Return whether each layer, with the embedding or the head beside it, has weights to train."""
    parts = find_parts(model)
    groups = [[layer] for layer in parts.layers]
    groups[0] += [parts.embedding, *parts.before.values()]
    groups[-1] += [*parts.norms.values(), *(parts.heads.values() or [parts.embedding])]
    return tuple(
        any(tree_flatten(each.trainable_parameters()) for each in group) for group in groups
    )


def trained_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all trained weights by their names."""
    trained = tree_flatten(model.trainable_parameters())
    return {name: tuple(array.shape) for name, array in trained}


def cut(model: nn.Module, ranges: Sequence[tuple[int, int]]) -> list[Slice]:
    """Cut the model into slices, one for each range of layers; nothing is read yet."""
    parts = find_parts(model)
    return [Slice(model, start, stop, parts) for start, stop in ranges]
