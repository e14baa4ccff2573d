"""``shardmlx plan --machines`` and ``--max-of``: questions without a hostfile."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from shardmlx.config.train import LINE, TrainConfig
from shardmlx.hosts.launch_options import read_options
from shardmlx.main import main
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.chips import machines_of
from shardmlx.planning.generation_ways import generation_ways
from shardmlx.planning.report.island_lines import exchanges
from shardmlx.planning.training_plan import plan_training
from testbed.tiny_models import tiny_config
from tests.helpers.fake_models import write_config

Capture = pytest.CaptureFixture[str]

PAIR = "M2 16GB, M1 Ultra 64GB"


@pytest.fixture(autouse=True)
def _model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = tiny_config(layers=16, hidden_size=256, intermediate_size=512)
    write_config(Path("model"), config)
    Path("memory").write_text("a slots=1 # memory=16GiB\nb slots=1 # memory=64GiB\n")
    Path("timed").write_text("a slots=1 # memory=1GiB flops=1T\nb slots=1 # memory=1GiB flops=1T\n")


def planned(capsys: Capture, *words: str) -> str:
    assert main(["plan", "model", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: Capture, *words: str) -> str:
    assert main(["plan", "model", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def trained(command: str) -> TrainConfig:
    """Return the options of ``train`` in a command of launch."""
    return LINE.load(read_options(shlex.split(command)[2:]).options)


def test_macs_are_planned_by_name(capsys: Capture) -> None:
    text = planned(capsys, "--machines", PAIR, "--data-parallel", "1", "-o", "map.yaml")
    assert [line[5:].split()[:2] for line in text.splitlines()[3:5]] == [
        ["M2", "16GB"],
        ["M1", "Ultra"],
    ]
    assert "tokens/s" in text
    assert set(read_stage_map("map.yaml").hosts) == {None}
    words = shlex.split(text.splitlines()[-1])
    assert words[2:5] == ["--hostfile", "HOSTFILE", "train"]


@pytest.mark.parametrize("machines", [["--machines", "16GB, 64GB"], ["--hostfile", "memory"]])
def test_memory_alone_says_what_fits_and_no_times(machines: list[str], capsys: Capture) -> None:
    text = planned(capsys, *machines)
    assert text.splitlines()[2].endswith("peak memory      limit")
    assert "times are not known" in text
    assert "tokens/s" not in text
    assert "how fast" in refused(capsys, *machines, "--timeline")


def test_the_longest_sequence_is_in_the_command_that_is_printed(capsys: Capture) -> None:
    text = planned(capsys, "--hostfile", "timed", "--max-of", "seq")
    first, *_, command = text.splitlines()
    length = int(first.removeprefix("longest sequence that fits: ").removesuffix(" tokens"))
    assert trained(command).batch.max_seq_length == length > 2048


def test_a_larger_rank_takes_more_memory_and_is_in_the_command(capsys: Capture) -> None:
    longest = []
    for rank in (8, 512):
        words = ["--hostfile", "timed", "--max-of", "seq", "--lora-rank", str(rank)]
        command = trained(planned(capsys, *words).splitlines()[-1])
        assert command.tune.lora_parameters["rank"] == rank
        longest.append(command.batch.max_seq_length)
    assert longest[0] > longest[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no machines: give --hostfile FILE, or --machines"),
        (["--machines", PAIR, "--hostfile", "timed"], "--machines is given, and --hostfile too"),
        (["--machines", "M2 20GB"], "the nearest is M2 8-core 16GB"),
        (["--machines", "1GB", "--max-of", "seq", "--max-seq-length", "9"], "--max-of seq finds"),
        (["--machines", "1GB", "--max-of", "layers"], "choose from"),
        (["--machines", PAIR, "--island-lines", "20"], "--island-lines 20"),
        (["--machines", PAIR, "--island-lines", "20,nan"], "--island-lines 20,nan"),
        (["--machines", PAIR, "--island-lines", "20,0"], "--island-lines 20,0"),
    ],
)
def test_questions_that_have_no_answer(words: list[str], said: str, capsys: Capture) -> None:
    assert said in refused(capsys, *words)


def test_ways_to_generate_stand_beside_each_other_if_chips_are_known(capsys: Capture) -> None:
    facts = plan_training(TrainConfig.from_flat(model="model"), machines_of(PAIR)).facts
    ways = generation_ways(facts.workload, facts.cluster, facts.lengths.longest[0])
    assert [(len(each.hosts), each.tensor_parallel) for each in ways[:2]] == [(1, 1), (2, 1)]
    assert [*ways[0].hosts] == ["M1 Ultra 64GB"]
    assert ways[0].peak < ways[0].capacity
    beside = ways[1].tokens_per_second / ways[0].tokens_per_second
    lines = planned(capsys, "--machines", PAIR).splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("to generate")]
    assert [line.split()[-1] for line in lines[first + 1 : first + 3]] == ["1.00", f"{beside:.2f}"]
    assert "to generate" not in planned(capsys, "--machines", "16GB, 64GB")


def test_islands_wait_less_the_less_they_send_and_overlap_hides_it(capsys: Capture) -> None:
    choice = plan_training(TrainConfig.from_flat(model="model"), machines_of(PAIR))
    ways = {each.way: each for each in exchanges(choice, [100e6, 20e6])}
    step = choice.prediction.step_seconds
    (plain, short), sums = (
        (ways[each] for each in ("float32", "int8")),
        ways["data parallel, each step"],
    )
    assert plain.seconds == plain.nbytes * 8 / 20e6
    assert plain.waiting == pytest.approx(2 * plain.seconds / (2 * plain.seconds + 100 * step))
    assert short.waiting < plain.waiting < sums.waiting
    assert short.overlapped == 0.0
    assert sums.nbytes == plain.nbytes
    lines = planned(capsys, "--machines", PAIR, "--island-lines", "100,20").splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("2 islands")]
    shown = [line.split("  ")[0] for line in lines[first + 1 : first + 1 + len(ways)]]
    assert shown == [*ways]


def test_what_a_run_would_read_and_a_plan_does_not_is_said(tmp_path: Path, capsys: Capture) -> None:
    """Rows of a run may be shorter: it is planned by them, and the plan is not."""
    plain = planned(capsys, "--machines", PAIR)
    assert "is not read" not in plain
    file = tmp_path / "lora.yaml"
    file.write_text("data: my/rows\nepochs: 2\n")
    for words in (["--data", "my/rows", "--epochs", "2"], ["--config", str(file)]):
        notes = planned(capsys, "--machines", PAIR, *words).splitlines()
        (first,) = [line for line in notes if line.startswith("--data my/rows is not read")]
        assert "--dry-run" in first
        assert [line for line in notes if line.startswith("--epochs 2: ")]
        assert not [line for line in notes if " steps: " in line]


def test_a_sweep_is_planned_with_all_its_runs(tmp_path: Path, capsys: Capture) -> None:
    """Eight adapters take more than one, in one pipeline."""
    file = tmp_path / "sweep.yaml"
    file.write_text("".join(f"r{i}: {{learning_rate: 1.0e-{i}}}\n" for i in range(1, 9)))

    def peaks(*words: str) -> list[float]:
        planned(capsys, "--machines", PAIR, "--num-layers", "-1", *words, "--json", "plan.json")
        found = json.loads(Path("plan.json").read_text())
        assert found["data_parallel"] == 1
        return [rank["peak_memory_bytes"] for rank in found["ranks"]]

    one = peaks("--pipeline-stages", "2")
    all_of_them = peaks("--sweep", str(file))
    assert sum(all_of_them) > sum(one)
    assert "2 replicas" in refused(
        capsys, "--machines", PAIR, "--sweep", str(file), "--data-parallel", "2"
    )
    file.write_text("".join(f"r{i}: {{seed: {i}}}\n" for i in range(17)))
    assert "17 runs" in refused(capsys, "--machines", PAIR, "--sweep", str(file))
