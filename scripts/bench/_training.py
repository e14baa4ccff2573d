"""Start ``shardmlx.train`` as a contender, and read what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from _compare import ROOT, environment, mpirun
from _turns import Contender

from shardmlx.config.options import declared
from shardmlx.config.train import TrainConfig

PROGRAM = ROOT / "scripts/bench/_train.py"


def as_flags(values: Mapping[str, object]) -> list[str]:
    """Write ``{"batch_size": 8, "test": True}`` as ``--batch-size 8 --test``; leave False out."""
    words: list[str] = []
    for name, value in values.items():
        if value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def as_words(values: Mapping[str, object], config: Path) -> list[str]:
    """Write options of ``shardmlx.train`` as flags, and into ``config`` those that have none."""
    only_in_file = {each.name for each in declared(TrainConfig) if not each.rules.flag}
    in_file = {name: value for name, value in values.items() if name in only_in_file}
    flags = {name: value for name, value in values.items() if name not in only_in_file}
    if in_file:
        config.write_text(yaml.safe_dump(in_file))
        flags["config"] = config
    return as_flags(flags)


def training(
    name: str,
    flags: Mapping[str, object],
    *,
    ranks: int,
    steps: int,
    rounds: int,
    directory: Path,
    threads: int = 1,
    bind: str = "none",
) -> Contender:
    """Return a run that makes ``steps`` steps a turn; ``directory`` is for what it writes.

    It has one turn to warm up, ``rounds`` turns, and one more in which it answers its summary.
    """
    own = path_of(directory, name)
    reports = {
        "iters": steps * (rounds + 1), "steps_per_report": steps, "val_batches": 0,
        "save_every": 10**9, "metrics_file": f"{own}.jsonl",
        "adapter_path": own,
    }  # fmt: skip
    words = as_words({**flags, **reports}, Path(f"{own}-options.yaml"))
    command = mpirun(ranks, PROGRAM, *words, bind=bind)
    return Contender(name, [command], ranks=ranks, environments=[environment(threads)])


def path_of(directory: Path, name: str) -> Path:
    """Return the directory for the files of a contender."""
    return directory / name.replace(" ", "-").replace("/", "-")


def events_of(metrics: Path) -> list[dict[str, Any]]:
    """Return what a run has told in its metrics file."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def step_seconds(answers: Sequence[Any]) -> float:
    """Return the seconds of a turn, by the rank that took longest; ranks may say nothing."""
    return max(float(each["step_seconds"]) for each in answers if each)
