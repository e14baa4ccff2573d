"""Gemma 3: a text model beside a vision tower, which mlx-lm ignores."""

from __future__ import annotations

from shardmlx.models.families.gemma3_text import layers
from shardmlx.models.family import Family

FAMILY = Family(
    layers=layers,
    defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208},
    dropped=r"^vision_tower\.|^multi_modal_projector\.",
    chooses_caches=True,
    text="text_config",
    text_default="gemma3_text",
    text_takes=("vocab_size",),
    prefix="language_model.",
)
