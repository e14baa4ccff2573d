"""The tokenizer that comes with a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from shardmlx.errors import UserError, one_line


def read_tokenizer(model_path: Path, trust_remote_code: bool, eos: Any) -> TokenizerWrapper:
    """Read the model's tokenizer, as mlx-lm sets it up.

    ``eos`` is config.json's eos_token_id: a number, a list of them, or None. Raises ``UserError``.
    """
    try:
        return load_tokenizer(
            model_path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=eos,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{model_path} holds no tokenizer that transformers can read: {one_line(error)}"
        ) from None
