"""``python -m shardmlx.plan MODEL --hostfile F``: what it prints, writes and refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardmlx.config.train import LINE, TrainConfig
from shardmlx.hosts.launch_options import read_options
from shardmlx.main import main
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.hostfile import read_hostfile
from shardmlx.planning.training_plan import plan_training
from testbed.tiny_models import tiny_config
from tests.helpers.fake_models import MISTRAL_7B, write_config

HOSTS = """\
studio.local slots=1  # memory=64GiB flops=27T link=40Gbps latency=30us
mini.local slots=1    # memory=16GiB flops=4T link=10Gbps
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = tiny_config(layers=16, hidden_size=256, intermediate_size=512)
    return write_config(tmp_path / "model", config)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return path


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return captured.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("shardmlx: error: ").rstrip()


def test_a_line_for_each_rank_speed_and_what_binds_it(
    model: Path, hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, model, "--hostfile", hosts, "--data-parallel", 1, "--schedule", "1f1b")
    lines = text.splitlines()
    assert lines[0].startswith("best of ")
    assert lines[2].split()[:4] == ["rank", "host", "layers", "weights"]
    assert [line.split()[:2] for line in lines[3:5]] == [["0", "studio.local"], ["1", "mini.local"]]
    assert "tokens/s" in text
    assert "FLOP/s at 60% of the machines' peak" in text
    assert "\nbottleneck: " in text


def test_links_that_are_not_known_are_named_where_they_would_count(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "unlinked"
    hosts.write_text("a slots=1 # flops=1T link=1Gbps\nb slots=1 # flops=1T\n")
    assert "links of b not known: messages cost nothing" in output(
        capsys, model, "--hostfile", hosts
    )
    hosts.write_text("a slots=2 # flops=1T\n")
    assert "links of" not in output(capsys, model, "--hostfile", hosts)


def test_a_way_that_may_be_faster_but_was_never_measured_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Divided weights of 8B in 16 bits on two Macs of 16 GB: 11% faster by the prediction."""
    model = write_config(tmp_path / "8b", MISTRAL_7B | {"vocab_size": 128256})
    asked = (model, "--machines", "M4 16GB, M4 16GB", "--batch-size", 8, "--max-seq-length", 1024)
    lines = output(capsys, *asked).splitlines()
    assert "--zero 3" not in lines[0]
    (line,) = (line for line in lines if line.startswith("with --zero 3: "))
    said, _, reason = line.partition("; not chosen: ")
    (times,) = re.findall(r"(\S+) times as fast", said)
    assert float(times) > 1.0
    assert "not been measured" in reason
    assert "--zero 3" not in lines[-1]
    (shares,) = (line for line in lines if line.startswith("with --tensor-parallel 2: "))
    assert "times as long" in shares
    assert "not chosen" not in shares
    asked_for = output(capsys, *asked, "--zero", 3)
    assert "--zero 3" in asked_for.splitlines()[0]
    assert "not chosen" not in asked_for


def test_the_stage_map_that_it_writes_is_the_plan(
    model: Path, hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map.yaml"
    output(capsys, model, "--hostfile", hosts, "-o", path)
    stage_map = read_stage_map(path)
    chosen = plan_training(
        TrainConfig.from_flat(model=str(model)), read_hostfile(hosts)
    ).plan.stage_map
    assert (stage_map.partition, stage_map.placement) == (chosen.partition, chosen.placement)
    assert stage_map.model == str(model)


def test_the_command_that_it_prints_is_the_run_that_it_planned(
    model: Path, hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--fine-tune-type", "full", "--num-layers", "4", "--batch-size=8"]
    given += ["--micro-batch-size", "2", "--optimizer", "adamw"]
    text = output(capsys, model, "--hostfile", hosts, "-o", tmp_path / "map.yaml", *given)
    words = shlex.split(text.splitlines()[-1])
    assert words[:2] == ["shardmlx", "launch"]
    launch = read_options(words[2:])
    assert (launch.ranks, launch.command) == (2, "train")
    config = LINE.load(launch.options)
    assert (config.machines.hostfile, config.sets.data) == (str(hosts), "DATA")
    assert (config.source.model, config.tune.fine_tune_type, config.tune.num_layers) == (
        str(model),
        "full",
        4,
    )
    assert (config.batch.batch_size, config.batch.micro_batch_size, config.tune.optimizer) == (
        8,
        2,
        "adamw",
    )
    assert config.layout.stage_map == str(tmp_path / "map.yaml")


def test_hosts_without_names_of_their_own_are_left_out_of_the_map(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "here"
    hosts.write_text("localhost slots=1 # flops=1T\n10.0.0.2 slots=1 # flops=1T\n")
    output(capsys, model, "--hostfile", hosts, "-o", tmp_path / "map.yaml", "--data-parallel", 1)
    assert set(read_stage_map(tmp_path / "map.yaml").hosts) == {None}


def test_a_given_stage_map_is_predicted_as_it_is(
    model: Path, hosts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "map.yaml"
    path.write_text("stages:\n  - num_layers: 5\n  - num_layers: 11\n")
    lines = output(capsys, model, "--hostfile", hosts, "--stage-map", path).splitlines()
    assert [line.split()[2] for line in lines[3:5]] == ["0-4", "5-15"]
    message = refusal(capsys, model, "--hostfile", hosts, "--stage-map", path, "--schedule", "zb-v")
    assert "suits no schedule zb-v" in message


def test_the_step_is_drawn_in_the_terminal(
    model: Path, hosts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, model, "--hostfile", hosts, "--timeline", "--data-parallel", 1)
    assert any(line.startswith("r0 ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("hosts", "arguments", "message"),
    [
        (HOSTS, ["--profile", "nowhere.json"], "nowhere.json"),
        (HOSTS, ["-o", "HOSTS/map.yaml"], "map.yaml"),
        (HOSTS, ["--num-layers", "17"], "--num-layers 17: the model has 16 layers"),
        ("a slots=1 # flops=1T\nb slots=1\n", [], "how fast b is"),
        (
            "a slots=1 # flops=1T memory=64GiB\nb slots=1 # memory=1MiB flops=1T\n",
            ["--data-parallel", "1"],
            "HOSTS, line 2: the model does not fit: at best rank 1 (b) would hold",
        ),
    ],
)
def test_bad_input_is_one_line(
    hosts: str,
    arguments: list[str],
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("HOSTS").write_text(hosts)
    assert message in refusal(capsys, model, "--hostfile", "HOSTS", *arguments)
