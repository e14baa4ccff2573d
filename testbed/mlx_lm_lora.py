"""``python -m testbed.mlx_lm_lora CONFIG.yaml ...``: what ``mlx_lm.lora`` makes of each file.

Its losses go, at full precision, to the file's name with .json: lists "train" and "val" of
(iteration, loss), "learning_rate" of each iteration, and "test".
"""

import shardmlx.common.prepared

import json
import sys
from pathlib import Path
from typing import Any

from mlx_lm import lora
from mlx_lm.tuner.callbacks import TrainingCallback


class Losses(TrainingCallback):
    """Keeps what mlx-lm reports."""

    def __init__(self) -> None:
        self.train: list[tuple[int, float]] = []
        self.val: list[tuple[int, float]] = []
        self.learning_rate: list[float] = []
        self.test: float | None = None

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        self.train.append((train_info["iteration"], train_info["train_loss"]))
        self.learning_rate.append(train_info["learning_rate"])

    def on_val_loss_report(self, val_info: dict[str, Any]) -> None:
        # mlx-lm names validation by the iterations that came before it.
        self.val.append((val_info["iteration"] + 1, val_info["val_loss"]))


evaluate = lora.evaluate

for config in sys.argv[1:]:
    losses = Losses()

    def evaluate_test(*args: Any, losses: Losses = losses, **kwargs: Any) -> float:
        losses.test = float(evaluate(*args, **kwargs))
        return losses.test

    # It prints the loss of the test set with three digits, and hands it to nobody.
    lora.evaluate = evaluate_test
    # The callback that lora.run() takes is overwritten with this one's result.
    lora.get_reporting_callbacks = lambda *args, losses=losses, **kwargs: losses
    sys.argv = ["mlx_lm.lora", "-c", config]
    lora.main()
    Path(config).with_suffix(".json").write_text(json.dumps(vars(losses)))
