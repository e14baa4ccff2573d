"""``python -m scripts.bench.loops train|plain|mlx-lm OPTIONS``: programs that train by turns.

``train`` is ``shardmlx.train``, with --metrics-file: rank 0, which commands the others, answers
what each report says there, and at the end the summary.

``mlx-lm`` is ``mlx_lm.lora``, which answers its reports. It has the same process setup as our ranks
(OpenBLAS first, freed memory kept): MLX's wheel for Linux by itself computes with a BLAS that is 16
times as slow, and there would be nothing to compare.

``plain`` is a loop over MLX and mlx-lm that does the work of a step on one rank: one process, one
model, one graph a micro-batch; gradients are added up over the micro-batches and applied once a
step. No stages, no messages, no gradient norm, no report; random tokens. With ``--compile`` the
forward and backward of a micro-batch go through ``mx.compile``, as in mlx-lm.
"""

from __future__ import annotations

import shardmlx.common.prepared

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import AdamW
from mlx.utils import tree_map
from mlx_lm.tuner.callbacks import TrainingCallback

from scripts.bench.turns import Turns
from shardmlx.common.environment import launched_rank
from testbed.runs import events


def train(arguments: list[str]) -> int:
    """Run ``shardmlx.train``, and rest after each report until the next turn."""
    from shardmlx.config.train import LINE
    from shardmlx.distributed.run_ranks import run_ranks
    from shardmlx.main import main

    if launched_rank() != 0:
        return main(["train", *arguments])
    turns = Turns(0)
    metrics = Path(LINE.load(arguments).metrics_file or "")

    def last(name: str) -> Any:
        return events(metrics, name)[-1]

    def load() -> Callable[..., None]:
        from shardmlx.training import command, trainer
        from shardmlx.training.report import TrainingReport

        class RestingReport(TrainingReport):
            def step(self, *given: Any) -> None:
                super().step(*given)
                turns.answer(last("train"))
                turns.rest()

        patch.object(trainer, "TrainingReport", RestingReport).start()
        return command.run

    status = run_ranks(lambda rank: LINE.load(arguments, rank), lambda config: config.timeout, load)
    if status == 0:
        turns.answer(last("summary"))
    return status


class Resting(TrainingCallback):
    """mlx-lm measures its steps without what happens in here."""

    def __init__(self) -> None:
        self._turns = Turns(0)

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        """Answer a report, and rest."""
        self._turns.answer(train_info)
        self._turns.rest()


def mlx_lm(arguments: list[str]) -> int:
    """Run ``mlx_lm.lora`` with these arguments."""
    from mlx_lm import lora

    sys.argv = ["mlx_lm.lora", *arguments]
    lora.get_reporting_callbacks = lambda *args, **kwargs: Resting()
    lora.main()
    return 0


def mean_loss(model: nn.Module, inputs: mx.array, targets: mx.array) -> mx.array:
    """Return the loss of a micro-batch."""
    loss: mx.array = nn.losses.cross_entropy(model(inputs), targets, reduction="mean")
    return loss


class PlainLoop:
    """A step of a model on random tokens; ``compiles`` each micro-batch, or does not."""

    def __init__(self, path: Path, rows: int, length: int, microbatches: int) -> None:
        from mlx_lm.utils import load_model

        self._model, _ = load_model(path)
        self._model.train()
        self._optimizer = AdamW(learning_rate=1e-5)
        self._of_microbatch = nn.value_and_grad(self._model, mean_loss)
        tokens = mx.random.randint(0, self._model.args.vocab_size, (rows, length + 1))
        self._parts = mx.split(tokens, microbatches)
        mx.eval(self._parts)

    def compile(self) -> None:
        """Let forward and backward go through ``mx.compile``."""
        plain, model = self._of_microbatch, self._model
        compiled = mx.compile(
            lambda inputs, targets: plain(model, inputs, targets),
            inputs=model.state,
            outputs=model.state,
        )
        self._of_microbatch = lambda _, inputs, targets: compiled(inputs, targets)

    def step(self) -> None:
        """Add up the gradients of all micro-batches, and apply their mean."""
        total = None
        for part in self._parts:
            loss, gradients = self._of_microbatch(self._model, part[:, :-1], part[:, 1:])
            total = gradients if total is None else tree_map(mx.add, total, gradients)
            mx.eval(loss, total)
        mean = tree_map(lambda gradient: gradient / len(self._parts), total)
        self._optimizer.update(self._model, mean)
        mx.eval(self._model.state, self._optimizer.state)


def plain(arguments: list[str]) -> int:
    """Make ``--steps`` steps in each turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    for name in ("rows", "microbatches", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    turns = Turns(0)
    loop = PlainLoop(options.model, options.rows, options.length, options.microbatches)
    if options.compile:
        loop.compile()
    while True:
        start = time.perf_counter()
        for _ in range(options.steps):
            loop.step()
        seconds = (time.perf_counter() - start) / options.steps
        turns.answer({"step_seconds": seconds})
        turns.rest()


PROGRAMS = {"train": train, "plain": plain, "mlx-lm": mlx_lm}

if __name__ == "__main__":
    raise SystemExit(PROGRAMS[sys.argv[1]](sys.argv[2:]))
