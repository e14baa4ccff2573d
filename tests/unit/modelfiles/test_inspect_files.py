"""``python -m shardmlx.inspect``: what it shows, and how it ends on bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmlx.main import main
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import inspect_files, part_of, rows
from shardmlx.models.family import APPROXIMATE
from shardmlx.planning.inspection import LINE, divided
from shardmlx.planning.weight_split import Split, divide
from testbed.family_configs import LAYERS
from testbed.tiny_models import save_model_directory
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.fake_models import (
    MISTRAL_7B,
    TINY,
    model_files,
    write,
)
from tests.helpers.hub_server import text_file

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return str(write(tmp_path / "tiny", model_files(TINY, shards=2)))


def output(capsys: Capture, *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def split_of(model: str, *arguments: str) -> Split:
    split = divided(LINE.load([model, *arguments]), inspect_files(open_model(model)))
    assert split is not None
    return split


def bytes_of(split: Split) -> list[int]:
    """The bytes that each rank holds of a stage."""
    return [split.held(stage, share)[1] for stage, _, share in split.places]


def to_generate(split: Split) -> list[float]:
    return [split.nbytes(stage, share) for stage, _, share in split.places]


def error_of(capsys: Capture, *arguments: str) -> str:
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardmlx: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


# What it shows


def test_layers_that_are_alike_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    model = str(write(tmp_path / "mistral", model_files(MISTRAL_7B)))
    assert output(capsys, model).splitlines() == [
        model,
        "mistral: 32 layers, hidden 4096, ffn 14336, 32/8 heads, vocabulary 32768, untied head",
        "trains and generates",
        "291 tensors, 7.25 B parameters, 13.50 GiB of BF16",
        "1 file of 13.50 GiB, of which only the headers were read",
        "",
        "part           tensors     parameters  dtype  quantisation          bytes  files",
        "embedding            1       134.22 M  BF16   -                  0.25 GiB  model",
        "layers 0-31     32 x 9  32 x 218.11 M  BF16   -             32 x 0.41 GiB  model",
        "norm and head        2       134.22 M  BF16   -                  0.25 GiB  model",
    ]


def test_quantisation_is_shown_with_its_overrides(tmp_path: Path) -> None:
    quantization = {
        "bits": 4,
        "group_size": 32,
        "lm_head": {"bits": 8, "group_size": 64},
        "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 32},
    }
    model = str(write(tmp_path, model_files(TINY | {"quantization": quantization})))
    four, eight = "4-bit, group 32", "8-bit, group 32"
    inspection = inspect_files(open_model(model))
    found = {
        name: {*parts[0].quantisations} for name, parts in rows(inspection, fold=False).items()
    }
    assert found["embedding"] == found["layer 0"] == found["layer 3"] == {four}
    assert found["layer 1"] == {four, eight}
    assert found["norm and head"] == {"8-bit, group 64"}
    assert [*rows(inspection)] == [
        "embedding", "layer 0", "layer 1", "layers 2-3", "norm and head",
    ]  # fmt: skip
    # As many parameters as before they were packed.
    plain = write(tmp_path / "plain", model_files(TINY))
    assert inspection.whole.parameters == inspect_files(open_model(str(plain))).whole.parameters


def test_a_family_that_is_not_declared_is_read_from_its_code(
    tmp_path: Path, capsys: Capture
) -> None:
    save_model_directory(tmp_path, UNDECLARED["jamba"])
    model = str(tmp_path)
    shown = output(capsys, model)
    assert APPROXIMATE in shown
    assert "generates, but cannot be trained" in shown
    assert "jamba: 4 layers, hidden 32, ffn 64, 4/2 heads, vocabulary 97" in shown
    split = split_of(model, "--pipeline-stages", "2")
    assert split.stage_map.partition.ranges == ((0, 2), (2, 4))


def test_a_model_that_cannot_run_is_shown_with_the_reason(tmp_path: Path, capsys: Capture) -> None:
    save_model_directory(tmp_path, UNDECLARED["talkie"])
    shown = output(capsys, str(tmp_path))
    assert "cannot run: mlx-lm's model of type 'talkie' cannot be cut into stages" in shown
    assert len(rows(inspect_files(open_model(str(tmp_path))), fold=False)) > LAYERS


def test_heads_are_those_of_layers_that_have_some(tmp_path: Path, capsys: Capture) -> None:
    save_model_directory(tmp_path, UNDECLARED["qwen3_5"])
    assert "4/2 heads" in output(capsys, str(tmp_path))


# The split


@pytest.mark.parametrize("tied", [False, True])
def test_the_stages_together_hold_every_tensor_once(tmp_path: Path, tied: bool) -> None:
    """But for a tied matrix, which the first stage and the last hold."""
    config = TINY | {"tie_word_embeddings": tied}
    inspection = inspect_files(open_model(str(write(tmp_path, model_files(config)))))
    for stages in range(1, 5):
        split = Split(inspection, divide(inspection, "balanced", stages))
        names = [t.name for stage in range(stages) for t in split.stage(stage).tensors]
        twice = ["model.embed_tokens.weight"] if tied and stages > 1 else []
        assert sorted(names) == sorted([*inspection.files.tensors, *twice])


def test_a_stage_map_says_who_runs_what(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(
        "stages: [{num_layers: 1, rank: 0, host: a}, {num_layers: 1, rank: 1},"
        " {num_layers: 1, rank: 1}, {num_layers: 1, rank: 0}]"
    )
    split = split_of(tiny, "--stage-map", str(path))
    assert [rank for _, rank, _ in split.places] == [0, 1, 1, 0]
    assert [split.host(rank) for _, rank, _ in split.places] == ["a", None, None, "a"]
    assert [len(split.stage(stage).tensors) for stage in range(4)] == [1 + 9, 9, 9, 9 + 2]
    assert len(split.rank(0).tensors) == 1 + 9 + 9 + 2


def test_hosts_show_their_share_of_memory(tiny: str, tmp_path: Path, capsys: Capture) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("big slots=1  # memory=1GiB flops=3T\nsmall slots=1  # memory=3MiB flops=1T\n")
    split = split_of(tiny, "--hostfile", str(hosts))
    assert [split.host(rank) for rank in (0, 1)] == ["big", "small"]
    assert split.stage_map.partition.ranges == ((0, 3), (3, 4))
    text = output(capsys, tiny, "--hostfile", str(hosts))
    share = bytes_of(split)[1] / 2**21  # a Mac lets the GPU use two thirds
    assert f"{share:.1%} of 2.0 MiB" in text.splitlines()[-1]


def test_generating_takes_keys_and_values_of_every_token(tiny: str) -> None:
    short, long = (
        split_of(tiny, "--pipeline-stages", "2", "--context", str(tokens), "--sequences", "3")
        for tokens in (4096, 8192)
    )
    token = 2 * TINY["num_key_value_heads"] * 16 * 2  # k and v of a layer, heads of 16, bf16
    for stage, (start, stop) in enumerate(long.stage_map.partition.ranges):
        added = to_generate(long)[stage] - to_generate(short)[stage]
        assert added == 3 * 4096 * token * (stop - start)
        assert to_generate(long)[stage] > bytes_of(long)[stage]


def test_shares_of_a_stage_have_fewer_heads_and_columns(tiny: str, tmp_path: Path) -> None:
    hosts, given = tmp_path / "hosts", ("--tensor-parallel", "2", "--context", "4096")
    hosts.write_text("a slots=1 # bandwidth=300GB/s\nb slots=1 # bandwidth=100GB/s\n")
    (whole,) = bytes_of(split_of(tiny, "--pipeline-stages", "1"))
    split = split_of(tiny, *given)
    assert [rank for _, rank, _ in split.places] == [0, 1]
    first, second = bytes_of(split)
    assert first == second
    layers = sum(layer.nbytes for layer in split.inspection.layers)
    assert whole - first == pytest.approx(layers / 2, rel=0.02)  # norms are whole
    assert to_generate(split)[0] > first == 2 * split.held(0, 0)[0]
    split = split_of(tiny, *given, "--hostfile", str(hosts))
    assert [split.host(rank) for rank in (0, 1)] == ["a", "b"]
    first, second = bytes_of(split)
    assert first > second


def test_memory_makes_room_for_keys_and_values(tiny: str, tmp_path: Path, capsys: Capture) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1 # wired=8MiB\nb slots=1 # wired=32MiB\n")
    common = (tiny, "--hostfile", str(hosts), "--partitioner", "memory")
    split = split_of(*common, "--context", "20000")
    assert split.stage_map.partition.ranges == ((0, 1), (1, 4))
    for rank, needed in enumerate(to_generate(split)):
        assert needed <= (split.memory(rank) or 0)
    assert "too much" in error_of(capsys, *common, "--context", "1000000")


def test_a_rank_lists_the_tensors_that_it_holds(tiny: str, capsys: Capture) -> None:
    common = (tiny, "--pipeline-stages", "3")
    header, *lines = output(capsys, *common, "--rank", "1").splitlines()
    assert header.split() == ["tensor", "dtype", "shape", "bytes", "file"]
    places, total = open_model(tiny).tensors, 0
    for line in lines:
        name, dtype, *shape, nbytes, file = line.replace(" x ", " ").split()
        place = places[name]
        assert (dtype, file) == (place.dtype, place.file)
        assert (*map(int, shape),) == place.shape
        assert int(nbytes) == place.nbytes
        total += place.nbytes
    assert total == bytes_of(split_of(*common))[1]


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline-stages", "5"], "at most 4"),
        (["--pipeline-stages", "0"], "--pipeline-stages is 0"),
        (["--pipeline-stages", "two"], "'two'"),
        (["--pipeline-stages", "2", "--rank", "2"], "--rank 2"),
        (["--pipeline-stages", "2", "--rank", "-1"], "--rank is -1"),
        (["--rank", "0"], "--rank needs a split"),
        (["--partitioner", "uniform"], "--partitioner needs a split"),
        (["--pipeline-stages", "2", "--partitioner", "best"], "'best'"),
        (["--pipeline-stages", "2", "--context", "0"], "--context is 0"),
        (["--context", "9"], "--context needs a split"),
        (["--tensor-parallel", "2", "--rank", "0"], "--rank is 0"),
        (["--tensor-parallel", "3"], "fewer heads of keys and values than ranks: 2"),
        (["--stage-map", "nowhere.yaml"], "nowhere.yaml"),
        (["--hostfile", "nowhere"], "nowhere"),
        (["--colour"], "'--colour'"),
    ],
)
def test_bad_arguments_end_in_one_line_and_status_2(
    tiny: str, capsys: Capture, arguments: list[str], message: str
) -> None:
    assert message in error_of(capsys, tiny, *arguments)


def test_a_map_or_hostfile_that_does_not_fit_is_refused(
    tiny: str, tmp_path: Path, capsys: Capture
) -> None:
    path, hosts = tmp_path / "map.yaml", tmp_path / "hosts"
    of_map, of_hosts = ("--stage-map", str(path)), ("--hostfile", str(hosts))
    path.write_text("stages: [{num_layers: 3, host: a}, {num_layers: 2, host: b}]")
    assert "5 layers (3 + 2)" in error_of(capsys, tiny, *of_map)
    path.write_text("stages: [{num_layers: 3, host: 10.0.0.1}, {num_layers: 1, host: 10.0.0.2}]")
    hosts.write_text("10.0.0.1 slots=1\n10.0.0.3 slots=1\n")
    for more, named in (
        ((), "rank 1 on host 10.0.0.2"),
        (("--partitioner", "uniform"), "--partitioner"),
        (("--pipeline-stages", "3"), "--pipeline-stages is 3"),
    ):
        assert named in error_of(capsys, tiny, *of_map, *of_hosts, *more)
    assert "2 slots" in error_of(capsys, tiny, *of_hosts, "--pipeline-stages", "4")


@pytest.mark.parametrize("number", ["99999999", "9" * 5000, "10000"])
def test_a_layer_beyond_all_models_is_none(number: str) -> None:
    assert part_of(f"layers.{number}.weight", None) == "other"


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("model.safetensors", b"\0" * 8, "model.safetensors"),
        ("config.json", TINY | {"hidden_size": "big"}, "hidden_size is 'big'"),
        ("config.json", TINY | {"quantization": 4}, "quantization is 4"),
        ("config.json", TINY | {"num_hidden_layers": 2**70}, "10000"),
    ],
)
def test_a_damaged_model_ends_in_one_line_that_names_it(
    tmp_path: Path, capsys: Capture, name: str, content: Any, named: str
) -> None:
    files = model_files(TINY) | {name: text_file(content)}
    assert named in error_of(capsys, str(write(tmp_path, files)))


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardmlx.planning.inspection.read_model", interrupted)
    assert main(["inspect", tiny]) == 130


def test_a_reader_that_goes_away_hears_no_complaint_but_the_command_is_not_done(tiny: str) -> None:
    command = [sys.executable, "-m", "shardmlx.inspect", tiny, "--all-layers"]
    ours, its = os.pipe()
    os.close(ours)
    done = subprocess.run(command, stdout=its, stderr=subprocess.PIPE, text=True, check=False)
    os.close(its)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
