"""The model and the data of a training run: the first part of its options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmlx.config.checks import check_hf_dataset
from shardmlx.config.common_options import (
    model_option,
    revision_option,
    weight_cache_option,
    weights_option,
)
from shardmlx.config.options import check_options, option, with_home

_DATA = "model and data"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The model to train, and the data to train it on. Raises ``OptionError``, a ``UserError``."""

    model: str = model_option("Qwen/Qwen3-0.6b", _DATA)
    revision: str | None = revision_option(_DATA)
    data: str = option(
        "mlx-community/WikiSQL",
        "directory with {train,valid,test}.jsonl, .csv or .parquet, or Hugging Face data set",
        metavar="DIR",
        group=_DATA,
    )
    mask_prompt: bool = option(False, "leave the prompt out of the loss", group=_DATA)
    max_seq_length: int = option(
        2048, "longest sequence; longer ones are cut", metavar="TOKENS", minimum=2, group=_DATA
    )
    long_sequences: str = option(
        "cut",
        "what to do with sequences longer than --max-seq-length",
        choices=("cut", "error"),
        flag=False,
    )
    weights: str = weights_option(_DATA)
    weight_cache: str | None = weight_cache_option(_DATA)
    trust_remote_code: bool = option(
        False, "run code that comes with model or tokenizer", group=_DATA
    )
    hf_dataset: Mapping[str, Any] | Sequence[Any] | None = option(
        None, "Hugging Face data sets with their splits and features", flag=False
    )
    prompt_feature: str = option("prompt", "key of the prompt in the data", flag=False)
    completion_feature: str = option("completion", "key of the completion", flag=False)
    chat_feature: str = option("messages", "key of the chat messages", flag=False)
    text_feature: str = option("text", "key of plain text", flag=False)

    def __post_init__(self) -> None:
        check_options(self)
        if self.hf_dataset is not None:
            for each in check_hf_dataset(self.hf_dataset):
                each["path"] = with_home("hf_dataset", each["path"])
