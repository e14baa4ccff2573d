"""The chat page in a real browser, on a real server with a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.helpers.jobs import ROOT, Running
from tests.helpers.small_models import small_directory, tokenizer_directory

KEY = "a-secret"
PATIENCE = 60.0
EVIL = "<img src=x onerror=\"document.title = 'attacked'\"><script>alert(1)</script>"

GREEDY = {"temperature": "0", "max_tokens": "64"}
ENDLESS = {"temperature": "0", "max_tokens": "7000"}


@pytest.fixture(scope="module")
def address(chrome: webdriver.Chrome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server on two ranks, which asks for ``KEY``. Not started where no browser is."""
    directory = tmp_path_factory.mktemp("chat")
    # A text that stays: from other words come other tokens, of which some are parts of letters.
    shutil.copy(ROOT / "LICENSE", directory / "train.jsonl")
    tokenizer = tokenizer_directory(directory / "tokenizer", directory)
    model = small_directory(directory / "tiny", tokenizer, max_position_embeddings=8192)
    options = ("--model", model, "--host", "127.0.0.1", "--port", "0", "--api-key", KEY)
    with Running.ranks(2, "-m", "shardmlx.serve", *options) as server:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and server.process.poll() is None:
            if found := re.search(r"Serving .* at (http://127\.0\.0\.1:\d+)", server.job().stdout):
                yield found[1]
                return
            time.sleep(0.05)
        pytest.fail(f"the server did not start\n{server.job().output}")


class Page:
    """The page, as a reader uses it."""

    def __init__(self, chrome: webdriver.Chrome, address: str) -> None:
        self.chrome = chrome
        self.address = address

    def open(self, turns: list[dict[str, str]], settings: dict[str, str], key: str = KEY) -> None:
        """Load it anew, as if this conversation had been left in it."""
        self.chrome.get(self.address)
        self.run(
            "Object.assign(chat, arguments[0]); sessionStorage.setItem(KEY, arguments[1]);",
            {"turns": turns, "settings": settings, "previous": []},
            key,
        )
        self.chrome.refresh()

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression holds."""
        waiting = WebDriverWait(self.chrome, PATIENCE, poll_frequency=0.02)
        waiting.until(lambda _: self.run(f"return {condition}"), condition)

    def send(self, text: str) -> None:
        self.one("#message").send_keys(text, Keys.ENTER)

    def ended(self) -> None:
        self.wait("document.getElementById('send').textContent === 'Send'")

    def cancelled(self) -> float:
        """How many texts the server has given up because nobody waited for them."""
        request = Request(f"{self.address}/metrics", headers={"Authorization": f"Bearer {KEY}"})
        with urlopen(request) as answer:
            found = re.search(
                r'^shardmlx_texts_total{end="cancelled"} (\S+)', answer.read().decode(), re.M
            )
        return float(found[1]) if found else 0.0

    def texts(self) -> list[str]:
        return [str(node.get_property("textContent")) for node in self.all(".turn .text")]


@pytest.fixture
def page(chrome: webdriver.Chrome, address: str) -> Iterator[Page]:
    page = Page(chrome, address)
    page.open([], GREEDY)
    page.wait("document.title.startsWith('tiny')")
    yield page
    log: Any = chrome.get_log("browser")  # type: ignore[no-untyped-call]
    assert [line["message"] for line in log if "Security Policy" in line["message"]] == []


def test_an_answer_says_what_it_cost(page: Page) -> None:
    page.send("Ahoy")
    page.ended()
    assert page.texts()[0] == "Ahoy"
    about = page.one(".answer .about").text
    assert re.match(r"tiny · 64 tokens · [\d.]+ tokens/s · \d+ prompt tokens", about)
    assert "cut off at max tokens" in about


def test_an_answer_grows_until_stop_ends_it_on_the_server_too_and_regenerate_makes_another(
    page: Page,
) -> None:
    page.open([], ENDLESS)
    before = page.cancelled()
    page.send("Tell me everything")
    length = "document.querySelector('.answer .text')?.textContent.length"
    page.wait(f"{length} > 20")
    page.wait(f"{length} > {page.run(f'return {length}')}")
    page.one("#send").click()
    page.ended()
    assert "stopped" in page.one(".answer .about").text
    WebDriverWait(page.chrome, PATIENCE).until(lambda _: page.cancelled() == before + 1)
    page.run("chat.settings = arguments[0]", GREEDY)
    (again,) = [node for node in page.all(".answer button") if node.text == "Regenerate"]
    again.click()
    page.ended()
    assert len(page.texts()) == 2
    assert "64 tokens" in page.one(".answer .about").text


def test_shift_enter_makes_a_line_and_escape_stops(page: Page) -> None:
    page.open([], ENDLESS)
    page.one("#message").send_keys("One", Keys.SHIFT, Keys.ENTER)
    page.send("two")
    page.wait("document.querySelector('.answer .text')?.textContent")
    page.one("#message").send_keys(Keys.ESCAPE)
    page.ended()
    assert page.texts()[0] == "One\ntwo"


def test_a_reload_keeps_the_conversation(page: Page) -> None:
    page.send("Remember me")
    page.ended()
    before = page.texts()
    page.chrome.refresh()
    assert page.texts() == before
    page.one("#new").click()
    assert page.texts() == []
    page.one("#back").click()
    assert page.texts() == before


def test_a_reload_in_the_middle_of_an_answer_keeps_what_came(page: Page) -> None:
    page.open([], ENDLESS)
    page.send("Tell me everything")
    page.wait("document.querySelector('.answer .text')?.textContent.length > 20")
    page.chrome.refresh()
    assert len(page.texts()[1]) > 20
    assert "stopped" in page.one(".answer .about").text


def test_an_edited_question_replaces_what_follows(page: Page) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    page.open(turns, GREEDY)
    page.all(".user button")[1].send_keys(Keys.ENTER)
    page.one("#message").clear()
    page.send("edited")
    page.ended()
    assert page.texts()[:3] == ["user", "assistant", "edited"]
    assert len(page.texts()) == 4


def test_markup_in_a_text_stays_text(page: Page) -> None:
    evil = f"{EVIL}\n\n- {EVIL}\n\n**{EVIL}** `{EVIL}`\n\n```\n{EVIL}\n```"
    page.open([{"role": "user", "content": EVIL}, {"role": "assistant", "content": evil}], GREEDY)
    page.wait("document.title.startsWith('tiny')")
    question, answer = page.texts()
    assert question == EVIL
    assert answer.count(EVIL) == 5
    assert page.all("main img, main script") == []


def test_thoughts_are_shown_apart_and_are_text(page: Page) -> None:
    deltas = [{"reasoning_content": EVIL}, {"reasoning_content": " Hm."}, {"content": "Aye!"}, {}]
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices[-1]["finish_reason"] = "stop"
    body = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
    page.run(
        "const [body] = arguments; window.real = window.fetch;"
        "window.fetch = async () => new Response(body);",
        body,
    )
    page.send("Ahoy")
    page.ended()
    page.run("window.fetch = window.real")
    assert page.texts()[1] == "Aye!"
    thought = page.one(".answer .thought")
    assert thought.is_displayed()
    assert thought.find_element(By.TAG_NAME, "div").get_property("textContent") == f"{EVIL} Hm."
    assert page.all("main img, main script") == []


@pytest.mark.parametrize(
    ("status", "headers", "body", "line"),
    [
        (429, {"Retry-After": "3"}, "{}", "The server is busy. Try again in 3 s."),
        (400, {}, '{"error": {"message": "too long"}}', "too long"),
        (500, {}, "<html>", "The server answered with status 500."),
        (200, {}, 'data: {"error": {"message": "a rank died"}}\n\n', "a rank died"),
        (200, {}, ": nothing\n\n", "The connection ended before the answer did."),
    ],
)
def test_a_failure_is_one_line_with_a_retry(
    page: Page, status: int, headers: dict[str, str], body: str, line: str
) -> None:
    page.run(
        "const [body, status, headers] = arguments; window.real = window.fetch;"
        "window.fetch = async () => new Response(body, { status, headers });",
        body,
        status,
        headers,
    )
    page.send("Ahoy")
    page.ended()
    error = page.one(".answer .error")
    assert error.text.removesuffix("Retry").strip() == line
    page.run("window.fetch = window.real")
    error.find_element(By.TAG_NAME, "button").click()
    page.ended()
    assert page.all(".error") == []
    assert "64 tokens" in page.one(".answer .about").text


def test_a_wrong_key_is_asked_for_again(page: Page) -> None:
    page.open([], GREEDY, key="wrong")
    page.wait("document.getElementById('key').open")
    page.one("#key input").send_keys("wrong-too", Keys.ENTER)
    page.wait("document.getElementById('key').open && !document.querySelector('#key input').value")
    page.one("#key input").send_keys(KEY, Keys.ENTER)
    page.wait("document.title.startsWith('tiny')")
    assert not page.run("return document.getElementById('key').open")


def test_settings_are_kept_and_used(page: Page) -> None:
    page.one("#open-settings").click()
    page.one("[name=system]").send_keys("Speak like a pirate")
    page.one("[name=max_tokens]").clear()
    page.one("[name=max_tokens]").send_keys("5", Keys.ENTER)
    page.chrome.refresh()
    page.send("Ahoy")
    page.ended()
    assert "· 5 tokens ·" in page.one(".answer .about").text
    assert page.run("return messages()[0]") == {"role": "system", "content": "Speak like a pirate"}


def test_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    answer = f"{'long' * 99}\n\n```\n{'code ' * 99}\n```\n\n- {'item' * 99}"
    turns = [{"role": "user", "content": "word" * 99}, {"role": "assistant", "content": answer}]
    size = {"width": 320, "height": 560, "deviceScaleFactor": 1, "mobile": True}
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open(turns, GREEDY)
        for node in ("document.documentElement", "document.getElementById('scroller')"):
            assert page.run(f"return {node}.scrollWidth - {node}.clientWidth") == 0
        assert (
            page.run("return document.getElementById('send').getBoundingClientRect().right") < 320
        )
        assert page.run("return document.documentElement.scrollHeight") == 560
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
