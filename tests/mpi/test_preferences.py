"""Preferences in whatever layout: the losses of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import yaml
from mlx.optimizers import Adam
from mlx_lm import load

from shardmlx.models.runtime.tuner import linear_to_lora_layers
from testbed.runs import events
from tests.helpers.mpirun import train_well
from tests.helpers.preference_data import preference_directory, rows_of
from tests.helpers.shown import lacking

BETA, RATE, SEED, ITERS, ROWS = 0.1, 2e-4, 5, 4, 4
LORA = {"rank": 4, "dropout": 0.0, "scale": 10.0}
TOLERANCE = 1e-5

COMMON: dict[str, Any] = {
    "beta": BETA,
    "seed": SEED,
    "batch_size": ROWS,
    "iters": ITERS,
    "learning_rate": RATE,
    "num_layers": -1,
    "lora_parameters": LORA,
    "max_seq_length": 512,
    "steps_per_report": 1,
    "steps_per_eval": ITERS,
    "val_batches": 2,
}

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, ["--micro-batch-size", "2", "--no-pack"]),
    "two stages, packed": (2, ["--schedule", "1f1b", "--micro-batch-size", "2", "--pack"]),
    "two by two in a V": (4, ["--schedule", "zb-v", "--pipeline-stages", "2"]),
}
OTHERS = {"dpo": "two stages, packed", "kto": "two by two in a V"}
"""The layout of each objective beside one rank; threads run each in more of them."""


@pytest.fixture(scope="module")
def data(pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preference_directory(tmp_path_factory.mktemp("preferences"), pirate)


class Run(NamedTuple):
    losses: list[float]
    validation: list[float]
    said: str


Train = Callable[[str, str], Run]


@pytest.fixture
def run(small: Path, data: Path, tmp_path: Path) -> Train:
    def run(layout: str, objective: str) -> Run:
        ranks, flags = LAYOUTS[layout]
        config, metrics, output = (tmp_path / name for name in ("config", "metrics", "output"))
        kind = "singles" if objective == "kto" else "pairs"
        where = {"model": str(small), "data": str(data / kind), "adapter_path": str(output)}
        config.write_text(yaml.safe_dump(COMMON | where | {"objective": objective}))
        job = train_well(ranks, "-c", config, "--metrics-file", metrics, *flags)
        losses, validation = (
            [event["loss"] for event in events(metrics, kind)] for kind in ("train", "val")
        )
        return Run(losses, validation, job.stdout)

    return run


# One process: mlx-lm's own model and adapters, all logits at once, and the papers' formulas.


def one_process(model_path: Path, data: Path, objective: str) -> list[float]:
    model, tokenizer, *_ = load(str(model_path))
    mx.random.seed(SEED)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), LORA)
    samples, labels = [], []
    for row in rows_of(data, "train"):
        answers = (
            [row["completion"]]
            if objective == "kto"
            else [row["chosen"][0]["content"], row["rejected"]]
        )
        for answer in answers:
            turns = [*row["prompt"], {"role": "assistant", "content": answer}]
            tokens = tokenizer.apply_chat_template(turns, return_dict=False)
            prompt = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=False
            )
            # A last token of the prompt may be merged with the answer's first.
            pairs = enumerate(zip(tokens, prompt, strict=False))
            start = next((i for i, (a, b) in pairs if a != b), len(prompt))
            samples.append((tokens[:start], tokens[start:]))
            labels.append(row.get("label", True))

    def logps(model: Any, rows: list[tuple[list[int], list[int]]]) -> mx.array:
        sums = []
        for prompt, answer in rows:
            logits = model(mx.array([[*prompt, *answer[:-1]]]))[0, len(prompt) - 1 :]
            of_tokens = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            targets = mx.array(answer)[:, None]
            sums.append(mx.take_along_axis(of_tokens, targets, axis=-1).sum())
        return mx.stack(sums)

    def loss(model: Any, rows: Any, wanted: Any, references: Any, baseline: Any) -> mx.array:
        gains = logps(model, rows) - references
        if objective == "kto":
            margins = mx.where(wanted, gains - baseline, baseline - gains)
            return (1 - mx.sigmoid(BETA * margins)).mean()
        return -mx.log(mx.sigmoid(BETA * (gains[0::2] - gains[1::2]))).mean()

    def batches() -> Iterator[tuple[Any, Any]]:
        for i in np.random.RandomState(SEED).permutation(len(samples) // ROWS)[:ITERS].tolist():
            rows = slice(i * ROWS, (i + 1) * ROWS)
            yield samples[rows], mx.array(labels[rows])

    def swapped(rows: Any) -> Any:
        return [(prompt, rows[i - 1][1]) for i, (prompt, _) in enumerate(rows)]

    known = [(logps(model, rows), logps(model, swapped(rows))) for rows, _ in batches()]
    mx.eval(known)
    optimizer, losses = Adam(RATE), []
    for (rows, wanted), (references, of_others) in zip(batches(), known, strict=True):
        baseline = mx.maximum((logps(model, swapped(rows)) - of_others).mean(), 0.0)
        gradient_of = nn.value_and_grad(model, loss)
        value, gradients = gradient_of(model, rows, wanted, references, baseline)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, value)
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("objective", OTHERS)
def test_losses_are_those_of_one_process(
    objective: str, small: Path, data: Path, run: Train
) -> None:
    kind = "singles" if objective == "kto" else "pairs"
    expected = one_process(small, data / kind, objective)
    first, second = (run(layout, objective) for layout in ("one rank", OTHERS[objective]))
    for each in (first, second):
        np.testing.assert_allclose(each.losses, expected, rtol=TOLERANCE)
    np.testing.assert_allclose(second.validation, first.validation, rtol=TOLERANCE)
    assert first.losses[-1] < first.losses[0]
    assert objective != "dpo" or lacking("preferences.md", "rewards", first.said) == set()
