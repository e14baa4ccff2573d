"""The data of a training run, as options. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmlx.config.objective import SFT
from shardmlx.config.options import in_group, option, section

LOSS_ON = ALL, LAST, ASSISTANT = ("all", "last", "assistant")
"""The messages of a conversation that count in the loss."""

_data = in_group("data")
_training = in_group("training, as in mlx_lm.lora")


@dataclass(frozen=True, kw_only=True)
class FeatureKeys:
    """The keys of rows that hold the text to learn."""

    prompt_feature: str = option("prompt", "key of the prompt in the data", flag=False)
    completion_feature: str = option("completion", "key of the completion", flag=False)
    chat_feature: str = option("messages", "key of the chat messages", flag=False)
    chosen_feature: str = option("chosen", "key of the preferred answer", flag=False)
    rejected_feature: str = option("rejected", "key of the other answer", flag=False)
    label_feature: str = option("label", "key that says if kto wants the completion", flag=False)
    text_feature: str = option("text", "key of plain text", flag=False)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data sets of a run, and how their rows become sequences."""

    features: FeatureKeys = section(FeatureKeys)
    test: bool = _training(False, "evaluate on the test set: alone, or after --train")
    data: str = _data(
        "mlx-community/WikiSQL",
        "directory with {train,valid,test}.jsonl, .csv or .parquet, or Hugging Face data set",
        metavar="DIR",
    )
    hf_dataset: Mapping[str, Any] | Sequence[Any] | None = option(
        None, "Hugging Face data sets with their splits and features", flag=False
    )
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

    @property
    def counts(self) -> str:
        """The messages that count in the loss: one of ``LOSS_ON``."""
        return self.loss_on or (LAST if self.mask_prompt else ALL)


@dataclass(frozen=True, kw_only=True)
class WantedData:
    """The rows that a run needs: of the sets to ``train`` with, and the test set as ``options``
    say, a batch of each at least, for an ``objective``, cut to ``max_seq_length`` tokens."""

    options: DataOptions
    train: bool
    batch_size: int
    max_seq_length: int
    objective: str = SFT
