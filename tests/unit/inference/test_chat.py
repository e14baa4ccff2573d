"""``shardmlx chat`` on ranks that are threads: how a conversation ends, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from shardmlx.common.environment import Blas
from shardmlx.config.inference import CHAT
from shardmlx.distributed.agreement import AgreedError
from shardmlx.errors import UserError
from shardmlx.inference import chat
from shardmlx.inference.chat_input import PipedLines
from tests.helpers.local_transport import LocalNetwork


def conversation(model: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Type these lines, and nothing more."""
    read, write = os.pipe()
    monkeypatch.setattr(chat, "_lines", lambda config: PipedLines(read, ends_in_silence=False))
    os.write(write, "".join(f"{line}\n" for line in lines).encode())
    config = CHAT.load(["--model", str(model), "--max-tokens", "8", "--cache-tokens", "256"])
    try:
        LocalNetwork(2, timeout=20).run(lambda rank: chat.run(config, rank, Blas("none")))
    finally:
        os.close(read)
        os.close(write)


def test_a_conversation_is_full_until_it_begins_anew_and_q_leaves(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "Tell me of " + "ships and " * 60
    conversation(small, [long, "r", "Hello", "q", "Hello"], monkeypatch)
    said = capsys.readouterr().out
    assert "with --max-tokens 8 more it does not fit into 256 (see --cache-tokens): r beg" in said
    assert said.count("8 generated") == 1


def test_a_model_without_a_template_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(small, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(AgreedError, match="model has no chat template: use shardmlx generate"):
        conversation(model, ["Hello"], monkeypatch)


def test_a_conversation_needs_some_room() -> None:
    with pytest.raises(UserError, match=r"^--cache-tokens is 1: give 256 or more$"):
        CHAT.load(["--cache-tokens", "1"])
