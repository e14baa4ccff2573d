"""Carries out ``shardmlx.inspect``: reads headers, divides the model as asked, shows the result.

No MLX, no MPI. No weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.common.formatting import plural
from shardmlx.common.json_output import JsonOutput
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import Options, in_group, refuse, same_as
from shardmlx.config.specs import ModelSource
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles, find_source, read_model
from shardmlx.modelfiles.parts import Inspection, inspect_files, needed_shape
from shardmlx.modelfiles.tensors import scale_group
from shardmlx.modelfiles.verify import verify
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.partitioners import PARTITIONERS, PartitionerNames
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning import loop_command
from shardmlx.planning.facts.chips import as_macs, shares_by_bandwidth
from shardmlx.planning.facts.hostfile import Machine, as_groups, machine_of_each_rank, read_hostfile
from shardmlx.planning.layout import make_mesh
from shardmlx.planning.report.model_report import (
    as_json,
    part_table,
    stage_table,
    summary,
    tensor_table,
)
from shardmlx.planning.weight_split import Split, divide, generation_of

_DEFAULT_PARTITIONER = "balanced"

_SPLIT = "split"
_split = in_group(_SPLIT)
_output = in_group("output")


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """The model to look at, its division, and what to show of it. Raises ``OptionError``."""

    model: str = common.model_argument()
    revision: str | None = same_as(ModelSource, "revision")

    pipeline_stages: int | None = _split(
        None,
        "stages to divide into, one a rank",
        unset="as many as the hostfile has slots",
        minimum=1,
    )
    partitioner: str | None = _split(
        None,
        "how --pipeline-stages divides",
        unset=_DEFAULT_PARTITIONER,
        metavar="{" + ",".join(PARTITIONERS) + "}",
        choices=PartitionerNames(),
    )
    stage_map: str | None = common.stage_map(group=_SPLIT)
    hostfile: str | None = common.hostfile(None, group=_SPLIT)
    tensor_parallel: int = _split(
        1, "ranks that compute each layer of a stage together", metavar="RANKS", minimum=1
    )
    rank: int | None = _split(None, "list the tensors that this rank holds", metavar="N", minimum=0)
    context: int | None = _split(
        None,
        "count the memory of generating, too: tokens of a sequence, prompt included",
        metavar="TOKENS",
        minimum=1,
    )
    sequences: int = _split(1, "sequences at once, with --context", minimum=1)

    train: bool = _split(
        False, "show what the ranks of shardmlx serve --train hold; takes its options"
    )

    all_layers: bool = _output(False, "show a line for every layer")
    json: str | None = common.json(group="output")
    verify: bool = _output(False, "look for what is wrong with the files; status 1 if something is")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify:
            return
        refuse(
            "rank",
            f"is {self.rank}, and ranks with tensor shares hold parts of tensors",
            "leave it out",
            when=self.rank is not None and self.tensor_parallel > 1,
        )
        both = self.stage_map is not None and self.partitioner is not None
        refuse("partitioner", "divides anew, but --stage-map is given", "leave one out", when=both)
        remedy = "give --pipeline-stages, --stage-map or --hostfile"
        for name in ("rank", "partitioner", "context"):
            alone = getattr(self, name) is not None and not self.divides
            refuse(name, "needs a split", remedy, when=alone)

    @property
    def divides(self) -> bool:
        """True if the model is to be divided into stages."""
        given = (self.pipeline_stages, self.stage_map, self.hostfile)
        return any(each is not None for each in given) or self.tensor_parallel > 1


LINE = CommandLine(
    options=InspectOptions,
    command="inspect",
    description="Show what a model consists of, from the headers of its files alone.",
)


def run(words: Sequence[str]) -> int:
    """Print the parts of a model; return 1 if ``--verify`` finds a fault. With ``--train`` they
    are of ``serve --train``, whose memory is shown. Raises ``UserError``."""
    if "--train" in words:
        return loop_command.run(words, LINE)
    options = LINE.load(words)
    with JsonOutput(options.json, LINE.command) as output:
        files = read_model(find_source(options.model, options.revision))
        if options.verify:
            return _verify(files, output)
        if files.faults:
            raise UserError(files.faults[0])
        inspection = inspect_files(files)
        split = divided(options, inspection)
        held = split.rank(options.rank) if split and options.rank is not None else None
        if held is not None:
            print(tensor_table(held))
        else:
            table = part_table(inspection, fold=not options.all_layers)
            stages = [stage_table(split)] if split else []
            print("\n\n".join([summary(inspection), table, *stages]))
        output.write(as_json(inspection, split, held))
    return 0


def divided(options: InspectOptions, inspection: Inspection) -> Split | None:
    """Return the split that is asked for, if any. Raises ``UserError``."""
    if not options.divides:
        return None
    machines: tuple[Machine, ...] = ()
    if options.hostfile is not None:
        machines = machine_of_each_rank(as_macs(read_hostfile(options.hostfile)))
    layers = len(inspection.layers)
    if not layers:
        raise UserError(f"{inspection.files.name} has no layers to divide", "name a whole model")
    generation = None
    if options.context is not None:
        generation = generation_of(inspection, options.sequences, options.context)
    across = options.tensor_parallel
    files = inspection.files
    stage_map = None
    stages = options.pipeline_stages or max(1, len(machines) // across)
    if options.stage_map is not None:
        stage_map = read_stage_map(options.stage_map)
        stage_map.check_pipeline(options.pipeline_stages)
        # Before machines are assigned, since a map of another model matters most.
        stage_map.check_layers(layers)
        stages = stage_map.pp
    ranks = stages * across
    if machines and ranks > len(machines):
        raise UserError(
            f"{ranks} ranks, but {options.hostfile} has {len(machines)} slots",
            "use as many stages, or add machines",
        )
    machines = machines[:ranks]
    shares = TensorShares(shares_by_bandwidth(machines, across), scale_group(files.config))
    if across > 1:
        shares.check(inspection.shape or needed_shape(files))
    groups = as_groups(machines, across)
    if stage_map is None:
        name = options.partitioner or _DEFAULT_PARTITIONER
        stage_map = divide(inspection, name, stages, groups, generation)
    elif machines:
        make_mesh(stage_map, stages, [machine.host for machine in groups])
    return Split(inspection, stage_map, machines, generation, shares)


def _verify(files: ModelFiles, output: JsonOutput) -> int:
    checked, faults = verify(files)
    lines = [f"checked: {each}" for each in checked]
    lines += [f"wrong: {each}" for each in faults]
    print("\n".join([*lines, plural(len(faults), "fault") if faults else "all is well"]))
    found = {"model": files.name, "revision": files.revision}
    output.write(found | {"checked": checked, "faults": faults})
    return 1 if faults else 0
