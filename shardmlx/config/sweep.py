"""The runs of a sweep: the options of a file for each run, over those of the command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmlx.common.yaml_reader import read_yaml
from shardmlx.config.checks import OPTIMIZERS
from shardmlx.config.data import FeatureKeys
from shardmlx.config.objective import SFT, ObjectiveOptions
from shardmlx.config.options import declared, with_parts
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.tags import MOST_RUNS
from shardmlx.errors import UserError, naming
from shardmlx.pipeline.mesh import Mesh

_OBJECTIVE = tuple(each.name for each in declared(ObjectiveOptions))

_ROWS = (
    *("data", "hf_dataset", "mask_prompt", "loss_on"),
    *(each.name for each in declared(FeatureKeys)),
)

DECIDE_LOSS = (*_ROWS, *_OBJECTIVE)
"""The options by which losses differ in what they mean."""

MAY_DIFFER = (
    *("lora_parameters", "learning_rate", "lr_schedule", "warmup", "optimizer"),
    *("optimizer_config", "max_grad_norm", "seed", *DECIDE_LOSS),
)
"""The options that may differ: all others decide what the runs have in common."""


def read_sweep(config: TrainConfig) -> dict[str, TrainConfig]:
    """Return the options of each run in the file that ``config.sweep`` names, by its name; its
    outputs are those of ``config`` with the name. Raises ``UserError``."""
    if config.checkpoints.named is not None:
        raise UserError(
            f"--resume {config.checkpoints.resume}: each run has its own", "use auto or never"
        )
    given = read_yaml(str(config.sweep))
    if len(given) > MOST_RUNS:
        problem = f"{config.sweep} has {len(given)} runs"
        raise UserError(problem, f"train at most {MOST_RUNS} at once")
    if not given or len({str(name).lower() for name in given}) < len(given):
        problem = f"{config.sweep} names {', '.join(map(str, given)) or 'no run'}"
        # The names are directories, and to a Mac's disk A and a are the same.
        raise UserError(problem, "give each run a name of its own, not by capitals alone")
    return {str(name): _of_run(config, str(name), each) for name, each in given.items()}


def _of_run(config: TrainConfig, name: str, given: Any) -> TrainConfig:
    where = f"{config.sweep}: run {name!r}"
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(where, "name runs by letters, digits, and _ . -, for their directories")
    if not isinstance(given, Mapping):
        raise UserError(f"{where} has {given!r}", "give options of its own, one 'key: value' each")
    with naming(where):
        given = with_parts(TrainConfig, given, ())
    for key in given:
        if key not in MAY_DIFFER:
            raise UserError(
                f"{where}: {key} cannot differ between runs that train side by side",
                f"runs may have their own {', '.join(MAY_DIFFER)}",
            )
    changes: dict[str, Any] = {"lr_schedule": config.asked_lr_schedule}
    if given.get("objective", config.loss.objective) != config.loss.objective:
        changes |= {each.name: each.usual for each in declared(ObjectiveOptions)}
    if "data" in given:
        changes["hf_dataset"] = None  # which would win
    changes |= given
    lora = given.get("lora_parameters")
    if isinstance(lora, Mapping):
        if "keys" in lora:
            raise UserError(f"{where}: keys cannot differ", "leave them out of lora_parameters")
        changes["lora_parameters"] = _lora_of_run(config.tune.lora_parameters, lora)
    with naming(where):
        return config.changed(**changes, **_outputs_of_run(config, name), sweep=None)


def _lora_of_run(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all runs have in common, with a run's own over it."""
    rank = {key: value for key, value in common.items() if key != "scale"}
    scale = {} if "alpha" in own else {"scale": common["scale"]}
    return {**rank, **scale, **own}


def _outputs_of_run(config: TrainConfig, name: str) -> dict[str, Any]:
    """Return the options of a run's own directories and files."""
    directories = {
        "adapter_path": config.adapter_path,
        "checkpoint_dir": config.checkpoints.checkpoint_dir,
    }
    files = {"metrics_file": config.metrics_file, "trace": config.trace}
    own = {key: str(Path(path) / name) for key, path in directories.items() if path is not None}
    for key, path in files.items():
        if path is not None:
            own[key] = str(Path(path).with_stem(f"{Path(path).stem}-{name}"))
    return own


def in_one(config: TrainConfig, runs: Mapping[str, TrainConfig], ranks: int) -> TrainConfig:
    """Return a run that trains and keeps as much as all of them together, to be planned on so many
    ``ranks``: of preferences if any is, in pairs if any needs them, and in one pipeline unless the
    layout is given."""
    rank = sum(each.tune.lora_parameters["rank"] for each in runs.values())
    largest = max(runs.values(), key=lambda each: OPTIMIZERS[each.tune.optimizer].states)
    strictest = max(
        runs.values(), key=lambda each: (each.loss.together, each.loss.objective != SFT)
    ).flat()
    layout = config.layout
    given = (layout.stage_map, layout.data_parallel, layout.pipeline_stages)
    stages = {"pipeline_stages": ranks // layout.across} if given == (None, None, None) else {}
    return config.changed(
        **stages,
        **{name: strictest[name] for name in DECIDE_LOSS},
        lora_parameters={**config.tune.lora_parameters, "rank": rank},
        optimizer=largest.tune.optimizer,
        lr_schedule=config.asked_lr_schedule,
    )


def check_replicas(config: TrainConfig, mesh: Mesh) -> None:
    """Raise ``UserError`` if a sweep was planned for more replicas than one."""
    if mesh.dp > 1:
        raise UserError(
            f"--sweep {config.sweep}: adapters train side by side in one pipeline, and there are "
            f"{mesh.dp} replicas",
            f"give --pipeline-stages {mesh.dp * mesh.pp}",
        )
