"""GGUF: what mlx-lm writes of a model, read back by MLX and by the gguf package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.gguf import convert_to_gguf

from shardmlx.config.export import ExportOptions
from shardmlx.config.options import OptionError
from shardmlx.conversion.gguf import GGUF_FILE
from shardmlx.errors import UserError
from tests.helpers.exports import export_alone
from tests.helpers.models_and_batches import load_arrays, save_model_directory, tiny_config

pytestmark = pytest.mark.usefixtures("in_haste")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "\u2581": 4, "a": 5, "\u2581a": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteFallback()
    path = tmp_path_factory.mktemp("words")
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "</s>"}))
    return path


def make(path: Path, words: Path, family: str, **overrides: Any) -> Path:
    config = tiny_config(family, layers=2, torch_dtype="float16", **overrides)
    save_model_directory(path, config)
    return Path(shutil.copytree(words, path, dirs_exist_ok=True))


def exported(model: Path, to: Path) -> Path:
    export_alone(ExportOptions(model=str(model), output_dir=str(to), gguf=True))
    assert [path.name for path in to.iterdir()] == [GGUF_FILE]
    return to / GGUF_FILE


def read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    both: Any = mx.load(str(path), return_metadata=True)
    return both[0], both[1]


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_tensors_and_metadata_are_those_of_mlx_lm(family: str, words: Path, tmp_path: Path) -> None:
    model = make(tmp_path / "model", words, family)
    ours, metadata = read(exported(model, tmp_path / "out"))
    weights = load_arrays(model / "model.safetensors")
    halves = {name: array.astype(mx.float16) for name, array in weights.items()}
    config = json.loads((model / "config.json").read_text())
    convert_to_gguf(model, halves, config, str(tmp_path / "theirs.gguf"))
    theirs, expected = read(tmp_path / "theirs.gguf")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape)
        assert mx.array_equal(ours[name], array)
    assert metadata.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(np.array(metadata[key]), np.array(value)), key


def test_the_gguf_package_reads_the_same(words: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    model = make(tmp_path / "model", words, "mixtral")
    path = exported(model, tmp_path / "out")
    reader = gguf.GGUFReader(path)
    read = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    weights = load_arrays(model / "model.safetensors")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.1.ffn_gate_inp.weight": "model.layers.1.block_sparse_moe.gate.weight",
        "blk.0.ffn_down_exps.weight": "model.layers.0.block_sparse_moe.switch_mlp.down_proj.weight",
    }
    for theirs, own in names.items():
        expected = np.array(weights[own].astype(mx.float16))
        assert np.array_equal(read[theirs].reshape(expected.shape), expected), theirs
    assert read["blk.0.attn_norm.weight"].dtype == np.float32
    # Rows of a head, first halves and second halves, alternate.
    q = np.array(weights["model.layers.0.self_attn.q_proj.weight"].astype(mx.float16))
    turned = q.reshape(4, 2, 4, 32).swapaxes(1, 2).reshape(32, 32)
    assert np.array_equal(read["blk.0.attn_q.weight"].reshape(32, 32), turned)
    assert reader.fields["llama.expert_count"].contents() == 4
    assert reader.fields["tokenizer.ggml.tokens"].contents()[:3] == ["<unk>", "<s>", "</s>"]
    assert len(read) == len(weights)


def refusal(model: Path, out: Path) -> str:
    with pytest.raises(UserError) as refused:
        exported(model, out)
    assert not out.exists()
    return str(refused.value)


@pytest.mark.parametrize(
    ("family", "overrides", "why"),
    [
        ("qwen3", {}, "qwen3"),
        ("mistral", {"head_dim": 16}, "head_dim"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
             "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
            "rope_scaling of type llama3",
        ),
        ("llama", {"attention_bias": True}, "attention_bias"),
    ],
)  # fmt: skip
def test_models_of_other_kinds_are_refused_with_the_command_that_converts_them(
    family: str, overrides: dict[str, Any], why: str, words: Path, tmp_path: Path
) -> None:
    message = refusal(make(tmp_path / "model", words, family, **overrides), tmp_path / "out")
    assert why in message
    assert "convert_hf_to_gguf.py" in message


def test_byte_level_tokenizers_and_quantised_models_are_refused(
    small: Path, small_quantised: Path, tmp_path: Path
) -> None:
    assert "byte-level" in refusal(small, tmp_path / "out")
    assert "--dequantize" in refusal(small_quantised, tmp_path / "out")
    with pytest.raises(OptionError, match="--quantize"):
        ExportOptions(model="model", output_dir="out", gguf=True, quantize="4")
