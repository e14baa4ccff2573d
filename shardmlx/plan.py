"""``python -m shardmlx.plan``: how to train a model on given machines, or what a schedule does.

It needs neither MLX nor MPI, and of the model only the headers, or config.json alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardmlx.cluster import BACKENDS, EFFICIENCY, MEMORY_FRACTION, Cluster
from shardmlx.command import OneLineParser, run_command
from shardmlx.config import TrainConfig, load_config
from shardmlx.draw import timeline
from shardmlx.errors import UserError
from shardmlx.hostfile import is_unnamed, machine_of_each_rank, read_hostfile
from shardmlx.mesh import Mesh
from shardmlx.model_source import open_model
from shardmlx.partitioners import partitioner_names
from shardmlx.picture import check_picture, draw_schedule
from shardmlx.plan_report import as_json, report
from shardmlx.planner import Choice, DoesNotFitError, Limits, choose
from shardmlx.profile_file import merge, read_profile
from shardmlx.remedies import remedies
from shardmlx.report import Reporter
from shardmlx.schedule_report import show_schedule
from shardmlx.schedules import SCHEDULES
from shardmlx.stage_map import StageMap, read_stage_map, write_stage_map
from shardmlx.workload import Workload

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the command was told: its own flags, and a training run's options.

    ``train_options`` are those that the planner leaves as they were given.
    """

    flags: argparse.Namespace
    config: TrainConfig
    train_options: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 and one line on stderr for bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _run(given))


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(show_schedule(argv))
        return 0
    options = read_options(argv)
    flags = options.flags
    for picture in flags.draw:
        check_picture(Path(picture))
    cluster = _cluster(flags)
    cluster.check_speeds()
    files = open_model(options.config.model)
    workload = Workload.of(files, options.config)
    limits = _limits(options, cluster.size)
    if limits.stage_map is not None:
        limits.stage_map.check_layers(workload.shape.num_layers)
    choice = _choose(workload, cluster, limits)
    prediction = choice.prediction
    if flags.output:
        write_stage_map(_to_write(prediction.plan.stage_map, options.config.model), flags.output)
    names = [rank.hosts[0] for rank in prediction.ranks]
    for picture in flags.draw:
        title = f"{Path(options.config.model).name}: {prediction.plan.schedule}, one step"
        draw_schedule(prediction.simulation, Path(picture), title=title, names=names)
    if flags.json:
        print(json.dumps(as_json(choice, limits)))
        return 0
    print(
        report(choice, workload, cluster, limits, flags.hosts, flags.output, options.train_options)
    )
    if flags.timeline:
        print("\n" + timeline(prediction.simulation, shutil.get_terminal_size((160, 24)).columns))
    return 0


def _to_write(stage_map: StageMap, model: str) -> StageMap:
    """With the model it is for. A host that goes by an address is left out: ranks know names."""
    hosts = tuple(None if host is None or is_unnamed(host) else host for host in stage_map.hosts)
    return replace(stage_map, model=model, hosts=hosts)


def _choose(workload: Workload, cluster: Cluster, limits: Limits) -> Choice:
    reporter = Reporter()
    with reporter.bar("planning", 1) as bar:
        try:
            return choose(workload, cluster, limits, bar.show)
        except DoesNotFitError as error:
            found = remedies(workload, cluster, limits)
            remedy = "; ".join(found) or "more machines, or machines with more memory"
            raise UserError(f"{error}; it would fit with: {remedy}") from None


def read_options(argv: Sequence[str]) -> PlanOptions:
    """Flags of this command, and any of ``shardmlx.train``'s."""
    parser = _parser()
    flags, rest = parser.parse_known_args(argv)
    # The options of training; what is left to the planner has the planner's meaning.
    schedule = [] if flags.schedule == AUTO else ["--schedule", flags.schedule]
    config = load_config(["--model", flags.model, *rest, *schedule])
    return PlanOptions(flags, config, tuple(_left_alone(rest)))


def _left_alone(options: Sequence[str]) -> Iterator[str]:
    """Without the flags that the plan itself gives."""
    is_value = False
    for word in options:
        name = word.partition("=")[0]
        if name in ("--stage-map", "--pipeline-stages", "--virtual-stages", "--micro-batch-size"):
            is_value = name == word
        elif is_value or name == "--grad-checkpoint":
            is_value = False
        else:
            yield word


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m shardmlx.plan",
        description="Choose stages, schedule, micro-batches and recomputing for training a model "
        "on the machines of a hostfile, and predict memory and time.",
        epilog="Takes the options of shardmlx.train too, --config among them: --batch-size, "
        "--max-seq-length, --fine-tune-type, --num-layers, --micro-batch-size, "
        "--grad-checkpoint and --optimizer are those that matter here.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="directory, or Hugging Face repository; headers are enough"
    )
    parser.add_argument(
        "--hosts", metavar="HOSTFILE", required=True, help="the machines, with memory and speed"
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        action="append",
        default=[],
        help="times measured by python -m shardmlx.profile; several files may be given",
    )
    parser.add_argument(
        "--data-parallel", type=int, metavar="D", help="replicas (default: the fastest)"
    )
    parser.add_argument(
        "--schedule",
        default=AUTO,
        metavar="NAME",
        help=f"{AUTO}, or one of {', '.join(SCHEDULES)} (default: {AUTO})",
    )
    parser.add_argument(
        "--partitioner",
        metavar="NAME",
        help=f"one of {', '.join(partitioner_names())} (default: hetero; balanced where ranks "
        "have several stages)",
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


def _cluster(flags: argparse.Namespace) -> Cluster:
    for flag, value in (
        ("--memory-fraction", flags.memory_fraction),
        ("--efficiency", flags.efficiency),
    ):
        if not 0 < value <= 1:
            raise UserError(f"{flag} is {value:g}: give more than 0, and at most 1")
    profiles = [read_profile(path) for path in flags.profile]
    return Cluster(
        machines=machine_of_each_rank(read_hostfile(flags.hosts)),
        profile=merge(profiles) if profiles else None,
        memory_fraction=flags.memory_fraction,
        efficiency=flags.efficiency,
        backend=flags.backend,
    )


def _limits(options: PlanOptions, ranks: int) -> Limits:
    flags, config = options.flags, options.config
    stage_map = None if config.stage_map is None else read_stage_map(config.stage_map)
    if stage_map is not None:
        stage_map.check_pipeline(config.pipeline_stages, config.virtual_stages)
    pp = config.pipeline_stages if stage_map is None else stage_map.pp
    replicas = flags.data_parallel
    if replicas is None and pp is not None:
        replicas = Mesh.for_world(ranks, pp).dp
    return Limits(
        batch_size=config.batch_size,
        length=config.max_seq_length,
        data_parallel=replicas,
        schedule=None if flags.schedule == AUTO else config.schedule,
        virtual=config.virtual_stages,
        micro_batch_size=config.micro_batch_size,
        checkpoint=config.grad_checkpoint,
        partitioner=flags.partitioner,
        stage_map=stage_map,
    )


if __name__ == "__main__":
    raise SystemExit(main())
