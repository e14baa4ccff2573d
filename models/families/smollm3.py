"""SmolLM3: Llama, of which some layers have no rotary embedding."""

from __future__ import annotations

from shardmlx.models.families.llama import layers
from shardmlx.models.family import Family

FAMILY = Family(layers=layers, dropped=r"self_attn\.rotary_emb\.inv_freq")
