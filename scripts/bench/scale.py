"""Training on more Macs than we have: Mistral-Large-2407 and a 405B-shaped model, on paper.

    python scripts/bench/scale.py [--json FILE]

The planner's choice for 8 to 64 Macs, on Thunderbolt and on 10 Gbit/s Ethernet, from published
figures of the chips. Nothing is run: FLOP/s at the planner's default efficiency, links at what one
direction carries, no latency. About ten minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmlx.common.formatting import columns, gibibytes
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.choice import Choice, choose
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.report.plan_report import bottleneck

GIB = 2**30

MACS = {
    # GPU cores x 128 ALUs x 2 x clock, as fp32 and fp16; memory as sold.
    "M4 Max": Machine(host="m4-max", memory=128 * GIB, flops=40 * 256 * 1.578e9),
    "M3 Ultra": Machine(host="m3-ultra", memory=512 * GIB, flops=80 * 256 * 1.38e9),
}
"""Mac Studio, 2025, in its largest configurations: 40 and 80 GPU cores."""

LINKS = {"Thunderbolt": 16e9 / 8, "10 GbE": 9.4e9 / 8}
"""Bytes a second each way: iperf3 over a Thunderbolt 4 bridge, and 10GBASE-T less its headers."""

COMMON = {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}

MODELS = {
    "Mistral-Large-2407": {
        "model_type": "mistral",
        "num_hidden_layers": 88,
        "hidden_size": 12288,
        "intermediate_size": 28672,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
        **COMMON,
    },
    "405B": {
        "model_type": "llama",
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        **COMMON,
    },
}

RUN = TrainConfig.from_flat(model="model", num_layers=-1, batch_size=64, max_seq_length=2048).spec
"""LoRA of rank 8 on all layers, in bf16, batches of 64 sequences of 2048 tokens."""

HEADER = (
    "model", "Macs", "link", "replicas x ranks", "schedule", "again", "peak memory", "limit",
    "bubble", "links", "step", "tokens/s", "bound by",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    mac: str
    count: int
    link: str

    def __str__(self) -> str:
        return f"{self.model} on {self.count} x {self.mac}, {self.link}"

    @property
    def cluster(self) -> Cluster:
        machine = MACS[self.mac]
        return Cluster(
            machines=tuple(
                Machine(
                    host=f"{machine.host}-{i}",
                    memory=machine.memory,
                    flops=machine.flops,
                    link=LINKS[self.link],
                )
                for i in range(self.count)
            )
        )


def cases() -> Iterator[Case]:
    for model in MODELS:
        for mac in MACS:
            for count in (8, 16, 32, 64):
                for link in LINKS:
                    yield Case(model, mac, count, link)


def line(case: Case, planned: Choice) -> tuple[str, ...]:
    """Return a row of the table."""
    prediction = planned.prediction
    plan, ranks = prediction.plan, prediction.ranks
    fullest = max(ranks, key=lambda rank: rank.peak / rank.capacity)
    makespan = prediction.simulation.makespan
    return (
        case.model,
        f"{case.count} x {case.mac}",
        case.link,
        f"{plan.mesh.dp} x {plan.mesh.pp}",
        plan.schedule,
        planned.run.batch.recomputed,
        gibibytes(fullest.peak),
        gibibytes(fullest.capacity),
        f"{100 * prediction.simulation.bubble:.1f}%",
        f"{100 * max(rank.exposed for rank in ranks) / makespan:.1f}%",
        f"{prediction.step_seconds:.1f} s",
        f"{prediction.tokens_per_second:.0f}",
        bottleneck(planned).split(",")[0].split(":")[0],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the plans here")
    options = parser.parse_args()
    workloads = {}
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            workloads[name] = Workload.of(open_model(directory), RUN.fine_tune, RUN.batch)
    lengths = SequenceLengths.full(RUN.batch.max_seq_length)
    lines: list[tuple[str, ...]] = []
    plans: dict[str, Any] = {}
    for case in cases():
        print(case, file=sys.stderr)
        try:
            facts = PlanFacts(workload=workloads[case.model], cluster=case.cluster, lengths=lengths)
            planned = choose(RUN, facts)
        except UserError as error:
            lines.append((case.model, f"{case.count} x {case.mac}", case.link, "does not fit"))
            plans[str(case)] = str(error)
            continue
        lines.append(line(case, planned))
        plans[str(case)] = {
            "way": planned.way,
            "num_layers": planned.plan.stage_map.partition.sizes,
            "placement": planned.plan.stage_map.placement,
            "step_seconds": planned.prediction.step_seconds,
            "peak_memory_bytes": [each.peak for each in planned.prediction.ranks],
        }
    width = len(HEADER)
    print(columns(HEADER, [(*row, *[""] * (width - len(row))) for row in lines]))
    if options.json:
        Path(options.json).write_text(json.dumps(plans, indent=1) + "\n")


if __name__ == "__main__":
    main()
