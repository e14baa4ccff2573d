"""``plan --train`` and ``inspect --train``: what the ranks of a training loop's server hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.units import GIB
from shardmlx.config.loop import LoopConfig
from shardmlx.config.serve import LINE, ServeConfig
from shardmlx.main import main
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.sizes.kv_cache import held
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import Facts
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.job import Job
from shardmlx.planning.loop import COPIES, FLOAT32, MOMENTS, SNAPSHOTS, parts_of_ranks, plan_loop
from testbed.tiny_models import tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.fake_models import write_config
from tests.helpers.refusals import refusal

LAYERS = 8
VOCABULARY = 2000
HIDDEN = 256
RANK = 8

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = tiny_config(layers=LAYERS, vocab_size=VOCABULARY, hidden_size=HIDDEN)
    return write_config(tmp_path / "model", config)


def machines(*memories: int) -> Cluster:
    found = (Machine(host=f"mac{i}", memory=memory) for i, memory in enumerate(memories))
    return Cluster(machines=tuple(found))


def job_of(model: Path, cluster: Cluster, **options: Any) -> Job:
    config = ServeConfig.from_flat(model=str(model), train=True, max_lora_rank=RANK, **options)
    files = open_model(str(model))
    facts = Facts(model=model_sizes(files, None), machines=cluster)
    return plan_loop(config.loop_spec, files, facts)


def shown(capsys: Capture, command: str, *words: object) -> dict[str, Any]:
    status = main([command, *map(str, words), "--train", "--json", "-"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    found: dict[str, Any] = json.loads(captured.out)
    return found


def test_both_commands_show_what_the_server_plans(model: Path, capsys: Capture) -> None:
    options = ("--max-adapters", 2, "--max-lora-rank", RANK)
    planned = shown(capsys, "plan", model, "--machines", "8GB, 8GB", *options)
    inspected = shown(capsys, "inspect", model, "--machines", "8GB, 8GB", *options)
    assert planned["ranks"] == inspected["ranks"]
    names = ("base_bytes", "lora_bytes", "optimizer_bytes", "kv_cache_bytes", "passing_bytes")
    for rank in planned["ranks"]:
        assert all(rank[name] > 0 for name in names)
        assert sum(rank[name] for name in names) == rank["peak_memory_bytes"] < rank["limit_bytes"]


def test_the_command_that_is_shown_starts_that_server(model: Path, capsys: Capture) -> None:
    options = ("--max-adapters", 2, "--cache-tokens", 4096)
    words = shown(capsys, "plan", model, "--machines", "8GB, 8GB", *options)["run"].split()
    config = LINE.load(words[words.index("serve") + 1 :])
    assert (config.source.model, config.train) == (str(model), True)
    assert (config.loop.max_adapters, config.cache_tokens) == (2, held(4096))


def test_a_model_takes_weights_gradients_snapshots_and_two_moments(model: Path) -> None:
    cluster = machines(GIB, GIB)
    config = ServeConfig.from_flat(model=str(model), train=True, max_lora_rank=RANK)
    found = []
    for count in (1, 3):
        spec = replace(config.loop_spec, loop=replace(config.loop, max_adapters=count))
        job = job_of(model, cluster, max_adapters=count)
        found.append(parts_of_ranks(spec, job))
    for one, three in zip(*found, strict=True):
        of_one = one.optimizer / MOMENTS
        assert three.optimizer == 3 * one.optimizer
        assert one.lora == of_one * (COPIES - MOMENTS + SNAPSHOTS + 1)
        assert three.lora - one.lora == 2 * of_one * (COPIES - MOMENTS + SNAPSHOTS)
        assert (one.base, one.kv_caches) == (three.base, three.kv_caches)
    head = FLOAT32 * RANK * (VOCABULARY + HIDDEN)
    assert found[0][1].optimizer > MOMENTS * head


def test_the_base_of_all_ranks_is_the_model(model: Path) -> None:
    config = ServeConfig.from_flat(model=str(model), train=True, max_lora_rank=RANK)
    job = job_of(model, machines(GIB, GIB))
    sizes = job.generated.setup.model.held_sizes
    parts = parts_of_ranks(config.loop_spec, job)
    whole = sum(sizes.layers) + sizes.embedding + sizes.head
    assert sum(each.base for each in parts) == pytest.approx(whole, abs=4)


def test_what_does_not_fit_is_refused_with_what_would(model: Path, capsys: Capture) -> None:
    machines = ("--machines", "1GB, 1GB", "--max-body", 1000)
    assert main(["plan", str(model), *map(str, machines), "--max-adapters", "64", "--train"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardmlx: error: rank 0 (1GB) would take")
    fewer = int(said.partition("--max-adapters ")[2].partition(";")[0])
    assert 0 < fewer < 64
    shown(capsys, "plan", model, *machines, "--max-adapters", fewer)


def test_options_of_a_run_are_refused_by_name(model: Path, capsys: Capture) -> None:
    for command, flag in (("plan", "--iters"), ("inspect", "--context")):
        words = [command, str(model), "--pipeline-stages", "2", "--train", flag, "5"]
        assert main(words) == 2
        said = capsys.readouterr().err
        assert flag in said
        assert "serve --train" in said


def test_requests_of_clients_count_on_rank_0(model: Path, capsys: Capture) -> None:
    few, many = (
        shown(capsys, "plan", model, "--machines", "8GB, 8GB", "--max-body", nbytes)["ranks"]
        for nbytes in (1_000_000, 10_000_000)
    )
    assert many[0]["limit_bytes"] < few[0]["limit_bytes"]
    assert many[1]["limit_bytes"] == few[1]["limit_bytes"]


def test_the_prefix_cache_keeps_states_of_recurrent_layers(tmp_path: Path) -> None:
    """Layers whose states cannot be cut keep copies of them beside those of their sequences."""
    model = write_config(tmp_path / "recurrent", UNDECLARED["lfm2"])
    job = job_of(model, machines(GIB), batch_size=2)
    setup = job.generated.setup
    assert setup.state_copies > 0
    alone = replace(job.generated, setup=replace(setup, state_copies=0))
    of_states = sum(
        setup.model.shape.layer(i).recurrence.cache_nbytes(setup.model.dtype_bytes)
        for i in range(setup.model.shape.num_layers)
    )
    assert of_states > 0
    less = replace(job, generation=alone)
    assert job.caches[0] - less.caches[0] >= setup.state_copies * of_states


def test_replicas_train_and_the_first_samples(model: Path) -> None:
    job = job_of(model, machines(GIB, GIB, GIB, GIB), data_parallel=2)
    assert (job.mesh.dp, job.mesh.pp) == (2, 2)
    assert [each > 0 for each in job.caches] == [True, True, False, False]


def test_unequal_machines_keep_their_order(model: Path) -> None:
    """Answers need stage i on rank i, whatever a faster order of training would be."""
    timed: dict[str, Any] = {"link": 1e9, "latency": 1e-5, "memory": GIB}
    unlike = [Machine(host="slow", flops=1e11, **timed), Machine(host="fast", flops=1e12, **timed)]
    job = job_of(model, Cluster(machines=(*unlike, replace(unlike[0], host="slow too"))))
    assert job.stage_map.placement == (0, 1, 2)
    assert job.stage_map.partition.sizes[1] > job.stage_map.partition.sizes[0]


def test_answers_take_any_schedule(model: Path) -> None:
    job = job_of(model, machines(GIB, GIB), schedule="zb-v")
    assert job.stage_map.placement == (0, 1, 1, 0)
    assert all(each > 0 for each in job.caches)


def test_prompts_come_in_where_the_first_stage_is(model: Path) -> None:
    files = open_model(str(model))
    swapped = StageMap.from_sizes([4, 4], (1, 0))
    facts = Facts(model=model_sizes(files, None), machines=machines(GIB, GIB), stage_map=swapped)
    server = ServeConfig.from_flat(model=str(model), train=True)
    assert "stage 0 is on rank 1" in refusal(plan_loop, server.loop_spec, files, facts).problem
    program = LoopConfig.from_flat(model=str(model))
    job = plan_loop(program.spec, files, facts)
    assert job.generation is None
    assert job.caches == (0, 0)
