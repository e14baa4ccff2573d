"""The tokenizer that comes with a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from shardmlx.errors import UserError, one_line


def read_tokenizer(
    model_path: Path, trust_remote_code: bool, config: Mapping[str, Any]
) -> TokenizerWrapper:
    """Read the model's tokenizer, with ``ends_of`` beside its own end. Raises ``UserError``."""
    try:
        return load_tokenizer(
            model_path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=ends_of(model_path, config) or None,
        )
    except Exception as error:  # transformers checks config.json too, with errors of its own
        raise UserError(
            f"{model_path} holds no tokenizer that transformers can read: {one_line(error)}"
        ) from None


def ends_of(model_path: Path, config: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text; an unreadable file is ignored, as in mlx-lm."""
    try:
        generation = json.loads((model_path / "generation_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        generation = None
    ends: set[int] = set()
    for each in (config, generation):
        said = each.get("eos_token_id") if isinstance(each, Mapping) else None
        said = said if isinstance(said, list) else [said]
        ends.update(end for end in said if type(end) is int and end >= 0)
    return sorted(ends)
