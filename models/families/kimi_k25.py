"""Kimi K2.5: a text model beside a vision tower, which mlx-lm ignores."""

from __future__ import annotations

from shardmlx.models.families.deepseek_v3 import layers
from shardmlx.models.family import Family

FAMILY = Family(
    layers=layers,
    dropped=r"vision_tower|vision_model|mm_projector|multi_modal_projector",
    text="text_config",
    text_default="deepseek_v3",
    prefix="language_model.",
)
