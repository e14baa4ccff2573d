"""Rules by which layers differ: windows of attention, and experts. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any

from shardmlx.errors import UserError
from shardmlx.models.config_reader import Config
from shardmlx.models.rope_parameters import FULL, WINDOWED

Windows = Sequence[int | None]
"""The number of tokens that attention sees, for each layer; None for all before."""


def no_windows(config: Config) -> Windows:
    return _windows(config, [FULL])


def windows_by_type(*otherwise: str) -> Callable[[Config], Windows]:
    """Return the rule of ``layer_types``, or of repeated types; mlx-lm ignores a bare window."""

    def windows(config: Config) -> Windows:
        return _windows(config, config.each_layer("layer_types") or otherwise or [FULL])

    return windows


def windows_by_period(config: Config) -> Windows:
    """Return windows of which the last of each ``sliding_window_pattern`` layers has none."""
    period = config.count("sliding_window_pattern")
    found = _windows(config, [*[WINDOWED] * (period - 1), FULL])
    kinds = config.each_layer("layer_types") or []
    if any((kind == FULL) != (each is None) for kind, each in zip(kinds, found, strict=False)):
        raise UserError(
            f"config.json: layer_types is {kinds}, and sliding_window_pattern {period}",
            f"mlx-lm needs every nth to be {FULL}, and n as sliding_window_pattern",
        )
    return found


def _windows(config: Config, kinds: Sequence[Any]) -> Windows:
    """Return the windows of layers of these kinds, which repeat."""
    for kind in kinds:
        if kind not in (FULL, WINDOWED):
            raise UserError(
                f"config.json: layer_types names {kind!r}",
                f"only {FULL} and {WINDOWED} are supported",
            )
    every = [*islice(cycle(kinds), config.count("num_hidden_layers"))]
    if FULL not in every:
        raise UserError(f"config.json: no layer is of type {FULL}", "mlx-lm needs one")
    window = config.count("sliding_window") if WINDOWED in every else None
    return [window if kind == WINDOWED else None for kind in every]


def all_layers(config: Config) -> Sequence[bool]:
    return [True] * config.count("num_hidden_layers")


def routed_layers(config: Config) -> Sequence[bool]:
    """Return true for every ``moe_layer_freq``-th layer from ``first_k_dense_replace`` on, if there
    are routed experts."""
    has_experts = config.get("n_routed_experts") is not None
    every = config.count("moe_layer_freq", 1)
    first, count = config.number("first_k_dense_replace"), config.count("num_hidden_layers")
    return [has_experts and i >= first and i % every == 0 for i in range(count)]


def stepped_layers(config: Config) -> Sequence[bool]:
    """Return true for every ``decoder_sparse_step``-th layer that is not ``mlp_only``."""
    step, plain = config.count("decoder_sparse_step"), config.get("mlp_only_layers", ())
    has_experts = config.number("num_experts") > 0
    count = config.count("num_hidden_layers")
    return [has_experts and i not in plain and (i + 1) % step == 0 for i in range(count)]
