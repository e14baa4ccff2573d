"""The chat page in a browser, as a reader uses it, and a model that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from shardmlx.inference.answer_format import AnswerFormat, Marks
from shardmlx.server.request_queue import Delta
from tests.helpers.http_serving import Agent, Parrot, Text

PATIENCE = 60.0
EVIL = "<img src=x onerror=\"document.title = 'attacked'\"><script>alert(1)</script>"

SETTINGS = "shardmlx.settings"


class Thinker(Agent):
    """An encoder for a model with thoughts."""

    answer_format = AnswerFormat(Marks("<think>", "</think>"), None)


@dataclass
class Speaker(Parrot):
    """A generator that says the deltas of ``says`` as the answer to each prompt; without any it
    repeats the prompt."""

    says: Sequence[str] = field(default_factory=tuple)

    def _next(self, text: Text) -> Delta:
        if not self.says:
            return super()._next(text)
        text.generated += 1
        has_ended = text.generated == len(self.says)
        parts = tuple(text.parser.take(self.says[text.generated - 1], is_last=has_ended))
        return Delta(parts, (), text.generated, 0, "stop" if has_ended else None)


class Page:
    """The page, as a reader uses it."""

    def __init__(self, chrome: webdriver.Chrome, address: str) -> None:
        self.chrome = chrome
        self.address = address

    def open(
        self, turns: Sequence[dict[str, Any]] = (), key: str | None = None, **kept: Any
    ) -> None:
        """Load it anew, as if this conversation had been left open in it, and ``kept`` beside."""
        # Of the same origin, but without a script that could keep something after this.
        self.chrome.get(f"{self.address}/health")
        if turns:
            kept["conversation.one"] = {"name": "", "changed": 1, "turns": list(turns)}
        self.run(
            "const [kept, key, id] = arguments;"
            "localStorage.clear(); sessionStorage.clear();"
            "for (const [name, text] of Object.entries(kept)) localStorage.setItem(name, text);"
            "if (key) sessionStorage.setItem('shardmlx.key', key);"
            "if (id) sessionStorage.setItem('shardmlx.open', id);",
            {f"shardmlx.{name}": json.dumps(value) for name, value in kept.items()},
            key,
            "one" if turns else None,
        )
        self.chrome.get(self.address)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.chrome.find_elements(By.CSS_SELECTOR, selector)
        return found

    def one(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def button(self, name: str) -> WebElement:
        """Return the last button with this label."""
        return [node for node in self.all("button") if node.text == name][-1]

    def press(self, name: str) -> None:
        """Press the last button that has this name for a screen reader, by the keyboard."""
        node = self.chrome.find_elements(By.CSS_SELECTOR, f'button[aria-label="{name}"]')[-1]
        node.send_keys(Keys.ENTER)

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds."""
        waiting = WebDriverWait(self.chrome, PATIENCE, poll_frequency=0.02)
        waiting.until(lambda _: self.run(f"return {condition}"), condition)

    def send(self, text: str) -> None:
        self.one("#message").send_keys(text, Keys.ENTER)

    def ended(self) -> None:
        self.wait("document.getElementById('send').textContent === 'Send'")

    def ask(self, text: str) -> str:
        self.send(text)
        self.ended()
        return self.texts()[-1]

    def texts(self) -> list[str]:
        script = (
            "return [...document.querySelectorAll('.turn .text')]"
            ".map((e) => e.textContent.toWellFormed())"
        )
        found: list[str] = self.run(script)
        return found

    def titles(self) -> list[str]:
        script = "return [...document.querySelectorAll('#list .title')].map((e) => e.title)"
        found: list[str] = self.run(script)
        return found

    def faults(self) -> list[str]:
        """Return what the browser has complained of since the last call, but for the statuses of
        answers, which it reports too."""
        log: Any = self.chrome.get_log("browser")
        said = [str(line["message"]) for line in log]
        return [line for line in said if "the server responded with a status of" not in line]
