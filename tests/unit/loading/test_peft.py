"""PEFT's adapters, in and out, beside the logits that PEFT computed with them on torch.

``scripts/peft_adapters.py`` makes what is in ``tests/helpers/peft``.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.build import build_model, build_to_generate
from shardmlx.loading.peft import PEFT_FILE, check_peft, to_peft
from shardmlx.main import main
from tests.helpers.saved_adapters import save_random_lora

MADE = Path(__file__).parents[2] / "helpers/peft"

MODEL = MADE / "model"

CASES = ("lora", "rslora", "dora", "patterns", "embedding", "one-layer")


def tensors_of(file: Path) -> dict[str, mx.array]:
    found = mx.load(str(file))
    assert isinstance(found, dict)
    return found


def apart(adapters: Path | None, wanted: Path) -> float:
    """Return how far our logits are from those that PEFT has found."""
    path = None if adapters is None else str(adapters)
    return distance(build_to_generate(MODEL, dtype=None, adapter_path=path, seed=None), wanted)


def distance(model: nn.Module, wanted: Path) -> float:
    known = tensors_of(wanted / "logits.safetensors")
    return float(mx.abs(model(known["tokens"]) - known["logits"]).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str) -> None:
    assert apart(MADE / case, MADE / case) < 1e-5
    assert apart(None, MADE / case) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_for_peft_are_the_tensors_that_it_wrote(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["export", str(MODEL), "--adapter-path", str(MADE / case), "--peft", "-o", str(out)]
    assert main(words) == 0
    theirs = tensors_of(MADE / case / PEFT_FILE)
    ours = tensors_of(out / PEFT_FILE)
    assert ours.keys() == theirs.keys()
    content = json.loads((out / "adapter_config.json").read_text())
    check_peft(content)
    if case not in ("patterns", "rslora"):  # of one rank, or with its scale in alpha
        assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)
        original = json.loads((MADE / case / "adapter_config.json").read_text())
        for key in ("peft_type", "task_type", "r", "lora_alpha", "use_dora", "bias"):
            assert content[key] == original[key], key
    targets = {name.partition(".lora_")[0] for name in theirs}
    assert {f"base_model.model.{name}" for name in content["target_modules"]} == targets
    assert apart(out, MADE / case) < 1e-5


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_of_mlx_lm_come_back_from_peft_with_the_same_logits(
    dora: bool, tmp_path: Path
) -> None:
    own = save_random_lora(tmp_path / "own", MODEL, 1, dora=dora, keys=["mlp.up_proj"], scale=2.5)
    words = ["export", str(MODEL), "--adapter-path", str(own), "--peft"]
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["use_dora"]) == (4, 10, dora)
    assert content["target_modules"] == ["model.layers.1.mlp.up_proj"]
    tokens = mx.array([[1, 2, 3]])
    logits = [
        build_to_generate(MODEL, dtype=None, adapter_path=str(path), seed=None)(tokens)
        for path in (own, tmp_path / "out")
    ]
    assert float(mx.abs(logits[0] - logits[1]).max()) < 1e-6


@pytest.mark.parametrize("case", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("named", ["", PEFT_FILE])
def test_a_run_begins_with_their_effect_at_its_own_scale(case: str, named: str) -> None:
    config = json.loads((MADE / case / "adapter_config.json").read_text())
    paths = (name.partition(".lora_")[0] for name in tensors_of(MADE / case / PEFT_FILE))
    keys = sorted({re.sub(r".*\.layers\.\d+\.", "", path) for path in paths})
    lora = {"rank": config["r"], "scale": 20.0, "dropout": 0.0, "keys": keys}
    start = MADE / case / named
    run = TrainConfig.from_flat(
        num_layers=-1,
        lora_parameters=lora,
        resume_adapter_file=str(start),
        fine_tune_type="dora" if config["use_dora"] else "lora",
    )
    model, _ = build_model(MODEL, run.tune, 0, run.resume_adapter_file)
    model.eval()
    assert distance(model, MADE / case) < 1e-5


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"rank": 8}, "in this model (", "rank: 4"),
        ({"keys": ["self_attn.q_proj"]}, "is none of the weights that are trained", "its modules"),
    ],
)
def test_a_run_with_other_adapters_is_refused(
    options: dict[str, Any], problem: str, remedy: str
) -> None:
    keys = [f"self_attn.{each}_proj" for each in "qkvo"]
    lora = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": keys, **options}
    run = TrainConfig.from_flat(num_layers=-1, lora_parameters=lora)
    with pytest.raises(UserError) as caught:
        build_model(MODEL, run.tune, 0, str(MADE / "lora"))
    assert problem in caught.value.problem
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("saved-modules", "modules_to_save of PEFT cannot be converted"),
        ("bias", "bias 'all' of PEFT cannot be converted"),
    ],
)
def test_what_mlx_lm_has_no_form_for_is_refused_by_name(case: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        apart(MADE / case, MADE / case)


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' of PEFT changes the model"),
        ({"use_qalora": True}, "use_qalora of PEFT"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters of PEFT"),
        ({"lora_bias": True}, "lora_bias of PEFT"),
        ({"use_what_comes_next_year": {"n": 1}}, "use_what_comes_next_year of PEFT"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is"),
        ({"alpha_pattern": {"(": 2}}, "alpha_pattern has '('"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern has None"),
    ],
)
def test_settings_without_a_form_are_refused_by_name(
    setting: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    shutil.copytree(MADE / "lora", adapters)
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    with pytest.raises(UserError) as caught:
        apart(adapters, MADE / "lora")
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("q_proj.lora_B", "q_proj.lora_E", "is not an adapter of a linear layer"),
        ("q_proj", "z_proj", "z_proj, which PEFT has trained, is not a module of this model"),
        ("layers.1", "layers.7", "layers.7.self_attn.k_proj, which PEFT has trained"),
    ],
)
def test_tensors_that_belong_nowhere_are_refused(
    old: str, new: str, problem: str, tmp_path: Path
) -> None:
    adapters = tmp_path / "adapters"
    shutil.copytree(MADE / "lora", adapters)
    file = adapters / PEFT_FILE
    found = {name.replace(old, new): array for name, array in tensors_of(file).items()}
    mx.eval(found)
    mx.save_safetensors(str(file), found)
    with pytest.raises(UserError) as caught:
        apart(adapters, MADE / "lora")
    assert problem in caught.value.problem


def test_half_a_pair_and_pickled_tensors_are_refused(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    shutil.copytree(MADE / "lora", adapters)
    file = adapters / PEFT_FILE
    found = tensors_of(file)
    mx.eval(found)
    found.pop("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight")
    mx.save_safetensors(str(file), found)
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj are not a pair"):
        apart(adapters, MADE / "lora")
    file.rename(adapters / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model.bin is pickled"):
        apart(adapters, MADE / "lora")


def test_embeddings_whose_head_is_tied_and_dora_of_embeddings_have_no_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tied = tmp_path / "tied"
    shutil.copytree(MODEL, tied)
    config = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = tensors_of(tied / "model.safetensors")
    mx.eval(weights)
    weights.pop("lm_head.weight")
    mx.save_safetensors(str(tied / "model.safetensors"), weights)
    with pytest.raises(UserError, match="without the lm_head that is tied to it"):
        build_to_generate(tied, dtype=None, adapter_path=str(MADE / "embedding"), seed=None)
    own = save_random_lora(tmp_path / "own", tied, 1, keys=["model.embed_tokens"])
    words = ["export", str(tied), "--adapter-path", str(own), "--peft", "-o", str(tmp_path / "out")]
    assert main(words) == 2
    assert "adapters of model.embed_tokens have no form in PEFT" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--peft has no adapters: give --adapter-path"),
        (["--adapter-path", "A", "--quantize", "4"], "--quantize is for a whole model"),
        (["--adapter-path", "A", "--dtype", "float16"], "--dtype is for a whole model"),
        (["--adapter-path", str(MODEL)], "is a whole model"),
    ],
)
def test_peft_takes_adapters_and_nothing_of_a_whole_model(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(MODEL), "--peft", "-o", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_a_directory_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept").write_text("mine")
    words = ["export", str(MODEL), "--adapter-path", str(MADE / "lora"), "--peft"]
    assert main([*words, "-o", str(tmp_path)]) == 2
    assert f"-o {tmp_path} is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_names_of_a_converted_model_that_may_be_others_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = tensors_of(model / "model.safetensors")
    mx.eval(weights)
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    own = save_random_lora(tmp_path / "own", model, 1, keys=["mlp.up_proj"])
    words = ["export", str(model), "--adapter-path", str(own), "--peft"]
    assert main([*words, "-o", str(tmp_path / "out")]) == 0
    file = own / "adapters.safetensors"
    moved = {
        name.replace("model.layers", "model.h"): each for name, each in tensors_of(file).items()
    }
    mx.eval(moved)
    mx.save_safetensors(str(file), moved)
    capsys.readouterr()
    assert main([*words, "-o", str(tmp_path / "other")]) == 2
    assert "model.h.1.mlp.up_proj has adapters" in capsys.readouterr().err


def test_adapters_of_experts_have_no_form(tmp_path: Path) -> None:
    stack = {"model.layers.0.mlp.switch_mlp.up_proj.lora_a": mx.zeros((4, 2, 8))}
    config = {"lora_parameters": {"rank": 2, "scale": 1.0}}
    with pytest.raises(UserError, match=r"experts model\.layers\.0\.mlp\.switch_mlp\.up_proj"):
        to_peft(config, stack, "model", tied=False)
    inner = {"language_model.model.layers.0.mlp.up_proj.lora_a": mx.zeros((8, 2))}
    tensors, _ = to_peft(config, inner, "model", tied=False)
    (name,) = dict(tree_flatten(tensors))
    assert name == "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
