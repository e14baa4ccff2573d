"""Finding what is wrong with a model's files from their headers alone."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import check_model_files
from shardmlx.modelfiles.safetensors_header import PlacedTensor, read_header
from tests.helpers.refusals import refusal


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


A = entry("F32", [2, 2], 0, 16)
B = entry("BF16", [3], 16, 22)


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def error_of(path: Path) -> str:
    caught = refusal(read_header, path)
    assert "\n" not in str(caught)
    assert str(path) in str(caught)
    return str(caught)


def test_a_header_tells_where_the_tensors_lie(tmp_path: Path) -> None:
    path = write(
        tmp_path / "m.safetensors", {"b": B, "a": A, "__metadata__": {"by": "me"}}, b"x" * 22
    )
    header = read_header(path)
    data = len(header.head)
    assert header.tensors == {
        "a": PlacedTensor("m.safetensors", "F32", (2, 2), data, data + 16),
        "b": PlacedTensor("m.safetensors", "BF16", (3,), data + 16, data + 22),
    }
    assert header.file_size == path.stat().st_size == data + 22
    assert header.tensors["b"].nbytes == 6


def test_it_reads_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "scalar": np.array(2.5, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "flags": np.array([True, False, True]),
        "matrix": np.arange(6, dtype=np.int64).reshape(2, 3),
    }
    path = tmp_path / "m.safetensors"
    save_file(arrays, path)
    header = read_header(path)
    content = path.read_bytes()
    assert {name: info.shape for name, info in header.tensors.items()} == {
        name: array.shape for name, array in arrays.items()
    }
    for name, array in arrays.items():
        tensor = header.tensors[name]
        assert content[tensor.start : tensor.end] == array.tobytes()


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (0, "truncated: 8 bytes"),
        (7, "truncated"),
        (8, "header"),
        (-22, "22 bytes are missing, from tensor 'a'"),
        (-6, "6 bytes are missing, from tensor 'b'"),
    ],
)
def test_a_truncated_file_is_found(tmp_path: Path, kept: int, message: str) -> None:
    path = write(tmp_path / "m.safetensors", {"a": A, "b": B}, b"x" * 22)
    path.write_bytes(path.read_bytes()[:kept])
    assert message in error_of(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a": ', "JSON"),
        (b"\xff\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "JSON object"),
        ({"a": 5}, "tensor 'a' cannot be 5"),
        ({"a": A | {"dtype": "F33"}}, "tensor 'a' has dtype 'F33': convert it to one of BOOL,"),
        ({"a": A | {"shape": [2, -2]}}, "'shape': [2, -2]"),
        ({"a": A | {"shape": None}}, "'shape': None"),
        ({"a": A | {"data_offsets": [16]}}, "'data_offsets': [16]"),
        ({"a": A | {"data_offsets": [-16, 0]}}, "'data_offsets': [-16, 0]"),
        ({"a": A | {"shape": [2**40] * 9}}, "tensor 'a' cannot be"),
        ({"a": entry("F32", [2, 3], 0, 16)}, "tensor 'a' cannot be"),
        ({"a": entry("F4", [3], 0, 1)}, "'shape': [3]"),
        ({"a": A, "b": entry("BF16", [3], 12, 18)}, "tensor 'b' overlaps"),
        ({"a": A, "b": entry("BF16", [3], 18, 24)}, "tensor 'b' leaves a hole"),
        ({"a": A}, "has 6 bytes after its last tensor"),
        ({}, "has 22 bytes after its last tensor"),
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: Any, message: str) -> None:
    path = write(tmp_path / "m.safetensors", header, b"x" * 22)
    assert message in error_of(path)


def test_a_header_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001) + b"{}")
    assert "claims a header of 100000001 bytes, over 100000000" in error_of(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "is a git-lfs pointer, not the file: run git lfs pull" in error_of(path)


# A model directory


def model(directory: Path, files: dict[str, dict[str, Any]], index: Any = None) -> Path:
    for name, header in files.items():
        size = max(each["data_offsets"][1] for each in header.values())
        write(directory / name, header, b"x" * size)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    if index is not None:
        text = index if isinstance(index, str) else json.dumps({"weight_map": index})
        (directory / "model.safetensors.index.json").write_text(text)
    return directory


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_every_tensor_has_its_file(tmp_path: Path) -> None:
    files = {FIRST: {"a": A, "b": B}, SECOND: {"c": A}, "consolidated.safetensors": {"a": A}}
    model(tmp_path, files, {"a": FIRST, "b": FIRST, "c": SECOND})
    assert check_model_files(tmp_path) == {
        "a": tmp_path / FIRST,
        "b": tmp_path / FIRST,
        "c": tmp_path / SECOND,
    }


@pytest.mark.parametrize(
    ("file", "remedy"),
    [("pytorch_model.bin", "save_pretrained"), ("x.gguf", "safetensors")],
)
def test_weights_of_other_programs_are_named(file: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"")
    error = refusal(check_model_files, tmp_path)
    assert file in error.problem
    assert remedy in error.remedy


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pointer_of_git_lfs_is_no_file(file: str, tmp_path: Path) -> None:
    model(tmp_path, {"model.safetensors": {"a": A}}, None)
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "run git lfs pull" in str(refusal(check_model_files, tmp_path))


@pytest.mark.parametrize(
    ("files", "index", "message"),
    [
        ({}, None, "has no model*.safetensors"),
        ({"model.safetensors": {"a": A}}, {"a": FIRST}, "remove model.safetensors.index.json"),
        ({FIRST: {"a": A}}, {"a": FIRST, "c": SECOND}, f"{SECOND} is missing"),
        ({FIRST: {"a": A}, "model.safetensors": {"a": A}}, None, "'a' is in both"),
        ({FIRST: {"a": A}}, {"a": FIRST, "b": FIRST}, "tensor 'b'"),
        ({FIRST: {"a": A}}, "{", "weight_map"),
        ({FIRST: {"a": A}}, "[]", "weight_map"),
        ({FIRST: {"a": A}}, {"a": 1}, "weight_map"),
    ],
)
def test_a_model_that_lacks_something_is_named(
    tmp_path: Path, files: dict[str, dict[str, Any]], index: Any, message: str
) -> None:
    model(tmp_path, files, index)
    caught = refusal(check_model_files, tmp_path)
    assert message in str(caught)
    assert str(tmp_path) in str(caught)


def test_a_missing_model_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist: check --model"):
        check_model_files(tmp_path / "nowhere")
