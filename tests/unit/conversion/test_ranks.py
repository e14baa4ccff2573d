"""Several ranks export what one does; each its own layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.export import ExportOptions
from shardmlx.conversion import command
from shardmlx.conversion.command import divide_layers, export
from shardmlx.conversion.lazy_model import build_lazily
from shardmlx.conversion.output import WORK, OutputDirectory
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.verify import verify
from tests.helpers.exports import export_alone
from tests.helpers.family_configs import CONFIGS
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import save_model_directory, tensors, tiny_config
from tests.helpers.saved_adapters import save_random_lora

pytestmark = pytest.mark.usefixtures("in_haste")

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(layers=3, tied=True)
    path = save_model_directory(tmp_path_factory.mktemp("models") / "tiny", config)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "pirate"
    return save_random_lora(path, model, 3, keys=["mlp.up_proj"])


def on_ranks(model: Path, outs: Sequence[Path], **how: Any) -> list[bool]:
    def work(transport: LocalTransport) -> bool:
        out = outs[transport.rank]
        options = ExportOptions(model=str(model), output_dir=str(out), quantize="4:32", **how)
        return export(options, transport, QUIET)

    return LocalNetwork(len(outs), timeout=20).run(work)


@pytest.fixture(scope="module")
def alone(model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "out"
    how: Any = {"quantize": "4:32", "adapter_path": str(adapters)}
    export_alone(ExportOptions(model=str(model), output_dir=str(path), **how))
    assert verify(open_model(str(path))).faults == ()
    return path


def with_apart(tmp_path: Path, count: int) -> list[Path]:
    return [tmp_path / f"mac{rank}" / "out" for rank in range(count)]


def test_ranks_on_one_disk_write_one_model(
    model: Path, adapters: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert on_ranks(model, [out] * 3, adapter_path=str(adapters)) == [True] * 3
    assert tensors(out) == tensors(alone)
    assert (out / "config.json").read_bytes() == (alone / "config.json").read_bytes()
    assert len(list(out.glob("model-*-of-00003.safetensors"))) == 3
    assert not (out / WORK).exists()


@pytest.mark.parametrize("weights", ["auto", "rank0"])
def test_each_machine_keeps_its_own_files(
    weights: str, model: Path, adapters: Path, alone: Path, tmp_path: Path
) -> None:
    outs = with_apart(tmp_path, 2)
    assert on_ranks(model, outs, adapter_path=str(adapters), weights=weights) == [False] * 2
    assert [path.name for path in outs[1].iterdir()] == ["model-00002-of-00002.safetensors"]
    (outs[1] / "model-00002-of-00002.safetensors").rename(
        outs[0] / "model-00002-of-00002.safetensors"
    )
    assert tensors(outs[0]) == tensors(alone)


def test_a_file_in_the_place_of_the_directory_is_refused_on_all_ranks(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="out is a file"):
        on_ranks(model, [tmp_path / "out"] * 2)


@pytest.mark.parametrize("place", ["write_files", "complete"])
def test_ranks_go_on_after_any_end(
    place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = with_apart(tmp_path, 2)
    with monkeypatch.context() as patch:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise UserError("killed")

        patch.setattr(OutputDirectory if place == "complete" else command, place, fail)
        with pytest.raises(UserError, match="killed"):
            on_ranks(model, outs)
    if place == "complete":
        # One machine has moved its files up, and the other one not.
        with monkeypatch.context() as patch:
            publish = OutputDirectory.publish

            def some(self: OutputDirectory) -> None:
                if self.path == outs[1]:
                    publish(self)

            patch.setattr(OutputDirectory, "publish", some)
            on_ranks(model, outs)
        assert (outs[0] / WORK).exists()
    on_ranks(model, outs)
    names = {path.name for out in outs if out.exists() for path in out.iterdir()}
    assert names == {
        "README.md", "config.json", "model-00001-of-00002.safetensors", "tokenizer.json",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    }  # fmt: skip


def test_layers_are_divided_by_what_is_to_be_written(tmp_path: Path) -> None:
    config = CONFIGS["deepseek_v3"]  # a dense layer, then experts
    save_model_directory(tmp_path / "model", config)
    options = ExportOptions(model="model", output_dir="out")
    model = build_lazily(tmp_path / "model", None, options)
    shape = read_shape(config)
    assert divide_layers(model, shape, 2) == [(0, 2), (2, 4)]
    assert divide_layers(model, shape, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(UserError, match="5 ranks, but the model has 4 layers"):
        divide_layers(model, shape, 5)
