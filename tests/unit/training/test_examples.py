"""Every file of examples/ trains a small model, and does what it says in words."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from shardmlx.config.train import LINE
from shardmlx.training.command import train_model
from testbed.jobs import ROOT
from tests.helpers.local_transport import alone

EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.yaml"))}

# What a model of five layers and data of 32 rows need beside the file: a length of the run, and the
# type of weights that the model of full-1b has.
SMALLER: dict[str, tuple[str, ...]] = {
    "chat-8b": ("--num-layers", "5"),
    "lora-70b": ("--num-layers", "5", "--iters", "4"),
    "full-1b": ("--dtype", "bfloat16"),
}

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


def turns(first: str, second: str) -> dict[str, Any]:
    """Return a conversation with two answers."""
    said = (("user", "Hello."), ("assistant", first), ("user", "Where?"), ("assistant", second))
    return {"messages": [{"role": role, "content": content} for role, content in said]}


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("conversations")
    rows = "".join(json.dumps(turns("Ahoy!", f"Isle {number}.")) + "\n" for number in range(32))
    for name in ("train", "valid"):
        (directory / f"{name}.jsonl").write_text(rows)
    return directory


def words_of(name: str) -> str:
    """Return what a file says of itself."""
    return EXAMPLES[name].read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


class Examples:
    """The examples, with a small model and conversations in the place of their own."""

    def __init__(self, model: Path, data: Path, output: Path) -> None:
        self._place = ("--model", str(model), "--data", str(data), "--adapter-path", str(output))

    def run(self, name: str, *flags: str) -> dict[str, list[Mapping[str, Any]]]:
        """Return what an example tells by event, with some more flags."""
        told: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        words = ("-c", str(EXAMPLES[name]), *self._place, *SMALLER[name], *flags)

        def listen(event: str, values: Mapping[str, Any]) -> None:
            told[event].append(values)

        config = LINE.load([*words, "--steps-per-report", "1"])
        alone(lambda rank: train_model(config, rank, on_event=listen))
        return told


@pytest.fixture
def examples(small: Path, conversations: Path, tmp_path: Path) -> Examples:
    return Examples(small, conversations, tmp_path / "out")


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_trains_to_the_end_of_what_it_says(name: str, examples: Examples) -> None:
    options = yaml.safe_load(EXAMPLES[name].read_text(encoding="utf-8"))
    steps = round(options.get("epochs", 0) * (32 // options["batch_size"])) or 4
    reports = examples.run(name)["train"]
    assert [report["step"] for report in reports] == list(range(1, steps + 1))
    assert all(math.isfinite(report["loss"]) for report in reports)
    fast = float(options["learning_rate"])
    assert reports[0]["learning_rate"] == pytest.approx(fast)
    # A schedule is at its end after the last update, at which it is one update from it.
    schedule = options.get("lr_schedule")
    end = float(schedule["arguments"][2]) if schedule else fast
    last = end + (fast - end) * (1 + math.cos(math.pi * (steps - 1) / steps)) / 2
    assert reports[-1]["learning_rate"] == pytest.approx(last, rel=1e-4)
    assert schedule is None or last < 0.05 * fast


def test_in_the_chat_example_all_answers_count_and_nothing_else(
    examples: Examples, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "only its answers count, and all of them" in words_of("chat-8b")
    examples.run("chat-8b", "--show-data", "1")
    shown = capsys.readouterr().out
    assert shown.count("count in the loss") == 1
    counted = [part.partition("\u00bb")[0] for part in shown.split("\u00ab")[1:]]
    assert counted == [" Ahoy!</s>", " Isle 0.</s>"]


def test_the_full_example_trains_all_layers_and_float32_copies_of_them(
    small: Path, examples: Examples, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "All layers" in words_of("full-1b")
    assert "copies in float32 that AdamW updates" in words_of("full-1b")
    (start,) = examples.run("full-1b")["start"]
    assert start["options"]["optimizer"] == "adamw"
    assert start["options"]["master_weights"] is True
    sizes = {name: each.size for name, each in load_file(small / "model.safetensors").items()}
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    trained = f"Trainable parameters: {100 * layers / sum(sizes.values()):.3f}% "
    assert trained in capsys.readouterr().out
