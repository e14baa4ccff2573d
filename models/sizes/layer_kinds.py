"""Rules by which layers differ in the window of their attention. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from shardmlx.errors import UserError
from shardmlx.models.sizes.config_reader import Config
from shardmlx.models.sizes.rope_parameters import FULL, WINDOWED

Windows = Sequence[int | None]
"""The number of tokens that attention sees, for each layer; None for all before."""


def no_windows(config: Config) -> Windows:
    """Return full attention for every layer."""
    return _windows(config, [FULL])


def windows_by_type(config: Config) -> Windows:
    """Return the windows of ``layer_types``; mlx-lm ignores a bare window."""
    return _windows(config, config.each_layer("layer_types") or [FULL])


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
