"""An export: where it reads, that it goes on after any end, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.checkpoint.store import FileInfo, Manifest, Store
from shardmlx.common.digests import bytes_digest
from shardmlx.config.export import LINE, ExportOptions
from shardmlx.config.options import OptionError
from shardmlx.conversion import command
from shardmlx.conversion import export as exporting
from shardmlx.conversion.export import texts_of
from shardmlx.conversion.output import WORK, OutputDirectory
from shardmlx.errors import UserError
from shardmlx.loading import partial_copy
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.runtime.slice import Piece
from testbed.tiny_models import tiny_config
from tests.helpers.exports import export_alone
from tests.helpers.hub_server import File, Hub, serve
from tests.helpers.hugging_face_experts import save_experts_one_by_one
from tests.helpers.models_and_batches import save_in_two_files
from tests.helpers.saved_adapters import save_lora

Contents = dict[str, bytes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two files, of three layers, with a tokenizer's files beside it."""
    config = tiny_config(layers=3, tied=True, torch_dtype="bfloat16", eos_token_id=3)
    path = save_in_two_files(tmp_path_factory.mktemp("models") / "tiny", config)
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"eos_token_id": 5}')
    (path / "quantize_config.json").write_text("{}")
    return path


def options(name: Path | str, to: Path, **how: Any) -> ExportOptions:
    return ExportOptions.from_flat(
        **{"model": str(name), "output_dir": str(to), "quantize": "4:32"} | how
    )


def tree(directory: Path) -> Contents:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Contents:
    path = tmp_path_factory.mktemp("expected") / "out"
    export_alone(options(model, path, max_shard=4000))
    return tree(path)


def test_the_directory_has_all_that_a_model_needs(model: Path, expected: Contents) -> None:
    weights = [name for name in expected if name.endswith(".safetensors")]
    assert len(weights) > 3
    assert sorted(expected.keys() - weights) == [
        "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip
    config = json.loads(expected["config.json"])
    assert config["eos_token_id"] == [3, 5]
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}


class Killed(BaseException):
    """An end at which nothing is tidied up."""


CHANGES = "pwrite", "replace", "fsync", "unlink", "rmdir", "ftruncate", "mkdir"


def kill_at(
    monkeypatch: pytest.MonkeyPatch, step: int, changes: Sequence[str] = CHANGES
) -> Callable[[], int]:
    """Change the disk so many times less one from now, and never again; return what counts."""
    count = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if 0 < step <= count:
                raise Killed
            return change(*args, **kwargs)

        return changed

    for name in changes:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: count


def test_killed_anywhere_it_goes_on_to_the_same_tree(
    model: Path, expected: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_copy, "_FLUSH_EVERY", 1500)
    how = options(model, tmp_path / "counted", max_shard=4000)
    with monkeypatch.context() as patch:
        changes = kill_at(patch, 0)
        export_alone(how)
    somewhere = random.Random(3).sample(range(4, changes() - 12), 8)
    for number in [1, 2, 3, *somewhere, *range(changes() - 12, changes() + 1)]:
        out = tmp_path / str(number)
        how = options(model, out, max_shard=4000)
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            with pytest.raises(Killed):
                export_alone(how)
        if (out / WORK).exists() or not out.exists() or not any(out.iterdir()):
            export_alone(how)
        assert tree(out) == expected, number


def test_what_is_there_is_not_computed_again_unless_it_is_damaged(
    model: Path, expected: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_copy, "_FLUSH_EVERY", 1)
    out = tmp_path / "out"
    how = options(model, out, max_shard=4000)
    with monkeypatch.context() as patch:
        kill_at(patch, 50, ["fsync"])  # two for each tensor
        with pytest.raises(Killed):
            export_alone(how)
    record = (out / WORK / "weights" / "complete-tensors.jsonl").read_text().split()
    shard = min((out / WORK / "weights").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    written: list[str] = []
    add = partial_copy.PartialCopy.add

    def watched(self: partial_copy.PartialCopy, name: str, digest: bytes | None = None) -> None:
        written.append(name)
        add(self, name, digest)

    monkeypatch.setattr(partial_copy.PartialCopy, "add", watched)
    export_alone(how)
    tensors = len(open_model(str(out)).tensors)
    assert len(record) > 8
    assert len(written) == tensors - len(record) // 4 + 1
    assert tree(out) == expected


def test_a_checkpoint_is_fused_like_the_adapters_of_the_same_run(
    model: Path, tmp_path: Path
) -> None:
    lora = {"rank": 2, "scale": 3.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    mx.random.seed(2)
    weights = {
        f"model.layers.2.mlp.up_proj.lora_{part}": mx.random.normal(sides)
        for part, sides in (("a", (32, 2)), ("b", (2, 64)))
    }
    how = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": lora}
    adapters = save_lora(tmp_path / "adapters", weights, 1, lora)
    store = Store(tmp_path / "checkpoints")
    partial = store.begin(7)
    infos, (name_a, name_b) = [], weights
    # Of ranks with tensor shares.
    for number, columns in enumerate(((0, 48), (48, 64))):
        file, piece = f"weights-0{number}.safetensors", Piece((columns,), 64, 1)
        held = {name_b: piece.of(weights[name_b])} | ({} if number else {name_a: weights[name_a]})
        metadata = {"pieces": json.dumps({name_b: piece})}
        mx.save_safetensors(str(partial / file), held, metadata)
        content = (partial / file).read_bytes()
        infos.append(FileInfo(file, len(content), bytes_digest(content)))
    store.commit(Manifest(7, tuple(infos), {"options": how}, {}, {}, {}))
    trees = []
    for number, path in enumerate((adapters, store.directory, store.path(7))):
        export_alone(options(model, tmp_path / str(number), adapter_path=str(path)))
        trees.append(tree(tmp_path / str(number)))
    assert trees[0] == trees[1] == trees[2]
    (store.path(7) / file).write_bytes(content[:-1] + b"?")
    with pytest.raises(UserError, match=r"weights-01.safetensors: its sha256 "):
        export_alone(options(model, tmp_path / "4", adapter_path=str(store.path(7))))


WATCHED = """
import shardmlx.common.prepared
import sys
from shardmlx.loading.partial_copy import PartialCopy
empty = PartialCopy.empty
def watched(copy):
    files = copy.directory.glob("*.safetensors")
    print(sum(file.stat().st_blocks * 512 for file in files), file=sys.stderr)
    empty(copy)
PartialCopy.empty = watched
from shardmlx.main import main
sys.exit(main(['export', *sys.argv[1:]]))
"""


def test_from_the_hub_there_is_never_more_than_one_tensor_of_the_model_here(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    save_experts_one_by_one(model, tiny_config("mixtral", layers=2, torch_dtype="bfloat16"))
    (model / "tokenizer.json").write_text("{}")
    local = tmp_path / "local"
    export_alone(options(model, local))
    files = {
        path.name: File(path.read_bytes(), path.stat().st_size, path.suffix == ".safetensors")
        for path in model.iterdir()
    }
    with serve(Hub({"me/tiny": files}, drops=2)) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, "me/tiny", "-o", tmp_path / "out", "--quantize=4:32"],
            env={**os.environ, **environment, "no_proxy": "*"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    ours, theirs = tree(tmp_path / "out"), tree(local)
    assert b"base_model: me/tiny" in ours.pop("README.md")
    del theirs["README.md"]
    assert ours == theirs
    most = max(place.nbytes for place in open_model(str(model)).tensors.values())
    on_disk = [int(line) for line in done.stderr.split()]
    # A file system counts in blocks: of a tensor two may be half full, and each file has a header.
    assert max(on_disk) <= most + (2 + 2 * 2) * 4096
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def refusal(how: ExportOptions) -> str:
    with pytest.raises(UserError) as refused:
        export_alone(how)
    return str(refused.value)


def test_what_is_in_the_directory_is_never_touched(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "note"
    file.write_text("mine")
    for out in (model, tmp_path, file):
        assert f"-o {out}" in refusal(options(model, out))
    assert file.read_text() == "mine"


def test_another_export_is_not_gone_on_with(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        kill_at(patch, 60)
        with pytest.raises(Killed):
            export_alone(options(model, out))
    before = tree(out)
    assert "another quantize" in refusal(options(model, out, quantize="8:32"))
    assert "another layout" in refusal(options(model, out, max_shard=9))
    assert tree(out) == before


def test_an_export_into_the_directory_of_another_one_is_refused(tmp_path: Path) -> None:
    first, second = (OutputDirectory(tmp_path / "out") for _ in range(2))
    first.begin({"model": "one"})
    with pytest.raises(UserError) as refused:
        second.begin({"model": "one"})
    assert str(tmp_path / "out") in refused.value.problem
    first.complete({"config.json": b"{}"})
    with pytest.raises(UserError):
        second.publish()
    first.publish()
    first.release()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]


def test_a_small_disk_is_refused_with_numbers_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    out = tmp_path / "new" / "out"
    assert f"{out}: 64.0 MiB" in refusal(options(model, out))
    assert not out.parent.exists()


def test_a_disk_that_fills_up_meanwhile_is_named(
    model: Path, expected: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = options(model, tmp_path / "out", max_shard=4000)
    pwrite, left = os.pwrite, 30

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", filling)
        assert "the disk is full" in refusal(how)
    export_alone(how)
    assert tree(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"model": "no/such"}, "there is no directory no/such here"),
        ({"adapter_path": "nowhere"}, "--adapter-path nowhere is not a directory"),
        ({"quantize": "4:128"}, "--quantize finds nothing to quantise"),
        pytest.param(
            {"device": "gpu"},
            "--device gpu: MLX has none here",
            marks=pytest.mark.skipif(mx.is_available(mx.Device(mx.gpu)), reason="MLX has a GPU"),
        ),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    how: dict[str, str], message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert message in refusal(options(model, tmp_path / "out", **how))
    assert not (tmp_path / "out").exists()


def test_adapters_of_another_model_and_whole_models_are_refused(
    model: Path, tmp_path: Path
) -> None:
    message = refusal(options(model, tmp_path / "out", adapter_path=str(model)))
    assert f"--adapter-path {model} is a whole model" in message
    adapters = save_lora(tmp_path / "adapters", {"lora_a": mx.ones(1)}, 1, {}, "full")
    message = refusal(options(model, tmp_path / "out", adapter_path=str(adapters)))
    assert f"--adapter-path {adapters}" in message
    assert "lora_a" in message


@pytest.mark.parametrize("text", ["7", "4:48", "8:32:mxfp4", "4:32:int4", "mixed_3_6:64:affine"])
def test_ways_of_quantising_that_there_are_not(text: str) -> None:
    with pytest.raises(UserError, match=f"--quantize is {text!r}: "):
        LINE.load(["model", "-o", "out", "--quantize", text])


def test_flags_of_mlx_lm_say_what_to_use_here() -> None:
    with pytest.raises(UserError, match="--upload-repo is not here: upload what is fin"):
        LINE.load(["model", "-o", "out", "--upload-repo", "me/it"])
    with pytest.raises(OptionError, match="output_dir is empty"):
        ExportOptions.from_flat(model="model", output_dir="")


def test_verify_finds_what_is_wrong_with_the_files(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(out: Path) -> int:
        return command.run([str(model), "-o", str(out), "--quantize", "4:32", "--verify"])

    assert run(tmp_path / "well") == 0
    said = capsys.readouterr().out
    assert "tensors against the family llama: names, shapes, packing" in said

    def wrong(*args: Any) -> dict[str, bytes]:
        texts = texts_of(*args)
        config = json.loads(texts["config.json"]) | {"vocab_size": 98}
        return {**texts, "config.json": json.dumps(config).encode()}

    monkeypatch.setattr(exporting, "texts_of", wrong)
    assert run(tmp_path / "badly") == 1
