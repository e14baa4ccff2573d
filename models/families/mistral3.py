"""Mistral 3: a text model beside a vision tower, which mlx-lm ignores."""

from __future__ import annotations

from shardmlx.models.families.llama import layers
from shardmlx.models.family import Family

FAMILY = Family(
    layers=layers,
    tied=False,
    dropped=r"vision_tower|multi_modal_projector",
    text="text_config",
    text_types=("ministral3", "mistral4"),
    text_default="llama",
    prefix="language_model.",
    renames=(
        ("model.language_model.", "language_model.model."),
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
)
