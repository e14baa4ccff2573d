"""The model and the data of a training run: the first part of its options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmlx.config import common_options as common
from shardmlx.config.checks import check_hf_dataset
from shardmlx.config.options import check_options, in_group, option, with_home

_DATA = "model and data"


_data = in_group(_DATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The model to train, and the data to train it on. Raises ``OptionError``, a ``UserError``."""

    model: str = common.model("Qwen/Qwen3-0.6b", group=_DATA)
    revision: str | None = common.revision(group=_DATA)
    data: str = _data(
        "mlx-community/WikiSQL",
        "directory with {train,valid,test}.jsonl, .csv or .parquet, or Hugging Face data set",
        metavar="DIR",
    )
    mask_prompt: bool = _data(False, "leave the prompt out of the loss")
    max_seq_length: int = _data(
        2048, "longest sequence; longer ones are cut", metavar="TOKENS", minimum=2
    )
    long_sequences: str = option(
        "cut",
        "what to do with sequences longer than --max-seq-length",
        choices=("cut", "error"),
        flag=False,
    )
    weights: str = common.weights(group=_DATA)
    weight_cache: str | None = common.weight_cache(group=_DATA)
    trust_remote_code: bool = _data(False, "run code that comes with model or tokenizer")
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
