"""``python -m shardmlx.inspect MODEL``: what a model consists of, from headers alone.

Neither MLX nor MPI is needed, and no weight is read, unless ``--verify`` has checksums to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardmlx.common.cli import OneLineParser, run_command
from shardmlx.costmodel.hostfile import Machine, machine_of_each_rank, read_hostfile, same_host
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles, find_source, read_model
from shardmlx.modelfiles.parts import Inspection, inspect_files
from shardmlx.modelfiles.verify import checksums_to_compare, verify
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.stage_map import StageMap, read_stage_map
from shardmlx.planning.model_report import (
    as_json,
    part_table,
    rank_report,
    stage_table,
    summary,
    verification_report,
)
from shardmlx.planning.weight_split import Generation, Split, divide

DEFAULT_PARTITIONER = "balanced"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m shardmlx.inspect",
        description="Show what a model consists of, from the headers of its files alone.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="directory, .safetensors file, or Hugging Face repository (OWNER/NAME)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a repository")
    parser.add_argument("--all-layers", action="store_true", help="a line for every layer")
    split = parser.add_argument_group("split")
    split.add_argument("--stages", type=int, metavar="N", help="divide into N pipeline stages")
    split.add_argument(
        "--partitioner",
        metavar="NAME",
        help=f"how --stages divides (default: {DEFAULT_PARTITIONER})",
    )
    split.add_argument("--stage-map", metavar="FILE", help="divide as this file says")
    split.add_argument(
        "--hosts", metavar="HOSTFILE", help="the machines; without --stages as many as it has slots"
    )
    split.add_argument(
        "--rank", type=int, metavar="R", help="tensors, files and byte ranges that this rank needs"
    )
    split.add_argument(
        "--context",
        type=int,
        metavar="T",
        help="count the memory of generating texts of T tokens, prompt included, too",
    )
    split.add_argument(
        "--sequences", type=int, default=1, metavar="N", help="texts at once (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="all of it as JSON")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="look for what is wrong with the files; status 1 if something is",
    )
    return parser


def _split(arguments: argparse.Namespace, inspection: Inspection) -> Split | None:
    machines = _machines(arguments.hosts)
    stage_map = _stage_map(arguments)
    num_stages = arguments.stages
    if num_stages is None and stage_map is None:
        if not machines:
            for flag in ("rank", "partitioner", "context"):
                if getattr(arguments, flag) is not None:
                    raise UserError(
                        f"--{flag} needs a split: give --stages, --stage-map or --hosts"
                    )
            return None
        num_stages = len(machines)
    if not inspection.layers:
        raise UserError(f"{inspection.files.name} has no layers to divide: name a whole model")
    generation = None
    if arguments.context is not None:
        generation = Generation(arguments.sequences, arguments.context)
    if stage_map is not None:
        # Before machines are given out: a map of another model is the first thing to say.
        stage_map.check_layers(len(inspection.layers))
        machines = _first(machines, stage_map.pp, arguments.hosts)
        _check_hosts(stage_map, machines, arguments.hosts)
        return Split(inspection, stage_map, machines, generation)
    if num_stages < 1:
        raise UserError(f"--stages {num_stages}: give 1 or more")
    machines = _first(machines, num_stages, arguments.hosts)
    name = arguments.partitioner or DEFAULT_PARTITIONER
    if machines and num_stages > len(inspection.layers):
        raise UserError(
            f"{machines[len(inspection.layers)].where}: {num_stages} machines, but the model has "
            f"{len(inspection.layers)} layers: use at most {len(inspection.layers)}"
        )
    try:
        stage_map = divide(inspection, name, num_stages, machines, generation)
    except DoesNotFitError as error:
        raise UserError(f"{machines[error.rank].where}: {error}") from None
    return Split(inspection, stage_map, machines, generation)


def _stage_map(arguments: argparse.Namespace) -> StageMap | None:
    if arguments.stage_map is None:
        return None
    if arguments.partitioner is not None:
        raise UserError("--partitioner divides anew, but --stage-map is given: leave one out")
    stage_map = read_stage_map(arguments.stage_map)
    if arguments.stages not in (None, stage_map.num_stages):
        raise UserError(
            f"--stages is {arguments.stages}, but {stage_map} has {stage_map.num_stages}: leave "
            "--stages out"
        )
    return stage_map


def _machines(hostfile: str | None) -> tuple[Machine, ...]:
    """The machine, or share of one, of each rank that a hostfile has room for."""
    if hostfile is None:
        return ()
    return machine_of_each_rank(read_hostfile(hostfile))


def _first(machines: tuple[Machine, ...], ranks: int, hostfile: str) -> tuple[Machine, ...]:
    if machines and ranks > len(machines):
        raise UserError(
            f"{ranks} ranks, but {hostfile} has {len(machines)} slots: use as many stages, or add "
            "machines"
        )
    return machines[:ranks]


def _check_hosts(stage_map: StageMap, machines: tuple[Machine, ...], hostfile: str) -> None:
    for rank, machine in enumerate(machines):
        wanted = stage_map.host_of(rank)
        if wanted is not None and not same_host(wanted, machine.host):
            raise UserError(
                f"{stage_map} wants rank {rank} on host {wanted}, but {hostfile} gives it "
                f"{machine.host}: change the order of the hostfile, or the map"
            )


@contextmanager
def _progress(files: ModelFiles) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while checksums are computed, in a terminal."""
    total = sum(files.paths[file].stat().st_size for file in checksums_to_compare(files))
    if not total or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    progress = Progress(
        TextColumn("checksums"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("checksums", total=total)
        yield lambda count: progress.update(task, advance=count)


def _verify(files: ModelFiles, in_json: bool) -> int:
    with _progress(files) as advance:
        verification = verify(files, advance)
    if in_json:
        result = {
            "model": files.name,
            "revision": files.revision,
            "checked": verification.checked,
            "faults": verification.faults,
        }
        print(json.dumps(result, indent=2))
    else:
        print(verification_report(verification))
    return 1 if verification.faults else 0


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    files = read_model(find_source(arguments.model, arguments.revision))
    if arguments.verify:
        return _verify(files, arguments.json)
    if files.faults:
        raise UserError(files.faults[0])
    inspection = inspect_files(files)
    split = _split(arguments, inspection)
    rank = arguments.rank
    if split is not None and rank is not None:
        split.rank(rank)  # UserError before anything is printed
    if arguments.json:
        print(json.dumps(as_json(inspection, split, rank), indent=2))
    elif split is not None and rank is not None:
        print(rank_report(split, rank))
    else:
        table = part_table(inspection, fold=not arguments.all_layers)
        print("\n\n".join([summary(inspection), table, *([stage_table(split)] if split else [])]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 when ``--verify`` finds something, 2 and one line for bad input."""
    return run_command(lambda: _run(argv))


if __name__ == "__main__":
    raise SystemExit(main())
