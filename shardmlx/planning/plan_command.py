"""Carries out ``shardmlx plan``: plans the training of a model on given machines.

No MLX, no MPI. Only the model's headers are read, or config.json alone.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardmlx.common.json_output import JsonOutput
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine, Given, words_of
from shardmlx.config.options import Options, in_group, section, written
from shardmlx.config.specs import RunSpec
from shardmlx.config.sweep import check_replicas, in_one, read_sweep
from shardmlx.config.train import PASSED_OVER, TrainConfig
from shardmlx.errors import UserError
from shardmlx.pipeline.figure import timeline
from shardmlx.pipeline.stage_map import write_stage_map
from shardmlx.planning import loop_command
from shardmlx.planning.alone import Alone, each_alone
from shardmlx.planning.choice import Choice, with_shares
from shardmlx.planning.facts.chips import machines_of
from shardmlx.planning.facts.hostfile import Machine, is_unnamed, read_hostfile
from shardmlx.planning.memory.training_setup import BACKENDS
from shardmlx.planning.report.plan_report import PlanReport, as_json, text
from shardmlx.planning.training_plan import plan_training, with_divided_weights

_MACHINES = "machines"
_OUTPUT = "output"

_SHOWN = (
    *("model", "revision", "hostfile", "machines", "backend", "profile", "max_of", "output"),
    *("timeline", "json", "island_lines", "config", "fine_tune_type", "num_layers", "optimizer"),
    *("batch_size", "max_seq_length", "pipeline_stages", "data_parallel", "replica_rows"),
    *("partitioner", "stage_map", "schedule", "micro_batch_size", "recompute", "pack"),
    *("zero", "sum_dtype", "memory_limit", "dtype"),
)
"""The options in ``--help``: options of a training run that change the plan."""

_DECIDED = (
    *("stage_map", "partitioner", "pipeline_stages", "micro_batch_size"),
    *("data_parallel", "replica_rows", "schedule", "grad_checkpoint", "recompute", "hostfile"),
)
"""The options of training that the plan determines."""


_machines = in_group(_MACHINES)
_output = in_group(_OUTPUT)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The run to plan, the machines, and the plan's file. Raises ``OptionError``."""

    run: TrainConfig = section(
        TrainConfig,
        model=common.model_argument(),
        hostfile=common.hostfile(None, group=_MACHINES),
    )
    machines: str | None = common.macs(group=_MACHINES)
    backend: str = _machines(BACKENDS[0], "what the machines compute with", choices=BACKENDS)

    max_of: str | None = _output(None, "find the longest sequence that fits", choices=("seq",))
    output: str | None = _output(None, "file for the stage map", metavar="FILE", short="-o")
    timeline: bool = _output(False, "draw the step in the terminal")
    json: str | None = common.json(group=_OUTPUT)
    island_lines: str | None = _output(
        None,
        "show what islands of such machines wait for, on lines of so many Mbit/s up: 20,100",
        metavar="SPEEDS",
    )

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values with what follows from others. Raises ``OptionError``."""
        return TrainConfig.settled(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.run.tune.train:
            raise UserError("--test alone trains nothing", "plan the training, without it")
        if self.run.machines.hostfile is None and self.machines is None:
            example = "give --hostfile FILE, or --machines 'M2 16GB, M1 Ultra 64GB'"
            raise UserError("no machines", example)
        if self.island_lines is not None and (
            len(self.lines) < 2 or not all(0 < each < math.inf for each in self.lines)
        ):
            remedy = "give the Mbit/s of two lines or more: 20,100"
            raise UserError(f"--island-lines {self.island_lines}", remedy)
        if self.island_lines is not None and self.run.layout.across > 1:
            raise UserError("--island-lines is given with --tensor-parallel", "leave one out")

    @property
    def takes_stages(self) -> bool:
        """True if what is asked for is told of stages alone, without tensor shares."""
        return bool(self.max_of or self.output or self.island_lines)

    @property
    def lines(self) -> tuple[float, ...]:
        """The bit/s of each island's line upwards; empty unless ``island_lines`` has numbers."""
        with suppress(ValueError):
            return tuple(1e6 * float(each) for each in (self.island_lines or "").split(","))
        return ()


LINE = CommandLine(
    options=PlanOptions,
    command="plan",
    description=(
        "Choose stages, schedule, micro-batches and recomputing for training a model on given "
        "machines, and predict memory and time."
    ),
    groups=(_MACHINES, _OUTPUT),
    shown=_SHOWN,
    passed_over=PASSED_OVER,
    epilog="Takes every option of shardmlx train too. What is given, by flag or file, is settled. "
    "With --train it takes those of shardmlx serve --train, and plans that.",
)


def _train_words(options: PlanOptions, given: Given, found: Mapping[str, Any]) -> list[str]:
    """Return the words of ``train`` for what is given or found, and the planner leaves as it is."""
    flags = {each.name for each in written(TrainConfig) if each.rules.flag}
    of_train = flags - {"model", *_DECIDED}
    left = {name: value for name, value in {**given.flags, **found}.items() if name in of_train}
    words = words_of(PlanOptions, {"model": options.run.source.model, **left})
    # A plan needs no data, and a run does.
    return words if "data" in given.names else [*words, "--data", "DATA"]


def run(words: Sequence[str]) -> int:
    """Plan as the words say, and print or write it; ``UserError`` if no plan fits. With ``--train``
    the words are of ``serve --train``."""
    if "--train" in words:
        return loop_command.run(words, LINE)
    options, given = LINE.load_given(words)
    _check(options, given)
    with JsonOutput(options.json, LINE.command, {"-o": options.output}) as output:
        report = _planned(options, given)
        print(text(report))
        if options.timeline:
            width = shutil.get_terminal_size((160, 24)).columns
            print("\n" + timeline(report.choice.prediction.simulation, width))
        output.write(as_json(report))
    return 0


def _planned(options: PlanOptions, given: Given) -> PlanReport:
    """Plan, and write the stage map that is asked for. Raises ``UserError`` if no plan fits."""
    machines = _machines_of(options)
    spec = _spec(options, sum(each.slots for each in machines))
    with Reporter().bar("planning", 1) as bar:
        planned = plan_training(
            spec, machines, backend=options.backend, max_of=options.max_of, advance=bar.show
        )
    if options.run.sweep is not None:
        check_replicas(options.run, planned.plan.mesh)
    if options.timeline or options.island_lines:
        planned.facts.cluster.check_speeds()
    if options.output:
        _write_map(options, planned)
    found: dict[str, int] = {}
    others: tuple[Choice, ...] = ()
    alone: tuple[Alone, ...] = ()
    if options.max_of is None:
        others = _others(options, spec, planned)
        alone = each_alone(spec, machines, options.backend)
    else:
        found["max_seq_length"] = planned.asked.batch.max_seq_length
    start = ["shardmlx", "launch", "--hostfile", spec.machines.hostfile or "HOSTFILE", "train"]
    start += _train_words(options, given, found)
    return PlanReport(
        choice=planned,
        start=start,
        stage_map=options.output,
        others=others,
        lines_of_islands=options.lines,
        alone=alone,
        steps=options.run.iters if options.run.epochs is None else None,
        longest=found.get("max_seq_length"),
        notes=_notes(options, given),
    )


def _spec(options: PlanOptions, ranks: int) -> RunSpec:
    """Return the run to plan, for so many ranks: of a sweep all runs together. Raises
    ``UserError``."""
    spec = options.run.spec
    if options.run.sweep is not None:
        runs = read_sweep(options.run)
        spec = replace(in_one(options.run, runs, ranks).spec, runs=len(runs))
    if options.takes_stages and spec.layout.tensor_parallel is None:
        spec = spec.with_shares(1)
    return spec


def _notes(options: PlanOptions, given: Given) -> list[str]:
    """Return what is given that a run would look at, and a plan does not."""
    run = options.run
    notes = []
    named = {"data": f"--data {run.sets.data}", "hf_dataset": "hf_dataset"}
    for name in given.names & named.keys():
        notes.append(
            f"{named[name]} is not read: each row counts as --max-seq-length tokens; "
            "shardmlx train --dry-run plans by the rows"
        )
    if run.epochs is not None:
        notes.append(f"--epochs {run.epochs:g}: its steps follow from the rows, which are not read")
    if run.island is not None:
        notes.append(
            f"--island {run.island} is not asked: the copies of weights that its terms want are "
            "not counted"
        )
    return notes


def _check(options: PlanOptions, given: Given) -> None:
    """Raise ``UserError`` for options that contradict others, or a file that cannot be written."""
    if options.max_of is not None and "max_seq_length" in given.flags:
        remedy = f"--max-of {options.max_of} finds it: leave it out"
        raise UserError("--max-seq-length is given", remedy)
    if options.output:
        if options.run.layout.across > 1:
            across = f"--tensor-parallel {options.run.layout.across}"
            raise UserError(f"-o is given with {across}, which takes no map", "leave it out")
        check_writable(Path(options.output), "-o")


def _machines_of(options: PlanOptions) -> Sequence[Machine]:
    """Return the machines that are named, or those of the hostfile."""
    if options.machines is not None:
        return machines_of(options.machines)
    return read_hostfile(str(options.run.machines.hostfile))


def _others(options: PlanOptions, spec: RunSpec, planned: Choice) -> tuple[Choice, ...]:
    """Return what other tensor shares would make of the plan, and divided weights."""
    others = planned.beside
    is_alone = spec.layout.tensor_parallel == 1 and not options.island_lines
    if is_alone and options.run.can_share:
        others = with_shares(spec, planned.facts)
    return others + with_divided_weights(spec, planned)


def _write_map(options: PlanOptions, planned: Choice) -> None:
    """Write the stage map of a plan into the file that is asked for."""
    stage_map = planned.plan.stage_map
    # Ranks know hosts by name, not by address.
    named = () if options.machines is not None else stage_map.hosts
    hosts = tuple(None if host is None or is_unnamed(host) else host for host in named)
    model = options.run.source.model
    write_stage_map(replace(stage_map, model=model, hosts=hosts), str(options.output))
