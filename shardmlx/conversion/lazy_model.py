"""Build the finished model with mlx-lm's own code, lazily, without computing anything.

Every weight is a lazy array: of bytes in a file, perhaps stacked, cast, fused with its adapters and
quantised. Evaluating one reads only its own bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.convert import MODEL_CONVERSION_DTYPES, mixed_quant_predicate_builder
from mlx_lm.utils import (
    compute_bits_per_weight,
    dequantize_model,
    get_total_parameters,
    quantize_model,
)

from shardmlx.compat import watch_loads
from shardmlx.config.export import ExportOptions, PackingOptions
from shardmlx.conversion.experts import (
    Experts,
    Stored,
    by_tensor,
    find_experts,
    part_name,
    stored_arrays,
)
from shardmlx.conversion.sources import Trained
from shardmlx.errors import UserError, naming, refusing
from shardmlx.loading.adapters import add_adapters
from shardmlx.loading.build import load_lazily
from shardmlx.modelfiles.model_files import check_model_files
from shardmlx.modelfiles.safetensors_header import read_header


@dataclass(frozen=True, slots=True)
class LazyModel:
    """A model that is not computed yet. ``weights`` are in mlx-lm's order, ``read`` are the arrays
    of its files. Names lead to ``stored`` weights, final in a file, and to ``experts``."""

    weights: dict[str, mx.array]
    read: dict[str, mx.array]
    stored: dict[str, Stored]
    experts: dict[str, Experts]
    config: dict[str, Any]
    parameters: int
    bits_per_weight: float
    keeps_vision: bool

    def computed(self) -> Iterator[tuple[str, mx.array]]:
        """Yield lazy arrays with the names of their results: a weight or an expert."""
        for name, array in self.weights.items():
            if name not in self.experts:
                yield name, array
        for experts in {each.path: each for each in self.experts.values()}.values():
            for number in range(experts.count):
                for leaf in experts.leaves(number):
                    yield part_name(experts.path, number), leaf


def build_lazily(
    path: Path, trained: Trained | None, options: ExportOptions, *, has_files: bool = True
) -> LazyModel:
    """Build a model as ``mlx_lm.fuse`` and ``mlx_lm.convert`` do, or raise ``UserError``."""
    with redirect_stdout(io.StringIO()), watch_loads() as loaded:
        model, config, passed_over = load_lazily(path)
    if passed_over:
        raise UserError(
            f"config.json: mlx-lm's code of {config['model_type']} passes over rope_parameters of "
            f"type {', '.join(passed_over)}: what is exported would be computed otherwise there",
            "use the model with shardmlx, which does not",
        )
    _check_floats(path, loaded.read, model)
    if trained is not None:
        with naming(f"--adapter-path {trained.name} holds nothing for this model"):
            add_adapters(model, trained.config, trained.files)
    stored = stored_arrays(path, loaded.read) if has_files else {}
    finish = partial(
        _finish,
        options=options,
        trained=trained,
        dtype=_dtype(config, options.dtype),
        is_cast=getattr(model, "cast_predicate", lambda _: True),
    )
    experts = find_experts(model, loaded.stacks, stored, finish)
    finish(model, lambda name: name)
    if options.dequantize:
        config.pop("quantization", None)
        config.pop("quantization_config", None)
    if options.packing is not None:
        model, config = _quantise(model, config, options.packing)
    weights = dict(tree_flatten(model.parameters()))
    return LazyModel(
        weights=weights,
        read=dict(loaded.read),
        stored={name: stored[id(each)] for name, each in weights.items() if id(each) in stored},
        experts=by_tensor(experts, model, weights),
        config=config,
        parameters=get_total_parameters(model),
        bits_per_weight=compute_bits_per_weight(model),
        keeps_vision="vision_tower" in getattr(model, "model", {}),
    )


def _finish(
    model: nn.Module,
    name_of: Callable[[str], str],
    *,
    options: ExportOptions,
    trained: Trained | None,
    dtype: str | None,
    is_cast: Callable[[str], bool],
) -> None:
    """Do all but quantise; ``name_of`` returns the name of a parameter in the whole model."""
    cast = partial(_cast, model, dtype, lambda name: is_cast(name_of(name)))
    if trained is not None:
        with redirect_stdout(io.StringIO()), refusing(f"mlx-lm cannot fuse {trained.name}"):
            _fuse(model, options.dequantize)
    else:
        cast()
    if options.dequantize:
        dequantize_model(model)
    if options.quantize is not None or options.dtype is not None:
        cast()


def _cast(model: nn.Module, dtype: str | None, is_cast: Callable[[str], bool]) -> None:
    """Cast weights as ``mlx_lm.convert``; weights of that type stay the same arrays."""
    if dtype is None:
        return
    cast_one = partial(_cast_one, getattr(mx, dtype), is_cast)
    model.update(tree_map_with_path(cast_one, model.parameters()))


def _cast_one(to: mx.Dtype, is_cast: Callable[[str], bool], name: str, array: mx.array) -> mx.array:
    floats = mx.issubdtype(array.dtype, mx.floating) and array.dtype != to
    return array.astype(to) if floats and is_cast(name) else array


def _check_floats(path: Path, read: Mapping[str, mx.array], model: nn.Module) -> None:
    """Refuse 8-bit floats that mlx-lm takes for whole numbers: not every family unpacks them."""
    names = {id(array): name for name, array in read.items() if array.dtype == mx.uint8}
    for weight, array in tree_flatten(model.parameters()):
        if id(array) in names and weight.endswith(".weight"):
            name = names[id(array)]
            info = read_header(check_model_files(path)[name]).tensors[name]
            if info.dtype.startswith("F"):
                raise UserError(
                    f"{path}: {name} is in {info.dtype}, which mlx-lm does not read for this type "
                    "of model",
                    "take the model in 16 bits",
                )


def _fuse(model: nn.Module, dequantize: bool) -> None:
    """Replace layers with adapters by single ones, as ``mlx_lm.fuse``."""
    fused = [
        (name, module.fuse(dequantize=dequantize))
        for name, module in model.named_modules()
        if hasattr(module, "fuse")
    ]
    model.update_modules(tree_unflatten(fused))
    for name, _ in tree_flatten(model.parameters()):
        if name.rpartition(".")[2] in ("lora_a", "lora_b"):
            raise UserError(
                f"mlx-lm cannot fuse {name}", "serve the model with its adapters beside it"
            )


def _dtype(config: Mapping[str, Any], asked: str | None) -> str | None:
    """Return the type of weights as ``mlx_lm.convert``: the requested one, or config.json's."""
    name: Any = asked or config.get("torch_dtype")
    if name is None and (text_config := config.get("text_config")):
        name = text_config.get("dtype")
    return name if name in MODEL_CONVERSION_DTYPES else None


def _quantise(
    model: nn.Module, config: dict[str, Any], how: PackingOptions
) -> tuple[nn.Module, dict[str, Any]]:
    """Quantise as ``mlx_lm.convert``: quantised weights stay as they are."""
    predicate = None
    names = {name for name, _ in tree_flatten(model.parameters())}
    what = f"--quantize: mlx-lm cannot quantise this model {how}"
    with redirect_stdout(io.StringIO()), refusing(what):
        if how.recipe is not None:
            predicate = mixed_quant_predicate_builder(how.recipe, model, how.group_size)
        quantised, config = quantize_model(
            model, config, how.group_size, how.bits, mode=how.mode, quant_predicate=predicate
        )
    if {name for name, _ in tree_flatten(quantised.parameters())} == names:
        raise UserError(
            "--quantize finds nothing to quantise: this model is quantised already, or its layers "
            f"have no multiple of {how.group_size} columns",
            "make plain weights first, with --dequantize too, or choose a smaller group",
        )
    return quantised, config
