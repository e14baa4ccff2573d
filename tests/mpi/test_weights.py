"""Only rank 0 has the model, or each rank has its part from a hub: what comes out is the same."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmlx.common.units import parse_bytes
from testbed.jobs import Job
from testbed.runs import events
from tests.helpers.hub_server import File, Hub, serve
from tests.helpers.mpirun import mpirun, train_well
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool
from tests.helpers.shown import lacking

PROMPT = "What is the colour of the sea, and who sails on it?"
SAY = ("--prompt", PROMPT, "--max-tokens", "12")
TRAIN = (
    *("--num-layers", "-1", "--iters", "3", "--batch-size", "4", "--learning-rate", "0.01"),
    *("--val-batches", "0", "--steps-per-report", "1"),
)


@dataclass(frozen=True)
class Machines:
    """Directories that stand for machines; the model is on the first."""

    homes: list[Path]

    def run(self, module: str, *args: str | Path, breaks: bool = False) -> Job:
        """Run a command on ranks that stay, or on ranks of its own if one of them ``breaks``."""
        places = ",".join(map(str, self.homes))
        words = PROGRAMS / "apart.py", module, places, *args
        if breaks:
            return mpirun(len(self.homes), *words, env={"SHARDMLX_TEST_BREAKS": "1"})
        return run_in_pool(len(self.homes), *words, timeout=180)

    def left(self) -> list[Path]:
        """Of temporary files."""
        return [path for home in self.homes for path in (home / "tmpdir").glob("shardmlx-*")]


def machines(directory: Path, count: int, model: Path | None = None) -> Machines:
    homes = [directory / f"mac{number}" for number in range(count)]
    for home in homes:
        home.mkdir()
    if model is not None:
        shutil.copytree(model, homes[0] / "model")
    return Machines(homes)


@pytest.fixture(scope="module")
def expected(small: Path, adapters: Path) -> str:
    words = "--model", small, "--adapter-path", adapters, *SAY
    return run_in_pool(1, "-m", "shardmlx.generate", *words).answer


def test_generate_with_model_and_adapters_on_the_first_machine_alone(
    small: Path, adapters: Path, expected: str, tmp_path: Path
) -> None:
    group = machines(tmp_path, 2, small)
    shutil.copytree(adapters, group.homes[0] / "adapters")
    words = ("generate", "--model", "model", "--adapter-path", "adapters", *SAY)
    job = group.run(*words, "--weight-cache", "kept")
    assert job.answer == expected
    assert lacking("weights.md", "weights", job.stdout, {"mac2": socket.gethostname()}) == set()
    weights = (small / "model.safetensors").stat().st_size
    line = re.search(r"^weights: ([\d.]+ [GMK]iB) over MPI in .* \(rank 1 .*\)$", job.stdout, re.M)
    assert line is not None, job.stdout
    assert parse_bytes(line[1]) < 0.9 * weights
    assert re.search(r"^adapters: [\d.]+ [GMK]iB over MPI", job.stdout, re.M)
    assert [(home / "kept").exists() for home in group.homes] == [False, True]
    again = group.run(*words, "--weight-cache", "kept")
    assert again.answer == expected
    assert re.search(r"^weights: [\d.]+ [GMK]iB from caches in", again.stdout, re.M)
    assert group.left() == []


def test_train_goes_on_from_what_is_on_the_first_machine_alone(
    small: Path, pirate: Path, adapters: Path, tmp_path: Path
) -> None:
    """Model, adapters, data, options and stage map."""
    start = adapters / "adapters.safetensors"
    on_all_ranks, stage_map = tmp_path / "together.jsonl", tmp_path / "map.yaml"
    stage_map.write_text("stages:\n  - num_layers: 2\n  - num_layers: 3\n")
    train_well(
        2,
        *("--model", small, "--data", pirate, "--resume-adapter-file", start, *TRAIN),
        *("--stage-map", stage_map),
        *("--metrics-file", on_all_ranks, "--adapter-path", tmp_path / "out"),
    )
    group = machines(tmp_path, 2, small)
    shutil.copyfile(start, group.homes[0] / "start.safetensors")
    shutil.copyfile(stage_map, group.homes[0] / "map.yaml")
    shutil.copytree(pirate, group.homes[0] / "data")
    (group.homes[0] / "run.yaml").write_text(
        "model: model\ndata: data\nresume_adapter_file: start.safetensors\nstage_map: map.yaml\n"
    )
    group.run(
        *("train", "--config", "run.yaml", *TRAIN, "--timeout", "90"),
        *("--metrics-file", "apart.jsonl", "--weight-cache", "cache"),
    ).well()
    apart = events(group.homes[0] / "apart.jsonl", "train")
    assert [e["loss"] for e in apart] == [e["loss"] for e in events(on_all_ranks, "train")]
    assert len(list((group.homes[1] / "cache").iterdir())) == 1
    assert group.left() == []


def test_what_is_refused_and_what_fails(small: Path, tmp_path: Path) -> None:
    group = machines(tmp_path, 2, small)
    job = group.run("generate", "--model", "model", "--weights", "local", *SAY)
    assert re.fullmatch(
        r"shardmlx: error: rank 1 on \S+ lacks the files of model: model is not there, or has no "
        "weights: copy it there, or let the rank have it from rank 0 with --weights auto",
        job.failure(2),
    )
    line = group.run("generate", "--model", "model", *SAY, breaks=True).failure(1)
    assert re.search(r"rank 1 on \S+: OSError: the disk is gone", line)
    assert group.left() == []


@pytest.fixture
def hub(small: Path) -> Iterator[Hub]:
    with serve(Hub()) as running:
        running.repositories["me/small"] = {
            path.name: File(data := path.read_bytes(), len(data), path.suffix == ".safetensors")
            for path in small.iterdir()
        }
        yield running


def test_each_rank_downloads_its_part_from_the_hub(small: Path, hub: Hub, tmp_path: Path) -> None:
    group = machines(tmp_path, 2)
    environment = f"HF_ENDPOINT={hub.endpoint}", "NO_PROXY=*", "HF_HUB_DISABLE_XET=1"
    say = *environment, "--model", "me/small", *SAY
    plain = run_in_pool(1, "-m", "shardmlx.generate", "--model", small, *SAY)
    job = group.run("generate", *say)
    assert job.answer == plain.answer
    assert re.search(r"^weights: [\d.]+ [GMK]iB from the hub in", job.stdout, re.M)
    size = (small / "model.safetensors").stat().st_size
    small_files = sum(p.stat().st_size for p in small.iterdir()) - size
    assert size < hub.bytes_served < size + 2 * small_files + 60_000
    # What was downloaded is there the next time.
    hub.requests.clear()
    job = group.run("generate", *say)
    assert job.answer == plain.answer
    assert re.search(r"^weights: [\d.]+ [GMK]iB from caches in", job.stdout, re.M)
    assert len([r for r in hub.requests if r.startswith("GET /cdn")]) <= 2  # headers
    # A machine without internet has its part from rank 0, to whom the connection breaks off.
    hub.drops = 2
    group = machines(tmp_path / "mac0", 2)
    job = group.run("generate", "SHARDMLX_TEST_OFFLINE=1", *say)
    assert job.answer == plain.answer
    assert re.search(
        r"^weights: [\d.]+ [GMK]iB over MPI, [\d.]+ [GMK]iB from the hub in", job.stdout, re.M
    )


def test_dora_begins_with_whole_rows(small: Path, pirate: Path, tmp_path: Path) -> None:
    """A rank with tensor shares, which has no model, is sent more than its columns for it."""
    group, losses = machines(tmp_path, 2, small), []
    shutil.copytree(pirate, group.homes[0] / "data")
    words = ("--model", "model", "--data", "data", *TRAIN, "--fine-tune-type", "dora")
    for ranks, how in ((1, ()), (2, ("--tensor-parallel", "2"))):
        some = Machines(group.homes[:ranks])
        some.run("train", *words, *how, "--metrics-file", f"{ranks}.jsonl").well()
        metrics = group.homes[0] / f"{ranks}.jsonl"
        losses.append([each["loss"] for each in events(metrics, "train")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
