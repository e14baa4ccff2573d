"""The data of a training run, as options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmlx.config.options import Spec, in_group, option, same_as
from shardmlx.config.specs import BatchOptions, FineTune

LOSS_ON = ALL, LAST, ASSISTANT = ("all", "last", "assistant")
"""The messages of a conversation that count in the loss."""

_data = in_group("data")
_training = in_group("training, as in mlx_lm.lora")


@dataclass(frozen=True, kw_only=True)
class FeatureKeys(Spec):
    """The keys of rows that hold the text to learn."""

    prompt_feature: str = option("prompt", "key of the prompt in the data", flag=False)
    completion_feature: str = option("completion", "key of the completion", flag=False)
    chat_feature: str = option("messages", "key of the chat messages", flag=False)
    chosen_feature: str = option("chosen", "key of the preferred answer", flag=False)
    rejected_feature: str = option("rejected", "key of the other answer", flag=False)
    label_feature: str = option("label", "key that says if kto wants the completion", flag=False)
    text_feature: str = option("text", "key of plain text", flag=False)


@dataclass(frozen=True, kw_only=True)
class DataOptions(FeatureKeys):
    """The data sets that a run needs, and how their rows become sequences."""

    train: bool = same_as(FineTune, "train")
    test: bool = _training(False, "evaluate on the test set: alone, or after --train")
    data: str = _data(
        "mlx-community/WikiSQL",
        "directory with {train,valid,test}.jsonl, .csv or .parquet, or Hugging Face data set",
        metavar="DIR",
    )
    hf_dataset: Mapping[str, Any] | Sequence[Any] | None = option(
        None, "Hugging Face data sets with their splits and features", flag=False
    )
    objective: str = same_as(BatchOptions, "objective")
    batch_size: int = same_as(BatchOptions, "batch_size")
    max_seq_length: int = same_as(BatchOptions, "max_seq_length")
    mask_prompt: bool = _data(False, "the same as --loss-on last")
    loss_on: str | None = _data(
        None,
        "messages that count in the loss: all, the last, or all of the assistant",
        choices=LOSS_ON,
        unset="all",
    )
    show_data: int | None = _data(
        None,
        "print so many rows of the training set, marked where they count in the loss; then end",
        metavar="ROWS",
        minimum=1,
    )
    trust_remote_code: bool = _data(False, "run code that comes with model or tokenizer")
