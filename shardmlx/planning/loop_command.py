"""Carries out ``shardmlx plan --train`` and ``shardmlx inspect --train``: plans what the ranks of
``serve --train`` hold, and prints it. No MLX, no MPI. Only the model's headers are read.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmlx.common.formatting import columns, gibibytes, numbers_of, plural
from shardmlx.common.json_output import JsonOutput
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine, words_of
from shardmlx.config.loop import LoopSpec
from shardmlx.config.options import Options, in_group, section, written
from shardmlx.config.serve import ServeConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import ModelFiles, open_model
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.chips import as_macs, machines_of
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine, machine_of_each_rank, read_hostfile
from shardmlx.planning.facts.job_facts import Facts
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.job import Job
from shardmlx.planning.loop import RankParts, parts_of_ranks, plan_loop
from shardmlx.planning.memory.limits import ProcessMemory, budgets_of
from shardmlx.planning.memory.training_setup import BACKENDS

_MACHINES = "machines"
_machines = in_group(_MACHINES)


@dataclass(frozen=True, kw_only=True)
class LoopPlanOptions(Options):
    """The server to plan, and the machines. Raises ``OptionError``, a ``UserError``."""

    server: ServeConfig = section(
        ServeConfig,
        model=common.model_argument(),
        hostfile=common.hostfile(None, group=_MACHINES),
    )
    machines: str | None = common.macs(group=_MACHINES)
    pipeline_stages: int | None = _machines(
        None, "ranks in one pipeline", unset="as many as there are machines", minimum=1
    )
    backend: str = _machines(BACKENDS[0], "what the machines compute with", choices=BACKENDS)
    json: str | None = common.json(group="output")

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values with what follows from others. Raises ``OptionError``."""
        return ServeConfig.settled(values)

    @property
    def ranks(self) -> int | None:
        """The ranks that are asked for; None for one on each machine."""
        if self.pipeline_stages is None:
            return None
        replicas = self.server.loop.data_parallel or 1
        return self.pipeline_stages * self.server.tensor_parallel * replicas

    def all_machines(self) -> tuple[Machine, ...]:
        """Return the machine of each rank, of unknown memory where none is named. Raises
        ``UserError``."""
        hostfile = self.server.hostfile
        named: Sequence[Machine] = ()
        if self.machines is not None:
            named = machines_of(self.machines)
        elif hostfile is not None:
            named = read_hostfile(hostfile)
        found = machine_of_each_rank(named if self.backend == "cpu" else as_macs(named))
        ranks = self.ranks
        if not found:
            if ranks is None:
                remedy = "give --hostfile FILE, --machines 'M2 16GB, M1 16GB', or --pipeline-stages"
                raise UserError("no machines", remedy)
            return (Machine(host="-"),) * ranks
        if ranks is not None and ranks > len(found):
            problem = f"{ranks} ranks, but there are {plural(len(found), 'slot')}"
            raise UserError(problem, "use as many stages, or add machines")
        return found[:ranks]


def run(words: Sequence[str], of: CommandLine[Any]) -> int:
    """Plan as the words say, which have ``--train``, and print it, for a command with a line of its
    own. Raises ``UserError`` where the server would not fit."""
    line = CommandLine(
        options=LoopPlanOptions,
        command=of.command,
        description="Predict what each rank of shardmlx serve --train holds: the base, the LoRAs "
        "that train, their optimizer states, and the KV caches of what they answer.",
        groups=(_MACHINES,),
        refused=_refused(of),
        epilog="Takes every option of shardmlx serve --train.",
    )
    options, given = line.load_given(words)
    server = options.server
    with JsonOutput(options.json, of.command) as output:
        files = open_model(server.source.model, server.source.revision)
        job = plan_loop(server.loop_spec, files, _facts(options, files))
        ranks = parts_of_ranks(server.loop_spec, job)
        start = _start(options, {**given.file, **given.flags})
        print(_text(server.loop_spec, job, ranks, start))
        output.write(_as_json(server.loop_spec, job, ranks, start))
    return 0


def _refused(of: CommandLine[Any]) -> Mapping[str, str]:
    """Return the flags of the command without ``--train``, and what they are for."""
    own = {flag for each in written(LoopPlanOptions) for flag in each.flags}
    others = {flag for each in written(of.options) for flag in each.flags} - own
    reason = f"with --train {of.command} plans shardmlx serve --train: leave one of them out"
    return dict.fromkeys(sorted(others), reason)


def _facts(options: LoopPlanOptions, files: ModelFiles) -> Facts:
    """Return the facts of the machines that are named, before ranks run on them."""
    server = options.server
    cluster = Cluster(machines=options.all_machines(), backend=options.backend)
    processes = [ProcessMemory() for _ in cluster.machines]
    processes[0] = ProcessMemory(outside=server.bytes_for_requests)
    stage_map = server.stage_map
    return Facts(
        model=model_sizes(files, server.dtype),
        machines=cluster,
        budgets=budgets_of(cluster, server.memory_limit, processes),
        stage_map=None if stage_map is None else read_stage_map(stage_map),
    )


def _start(options: LoopPlanOptions, given: Mapping[str, Any]) -> list[str]:
    """Return the words that start the server that was planned."""
    flags = {each.name for each in written(ServeConfig) if each.rules.flag}
    left = {name: value for name, value in given.items() if name in flags}
    left.pop("hostfile", None)
    left.pop("api_key", None)
    hostfile = options.server.hostfile or "HOSTFILE"
    model = {"model": options.server.source.model}
    words = words_of(ServeConfig, {**model, **left, "train": True})
    return ["shardmlx", "launch", "--hostfile", hostfile, "serve", *words]


def _text(spec: LoopSpec, job: Job, ranks: Sequence[RankParts], start: Sequence[str]) -> str:
    """Return what a server was planned for, a table of its ranks, and its command."""
    loop = spec.loop
    plan = job.trained.plan
    table = [
        {
            "rank": str(rank),
            "host": each.host,
            "layers": ", ".join(numbers_of(*ends) for ends in each.layers),
            "base": gibibytes(each.base),
            "LoRAs": gibibytes(each.lora),
            "optimizer": gibibytes(each.optimizer),
            "KV caches": gibibytes(each.kv_caches),
            "while it computes": gibibytes(each.passing),
            "peak memory": gibibytes(each.peak),
            "limit": "?" if math.isinf(each.limit) else gibibytes(each.limit),
        }
        for rank, each in enumerate(ranks)
    ]
    return "\n".join(
        [
            f"serve --train: {plural(plan.mesh.dp, 'replica')} of "
            f"{plural(plan.stage_map.num_stages, 'stage')}, {plan.schedule}",
            f"room for {plural(loop.max_adapters, 'model')} of rank {loop.max_lora_rank}, rows of "
            f"{loop.max_train_length} tokens, and KV caches of {spec.cache_tokens} tokens",
            "",
            columns(list(table[0]), [list(each.values()) for each in table]),
            "",
            f"start it: {shlex.join(start)}",
        ]
    )


def _as_json(
    spec: LoopSpec, job: Job, ranks: Sequence[RankParts], start: Sequence[str]
) -> dict[str, Any]:
    """Return a plan in exact bytes; a limit that is not known is None."""
    plan = job.trained.plan
    return {
        "model": spec.source.model,
        "pipeline_stages": plan.mesh.pp,
        "data_parallel": plan.mesh.dp,
        "tensor_parallel": plan.mesh.tp,
        "schedule": plan.schedule,
        "num_layers": plan.stage_map.partition.sizes,
        "max_adapters": spec.loop.max_adapters,
        "max_lora_rank": spec.loop.max_lora_rank,
        "max_train_length": spec.loop.max_train_length,
        "cache_tokens": spec.cache_tokens,
        "recompute": job.trained.way.batch.recomputed,
        "ranks": [
            {
                "host": each.host,
                "layers": each.layers,
                "base_bytes": each.base,
                "lora_bytes": each.lora,
                "optimizer_bytes": each.optimizer,
                "kv_cache_bytes": each.kv_caches,
                "passing_bytes": each.passing,
                "peak_memory_bytes": each.peak,
                "limit_bytes": None if math.isinf(each.limit) else each.limit,
            }
            for each in ranks
        ],
        "run": shlex.join(start),
    }
