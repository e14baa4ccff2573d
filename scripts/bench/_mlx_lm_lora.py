"""Run ``mlx_lm.lora``, and rest after each report until the next turn.

    _mlx_lm_lora.py -c CONFIG.yaml

The same process setup as our ranks have (OpenBLAS first, freed memory kept): MLX's wheel for Linux
by itself computes with a BLAS that is 16 times as slow, and there would be nothing to compare.
"""

from __future__ import annotations

import shardmlx.common.prepared

import resource
from typing import Any

from _turns import Turns
from mlx_lm import lora
from mlx_lm.tuner.callbacks import TrainingCallback


class Resting(TrainingCallback):
    """mlx-lm measures its steps without what happens in here."""

    def __init__(self) -> None:
        self._turns = Turns(0)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._turns.answer({**train_info, "process_peak_bytes": peak})
        self._turns.rest()


if __name__ == "__main__":
    lora.get_reporting_callbacks = lambda *args, **kwargs: Resting()
    lora.main()
