"""Ranks that compute layers together are planned as one machine, whose layers end in sums."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.inference import GENERATE
from shardmlx.config.train import LINE
from shardmlx.hosts.launch_options import read_options
from shardmlx.main import main
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.pipeline.mesh import Mesh
from shardmlx.planning.facts.cluster import Cluster, pipeline_seconds
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.ring import SUM_SECONDS
from shardmlx.planning.groups import in_groups
from testbed.tiny_models import tiny_config
from tests.helpers.fake_models import write_config
from tests.helpers.workloads import workload

Capture = pytest.CaptureFixture[str]

MAC = Machine(host="a", memory=8 << 30, flops=1e12, link=1e9, latency=1e-3)
WORK = workload(read_shape(tiny_config(layers=4, hidden_size=256)), num_layers=2)
ROWS, LENGTH = 2, 100


def pair(**changes: Any) -> Cluster:
    return Cluster(machines=(MAC, replace(MAC, host="b", **changes)))


def test_a_group_has_half_of_each_layer_and_four_sums_where_a_gradient_comes_back() -> None:
    work, cluster, ranks = in_groups(WORK, pair(), TensorShares((1, 1)))
    assert (cluster.size, ranks) == (1, [0])
    assert work.weight_sizes.layers[0] < 0.55 * WORK.weight_sizes.layers[0]
    (made,) = pipeline_seconds(work, cluster, Mesh(1, 1), ROWS, LENGTH)
    alone = replace(cluster, machines=(replace(cluster.machines[0], ring=None),))
    (plain,) = pipeline_seconds(work, alone, Mesh(1, 1), ROWS, LENGTH)
    hidden = ROWS * LENGTH * WORK.shape.hidden_size * WORK.dtype_bytes
    one = 2 * (1e-3 + hidden / 2 / 1e9) + SUM_SECONDS
    frozen, trained = (made.layers[i].microbatch - plain.layers[i].microbatch for i in (0, 3))
    assert (frozen, trained) == pytest.approx((2 * one, 4 * one))


def test_a_group_is_as_fast_as_its_slowest_rank_and_has_the_scarcest_memory() -> None:
    shares = TensorShares((1, 1))
    assert in_groups(WORK, pair(flops=5e11), shares)[1].machines[0].flops == 5e11
    _, cluster, ranks = in_groups(WORK, pair(memory=4 << 30), shares)
    assert (ranks, cluster.machines[0].host, cluster.capacity(0)) == ([1], "b", 3 << 30)
    assert in_groups(WORK, pair(flops=None), shares)[1].machines[0].flops is None


def test_plan_says_what_tensor_shares_gain_or_lose(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path / "model", tiny_config(layers=4, hidden_size=256))
    hosts = tmp_path / "hosts"
    words = ("plan", str(model), "--hostfile", str(hosts), "--num-layers", "-1")

    def planned(*more: str, latency: str = "1us") -> str:
        facts = f"memory=8GiB flops=10G bandwidth=100MB/s link=100GB/s latency={latency}"
        hosts.write_text(f"a slots=1 # {facts}\nb slots=1 # {facts}\n")
        assert main([*words, *more]) == 0
        return capsys.readouterr().out

    steps = []
    for latency in ("1us", "10ms"):
        (line,) = re.findall(
            "^with --tensor-parallel 2: .*", planned(latency=latency), re.MULTILINE
        )
        seconds, ratio = map(float, re.findall(r"step ([\d.]+) s, ([\d.]+) times as long", line)[0])
        assert ratio > 1
        steps.append(seconds)
    assert steps[1] > steps[0] + 4 * 4 * 2 * 9e-3

    said = planned("--batch-size", "1")
    assert "1 stage of 2 ranks with tensor shares" in said
    assert re.search("^with --tensor-parallel 1: step .* times as long", said, re.MULTILINE)
    assert said.splitlines()[-1].count("--tensor-parallel 2") == 1
    (fastest,) = re.findall("^the fastest: shardmlx (.*)", said, re.MULTILINE)
    way = GENERATE.load(read_options(shlex.split(fastest)[1:]).options)
    assert (way.source.model, way.tensor_parallel) == (str(model), 2)
    kept = planned("--batch-size", "1", "--tensor-parallel", "1")
    assert "2 ranks, 1f1b" in kept
    assert "times as fast" in kept

    said = planned("--tensor-parallel", "2")
    layout = LINE.load(read_options(shlex.split(said.splitlines()[-1])[2:]).options)
    assert (
        layout.layout.tensor_parallel,
        layout.layout.pipeline_stages,
        layout.layout.stage_map,
    ) == (2, 1, None)
    assert "with --tensor-parallel" not in said
    assert "2 stages" in said  # the ways to generate are those of single ranks

    assert main([*words, "--tensor-parallel", "2", "-o", str(tmp_path / "map.yaml")]) == 2
    assert "-o is given with --tensor-parallel 2" in capsys.readouterr().err
