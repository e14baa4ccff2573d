"""Carries out ``shardmlx.inspect``: reads headers, divides the model as asked, shows the result.

No MLX, no MPI. No weight is read, unless ``--verify`` has checksums to compare.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from shardmlx.common.formatting import plural
from shardmlx.common.reporter import Reporter
from shardmlx.common.units import MEGABYTE
from shardmlx.config.inspect import DEFAULT_PARTITIONER, LINE, InspectOptions
from shardmlx.costmodel.hostfile import Machine, machine_of_each_rank, read_hostfile
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles, find_source, read_model
from shardmlx.modelfiles.parts import Inspection, inspect_files
from shardmlx.modelfiles.verify import checksums_to_compare, verify
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.layout import make_mesh
from shardmlx.planning.model_report import (
    as_json,
    part_table,
    rank_report,
    stage_table,
    summary,
)
from shardmlx.planning.weight_split import Generation, Split, divide


def run(words: Sequence[str]) -> int:
    """Print the parts of a model; return 1 if ``--verify`` finds a fault.

    Raises ``UserError`` if the model cannot be read, or divided as asked.
    """
    options = LINE.load(words)
    files = read_model(find_source(options.model, options.revision))
    if options.verify:
        return _verify(files, options.json)
    if files.faults:
        raise UserError(files.faults[0])
    inspection = inspect_files(files)
    split, rank = _split(options, inspection), options.rank
    if split is not None and rank is not None:
        split.rank(rank)  # UserError before anything is printed
    if options.json:
        print(json.dumps(as_json(inspection, split, rank), indent=2))
    elif split is not None and rank is not None:
        print(rank_report(split, rank))
    else:
        table = part_table(inspection, fold=not options.all_layers)
        print("\n\n".join([summary(inspection), table, *([stage_table(split)] if split else [])]))
    return 0


def _split(options: InspectOptions, inspection: Inspection) -> Split | None:
    """Divide the model as the options say; None if they do not."""
    if not options.divides:
        return None
    machines: tuple[Machine, ...] = ()
    if options.hostfile is not None:
        machines = machine_of_each_rank(read_hostfile(options.hostfile))
    layers = len(inspection.layers)
    if not layers:
        raise UserError(f"{inspection.files.name} has no layers to divide", "name a whole model")
    generation = None
    if options.context is not None:
        generation = Generation(options.sequences, options.context)
    if options.stage_map is not None:
        stage_map = read_stage_map(options.stage_map)
        stage_map.check_pipeline(options.pipeline_stages)
        # Before machines are assigned, since a map of another model matters most.
        stage_map.check_layers(layers)
        machines = _first(machines, stage_map.pp, options.hostfile)
        if machines:
            make_mesh(stage_map, len(machines), [machine.host for machine in machines])
        return Split(inspection, stage_map, machines, generation)
    num_stages = options.pipeline_stages or len(machines)
    machines = _first(machines, num_stages, options.hostfile)
    if machines and num_stages > layers:
        raise UserError(
            f"{machines[layers].where}: {num_stages} machines, but the model has {layers} layers",
            f"use at most {layers}",
        )
    name = options.partitioner or DEFAULT_PARTITIONER
    try:
        stage_map = divide(inspection, name, num_stages, machines, generation)
    except DoesNotFitError as error:
        raise UserError(f"{machines[error.rank].where}: {error}") from None
    return Split(inspection, stage_map, machines, generation)


def _first(machines: tuple[Machine, ...], ranks: int, hostfile: str | None) -> tuple[Machine, ...]:
    if machines and ranks > len(machines):
        raise UserError(
            f"{ranks} ranks, but {hostfile} has {len(machines)} slots",
            "use as many stages, or add machines",
        )
    return machines[:ranks]


def _verify(files: ModelFiles, in_json: bool) -> int:
    total = sum(files.paths[file].stat().st_size for file in checksums_to_compare(files))
    with Reporter().bar("checksums, MB", max(1, total // MEGABYTE)) as bar:
        verification = verify(files, lambda count: bar.advance(count / MEGABYTE))
    faults = verification.faults
    if in_json:
        result = {
            "model": files.name,
            "revision": files.revision,
            "checked": verification.checked,
            "faults": faults,
        }
        print(json.dumps(result, indent=2))
    else:
        lines = [f"checked: {each}" for each in verification.checked]
        lines += [f"wrong: {each}" for each in faults]
        print("\n".join([*lines, plural(len(faults), "fault") if faults else "all is well"]))
    return 1 if faults else 0
