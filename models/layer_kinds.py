"""Rules by which layers differ: windows of attention, and experts. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardmlx.errors import UserError
from shardmlx.models.config_reader import Config
from shardmlx.models.rope_parameters import FULL, WINDOWED

Windows = Sequence[int | None]
"""The number of tokens that attention sees, for each layer; None for all before."""

# Windows


def no_windows(config: Config) -> Windows:
    """Return no window for each layer."""
    return [None] * config.count("num_hidden_layers")


def windows_by_type(config: Config) -> Windows:
    """Return the windows as ``layer_types`` says; mlx-lm ignores a bare ``sliding_window``."""
    kinds = config.each_layer("layer_types")
    if kinds is None:
        return no_windows(config)
    for kind in kinds:
        if kind not in (FULL, WINDOWED):
            raise UserError(
                f"config.json: layer_types names {kind!r}",
                f"only {FULL} and {WINDOWED} are supported",
            )
    if FULL not in kinds:
        raise UserError(f"config.json: layer_types has no {FULL}", "mlx-lm needs one")
    if WINDOWED not in kinds:
        return no_windows(config)
    window = config.count("sliding_window")
    return [window if kind == WINDOWED else None for kind in kinds]


def windows_by_type_in_turn(config: Config) -> Windows:
    """Return the windows as ``layer_types`` says, or else of every other layer."""
    pairs = [WINDOWED, FULL] * (config.count("num_hidden_layers") // 2)
    return windows_by_type(
        Config({**config.fields, "layer_types": config.get("layer_types", pairs)})
    )


def windows_by_type_or_fourth(config: Config) -> Windows:
    """Return the windows as ``layer_types`` says, or else of all but each fourth layer."""
    if config.get("layer_types") is not None:
        return windows_by_type(config)
    return windows_by_period(Config({**config.fields, "sliding_window_pattern": 4}))


def windows_by_period(config: Config) -> Windows:
    """Return windows of which the last of each ``sliding_window_pattern`` layers has none."""
    count, period = config.count("num_hidden_layers"), config.count("sliding_window_pattern")
    if period > count:
        raise UserError(
            f"config.json: {count} layers are fewer than the {period} of sliding_window_pattern",
            "mlx-lm needs a layer of each kind",
        )
    window = config.count("sliding_window")
    found = [window if (i + 1) % period else None for i in range(count)]
    kinds = config.each_layer("layer_types") or []
    if any((kind == FULL) != (each is None) for kind, each in zip(kinds, found, strict=False)):
        raise UserError(
            f"config.json: layer_types is {kinds}, and sliding_window_pattern {period}",
            f"mlx-lm needs every nth to be {FULL}, and n as sliding_window_pattern",
        )
    return found


def windows_by_letter(config: Config) -> Windows:
    """Return the windows of layers with an L in ``sliding_window_pattern``, which repeats."""
    pattern = config.get("sliding_window_pattern") or "G"
    window = config.count("sliding_window") if "L" in pattern else None
    count = config.count("num_hidden_layers")
    return [window if pattern[i % len(pattern)] == "L" else None for i in range(count)]


# Layers of experts


def all_layers(config: Config) -> Sequence[bool]:
    """Return true for each layer."""
    return [True] * config.count("num_hidden_layers")


def layers_after_first(config: Config) -> Sequence[bool]:
    """Return true for layers from ``first_k_dense_replace`` on."""
    first = config.number("first_k_dense_replace", 0)
    return [i >= first for i in range(config.count("num_hidden_layers"))]


def routed_layers(config: Config) -> Sequence[bool]:
    """Return true for every ``moe_layer_freq``-th of these, if there are routed experts."""
    has_experts = config.get("n_routed_experts") is not None
    every = config.count("moe_layer_freq", 1)
    later = layers_after_first(config)
    return [has_experts and is_later and i % every == 0 for i, is_later in enumerate(later)]


def stepped_layers(config: Config) -> Sequence[bool]:
    """Return true for every ``decoder_sparse_step``-th layer that ``mlp_only_layers`` does not
    name."""
    step, plain = config.count("decoder_sparse_step"), config.get("mlp_only_layers", ())
    has_experts = config.number("num_experts", 0) > 0
    count = config.count("num_hidden_layers")
    return [has_experts and i not in plain and (i + 1) % step == 0 for i in range(count)]


def named_layers(config: Config) -> Sequence[bool]:
    """Return ``is_moe_layer``."""
    return config.each_layer("is_moe_layer") or []


def layers_between(config: Config) -> Sequence[bool]:
    """Return true for every ``moe_layer_interval``-th layer between two."""
    count, step = config.count("num_hidden_layers"), config.count("moe_layer_interval", 1)
    first = _edge(config, "moe_layer_start_index", 0, min)
    last = _edge(config, "moe_layer_end_index", count, max)
    return [first <= i <= last and (i + 1) % step == 0 for i in range(count)]


def _edge(config: Config, key: str, default: int, choose: Callable[[list[int]], int]) -> int:
    """Return a layer; given one for texts and one for images, the one that ``choose`` takes."""
    value: Any = config.get(key, default)
    return choose(value) if isinstance(value, list) else int(value)
