"""Bounds of a step's seconds, below what any division of the layers takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.units import GIB
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.choice import assess
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.least_seconds import least_seconds
from shardmlx.planning.ways import ways
from tests.helpers.fake_models import MISTRAL_7B, write_config

SMALL = {**MISTRAL_7B, "num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("small"), SMALL)


def facts(model: Path, teraflops: tuple[float, ...], **options: Any) -> Any:
    settings = {"max_seq_length": 512, **options}
    run = TrainConfig.from_flat(model=str(model), **settings).spec
    machines = tuple(
        Machine(host=f"mac{i}", memory=9999 * GIB, flops=tera * 1e12, link=1e9, latency=30e-6)
        for i, tera in enumerate(teraflops)
    )
    return run, PlanFacts(
        workload=Workload.of(open_model(str(model)), run.fine_tune, run.batch),
        cluster=Cluster(machines=machines),
        lengths=SequenceLengths.full(512),
    )


@pytest.mark.parametrize(
    ("teraflops", "options"),
    [
        ((10, 10, 10, 10), {"batch_size": 48, "num_layers": 4}),
        ((27, 14, 10, 4), {"batch_size": 32, "num_layers": -1}),
        ((27, 4, 4), {"batch_size": 7, "fine_tune_type": "full", "num_layers": -1}),
        ((10, 40, 10), {"batch_size": 9, "num_layers": 2, "recompute": "full"}),
        ((5, 10, 5, 10, 5, 10), {"batch_size": 24, "num_layers": 4, "replica_rows": "auto"}),
    ],
)
def test_no_way_takes_less_than_its_bound(
    small: Path, teraflops: tuple[float, ...], options: dict[str, Any]
) -> None:
    run, known = facts(small, teraflops, **options)
    looked_at = 0
    for way in ways(run, known):
        try:
            seconds = assess(way, known).seconds
        except UserError:
            continue
        assert least_seconds(way, known) <= seconds, way
        looked_at += 1
    assert looked_at > 15
