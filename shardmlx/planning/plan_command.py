"""Carries out ``shardmlx.plan``: plans the training of a model, or shows a schedule.

No MLX, no MPI. Of the model only the headers are read, or config.json alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.common.cli import OneLineParser
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.specs import RunSpec
from shardmlx.config.train import load_config
from shardmlx.costmodel.cluster import EFFICIENCY, MEMORY_FRACTION
from shardmlx.costmodel.hostfile import is_unnamed, read_hostfile
from shardmlx.costmodel.layer_memory import BACKENDS
from shardmlx.errors import UserError
from shardmlx.pipeline.figure import check_picture, draw_schedule
from shardmlx.pipeline.report import show_schedule
from shardmlx.pipeline.schedules import SCHEDULES
from shardmlx.pipeline.stage_map import StageMap, write_stage_map
from shardmlx.pipeline.text_timeline import timeline
from shardmlx.planning.report import as_json, report
from shardmlx.planning.training_plan import plan_training

AUTO = "auto"

_PLANNED = (
    "--stage-map",
    "--partitioner",
    "--pipeline-stages",
    "--virtual-stages",
    "--micro-batch-size",
)
"""The flags of training whose place the plan takes."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of the command: its own flags, and a training run's.

    ``train_options`` are the flags that the planner leaves as they were.
    """

    flags: argparse.Namespace
    run: RunSpec
    train_options: tuple[str, ...]


def run(argv: Sequence[str]) -> int:
    """Plan as the options say, or show a schedule where no model is named; return 0.

    Raises ``UserError`` for bad options, and where no plan fits.
    """
    if not argv or argv[0].startswith("-"):
        print(show_schedule(argv))
        return 0
    options = read_options(argv)
    flags, run = options.flags, options.run
    for picture in flags.draw:
        check_picture(Path(picture))
        check_writable(Path(picture), "--draw")
    if flags.output:
        check_writable(Path(flags.output), "-o")
    reporter = Reporter()
    with reporter.bar("planning", 1) as bar:
        planned = plan_training(
            run,
            read_hostfile(flags.hosts),
            data_parallel=flags.data_parallel,
            memory_fraction=flags.memory_fraction,
            efficiency=flags.efficiency,
            backend=flags.backend,
            advance=bar.show,
        )
    choice, cluster, limits = planned.choice, planned.cluster, planned.limits
    prediction = planned.prediction
    if flags.output:
        write_stage_map(_to_write(prediction.plan.stage_map, run.model), flags.output)
    names = [rank.hosts[0] for rank in prediction.ranks]
    for picture in flags.draw:
        title = f"{Path(run.model).name}: {prediction.plan.schedule}, one step"
        draw_schedule(prediction.simulation, Path(picture), title=title, names=names)
    if flags.json:
        print(json.dumps(as_json(choice, limits)))
        return 0
    print(report(choice, cluster, limits, flags.hosts, flags.output, options.train_options))
    if flags.timeline:
        print("\n" + timeline(prediction.simulation, shutil.get_terminal_size((160, 24)).columns))
    return 0


def _to_write(stage_map: StageMap, model: str) -> StageMap:
    """Name the model that the map is for. A host that goes by an address is left out: ranks know
    names."""
    hosts = tuple(None if host is None or is_unnamed(host) else host for host in stage_map.hosts)
    return replace(stage_map, model=model, hosts=hosts)


def read_options(argv: Sequence[str]) -> PlanOptions:
    """Read the flags of this command, and any of ``shardmlx.train``'s. Raises ``UserError``."""
    parser = _parser()
    flags, rest = parser.parse_known_args(argv)
    schedule = [] if flags.schedule is None else ["--schedule", flags.schedule]
    config = load_config(["--model", flags.model, "--hosts", flags.hosts, *rest, *schedule])
    if not config.train:
        raise UserError("--test alone trains nothing", "plan the training, without it")
    return PlanOptions(flags, RunSpec.of(config), ("--model", flags.model, *_left_alone(rest)))


def _left_alone(options: Sequence[str]) -> Iterator[str]:
    """Leave out the flags that the plan itself gives."""
    is_value = False
    for word in options:
        name = word.partition("=")[0]
        if name in _PLANNED:
            is_value = name == word
        elif is_value or name in ("--grad-checkpoint", "--no-grad-checkpoint"):
            is_value = False
        else:
            yield word


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m shardmlx.plan",
        description="Choose stages, schedule, micro-batches and recomputing for training a model "
        "on the machines of a hostfile, and predict memory and time.",
        epilog="Takes the options of shardmlx.train too, --config among them: --batch-size, "
        "--max-seq-length, --fine-tune-type, --num-layers, --micro-batch-size, --optimizer, "
        "--grad-checkpoint (or --no-grad-checkpoint), --partitioner, --stage-map and --profile "
        "are those that matter here. What is given, by flag or file, is settled.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="directory, or Hugging Face repository; headers are enough"
    )
    parser.add_argument(
        "--hosts", metavar="HOSTFILE", required=True, help="the machines, with memory and speed"
    )
    parser.add_argument(
        "--data-parallel", type=int, metavar="D", help="replicas (default: the fastest)"
    )
    parser.add_argument(
        "--schedule",
        metavar="NAME",
        help=f"{AUTO}, or one of {', '.join(SCHEDULES)} (default: {AUTO})",
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=MEMORY_FRACTION,
        metavar="X",
        help=f"of a machine's memory that MLX may use (default: {MEMORY_FRACTION})",
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=EFFICIENCY,
        metavar="X",
        help=f"of flops= that training reaches; not with --profile (default: {EFFICIENCY})",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help=f"what the machines compute with (default: {BACKENDS[0]})",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the stage map")
    parser.add_argument(
        "--draw",
        metavar="FILE",
        action="append",
        default=[],
        help="draw the step as a picture, .svg or .png",
    )
    parser.add_argument("--timeline", action="store_true", help="draw the step in the terminal")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    return parser
