"""Carries out ``shardmlx plan``: plans the training of a model on given machines.

No MLX, no MPI. Only the model's headers are read, or config.json alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.specs import RunSpec
from shardmlx.costmodel.hostfile import is_unnamed, read_hostfile
from shardmlx.pipeline.figure import check_picture, draw_schedule
from shardmlx.pipeline.stage_map import StageMap, write_stage_map
from shardmlx.pipeline.text_timeline import timeline
from shardmlx.planning.advice import model_facts, other_way, shorter_sums
from shardmlx.planning.plan_options import read_options
from shardmlx.planning.report import as_json, report
from shardmlx.planning.training_plan import plan_training


def run(words: Sequence[str]) -> int:
    """Plan as the words say, and print or write the plan; return 0. Raises ``UserError`` if no
    plan fits."""
    options, train_options = read_options(words)
    run = RunSpec.of(options)
    for picture in options.draw:
        check_picture(Path(picture))
        check_writable(Path(picture), "--draw")
    if options.output:
        check_writable(Path(options.output), "-o")
    machines = read_hostfile(options.hostfile)
    with Reporter().bar("planning", 1) as bar:
        planned = plan_training(run, machines, backend=options.backend, advance=bar.show)
    prediction = planned.prediction
    if options.output:
        write_stage_map(_to_write(prediction.plan.stage_map, run.model), options.output)
    names = [rank.hosts[0] for rank in prediction.ranks]
    for picture in options.draw:
        title = f"{Path(run.model).name}: {prediction.plan.schedule}, one step"
        draw_schedule(prediction.simulation, Path(picture), title=title, names=names)
    if options.json:
        print(json.dumps(as_json(planned)))
        return 0
    facts = model_facts(planned.workload, prediction)
    facts += [*shorter_sums(planned), *other_way(planned)]
    print(report(planned, options.hostfile, options.output, train_options, facts))
    if options.timeline:
        print("\n" + timeline(prediction.simulation, shutil.get_terminal_size((160, 24)).columns))
    return 0


def _to_write(stage_map: StageMap, model: str) -> StageMap:
    """Name the model of the map. Hosts given by address are left out: ranks know names."""
    hosts = tuple(None if host is None or is_unnamed(host) else host for host in stage_map.hosts)
    return replace(stage_map, model=model, hosts=hosts)
