"""The chat page on a real server, whose tiny model runs on two ranks."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from tests.helpers.chat_page import PATIENCE, Page
from tests.helpers.jobs import ROOT, Running
from tests.helpers.small_models import small_directory, tokenizer_directory

KEY = "a-secret"


@pytest.fixture
def address(chrome: webdriver.Chrome, tmp_path: Path) -> Iterator[str]:
    """Of a server on two ranks, which asks for ``KEY``. Not started where no browser is."""
    # A text that stays: from other words come other tokens, of which some are parts of letters.
    shutil.copy(ROOT / "LICENSE", tmp_path / "train.jsonl")
    tokenizer = tokenizer_directory(tmp_path / "tokenizer", tmp_path)
    model = small_directory(tmp_path / "tiny", tokenizer, max_position_embeddings=8192)
    options = ("--model", model, "--host", "127.0.0.1", "--port", "0", "--api-key", KEY)
    with Running.ranks(2, "-m", "shardmlx.serve", *options) as server:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and server.process.poll() is None:
            if found := re.search(r"Serving .* at (http://127\.0\.0\.1:\d+)", server.job().stdout):
                yield found[1]
                return
            time.sleep(0.05)
        pytest.fail(f"the server did not start\n{server.job().output}")


def cancelled(address: str) -> float:
    """Return how many texts the server has given up because nobody waited for them."""
    request = Request(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urlopen(request) as answer:
        text = answer.read().decode()
    found = re.search(r'^shardmlx_texts_total{end="cancelled"} (\S+)', text, re.M)
    return float(found[1]) if found else 0.0


def test_an_answer_comes_token_by_token_is_stopped_and_made_again(
    chrome: webdriver.Chrome, address: str
) -> None:
    page = Page(chrome, address)
    page.open(key=KEY, settings={"temperature": "0", "max_tokens": "7000"})
    page.send("Tell me everything")
    length = "document.querySelector('.answer .text')?.textContent.length"
    page.wait(f"{length} > 20")
    page.wait(f"{length} > {page.run(f'return {length}')}")
    page.one("#send").click()
    page.ended()
    assert "stopped" in page.one(".answer .about").text
    WebDriverWait(chrome, PATIENCE).until(lambda _: cancelled(address) == 1)
    page.one("#open-settings").click()
    page.one("[name=max_tokens]").clear()
    page.one("[name=max_tokens]").send_keys("64\n")
    page.press("Regenerate this answer")
    page.wait("document.querySelector('.answer .about').textContent.includes('cut off')")
    about = page.one(".answer .about").text
    assert re.match(r"tiny · 64 tokens · [\d.]+ tokens/s · \d+ prompt tokens", about)
    assert page.faults() == []
