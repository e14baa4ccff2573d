"""The chat page in a real browser, on a whole server whose model says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.helpers.chat_page import EVIL, PATIENCE, Page, Speaker, Thinker
from tests.helpers.http_serving import Serving, serving

KEY = "a-secret"
SHORT = {"temperature": "0", "max_tokens": "6"}


@dataclass
class Stage:
    """The server behind the page."""

    server: Serving
    encoder: Thinker
    troubles: list[str] = field(default_factory=list)

    @property
    def model(self) -> Speaker:
        assert isinstance(self.server.parrot, Speaker)
        return self.server.parrot

    def says(self, *pieces: str) -> None:
        """From now on each answer consists of these."""
        self.model.says = pieces

    def pauses_after(self, steps: int) -> None:
        """The model says nothing after so many pieces, until ``goes_on``."""
        self.model.steps = steps

    def goes_on(self) -> None:
        self.model.steps = None
        self.model.goes_on.set()


@pytest.fixture(scope="module")
def stage_of_all() -> Iterator[Stage]:
    troubles: list[str] = []
    encoder = Thinker()
    with serving(
        parrot=Speaker(),
        encoder=encoder,
        api_key=KEY,
        unavailable_reason=lambda: troubles[0] if troubles else None,
    ) as server:
        yield Stage(server, encoder, troubles)


@pytest.fixture
def stage(stage_of_all: Stage) -> Stage:
    stage_of_all.says()
    stage_of_all.goes_on()
    return stage_of_all


@pytest.fixture
def page(chrome: webdriver.Chrome, stage: Stage) -> Iterator[Page]:
    page = Page(chrome, stage.server.address)
    page.open(key=KEY, settings=SHORT)
    page.wait("document.title === 'parrot · shardmlx'")
    page.faults()
    yield page
    stage.goes_on()
    assert page.faults() == []


LENGTH = "document.querySelector('.answer .text')?.textContent.length"


def fetch_is(page: Page, script: str, *arguments: Any) -> None:
    """Let the browser answer the next requests itself, as ``script`` says."""
    page.run(f"window.real = fetch; const given = arguments; window.fetch = {script};", *arguments)


def fetch_is_real(page: Page) -> None:
    page.run("window.fetch = window.real;")


def test_an_answer_says_what_it_cost_and_is_copied(page: Page, stage: Stage) -> None:
    page.chrome.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    # A rate needs two moments: a browser may read an answer without a pause at once.
    stage.pauses_after(3)
    page.send("Ahoy!")
    page.wait(f"{LENGTH} > 0")
    stage.goes_on()
    page.ended()
    assert page.texts() == ["Ahoy!", "Ahoy!A"]
    about = page.one(".answer .about").text
    assert "parrot · 6 tokens · " in about
    assert (
        " tokens/s · 4 of 6 drafts accepted · 5 prompt tokens (2 cached) · cut off at max tokens"
        in about
    )
    for name, text in (("Copy this answer", "Ahoy!A"), ("Copy this message", "Ahoy!")):
        page.press(name)
        page.wait(
            "[...document.querySelectorAll('button')].some((e) => e.textContent === 'Copied')"
        )
        copied = "navigator.clipboard.readText().then(arguments[0])"
        assert page.chrome.execute_async_script(copied) == text


def test_an_answer_grows_until_it_is_stopped_on_the_server_too(page: Page, stage: Stage) -> None:
    before = len(stage.model.cancelled)
    page.open(key=KEY, settings={"max_tokens": "900"})
    stage.pauses_after(30)
    page.send("One")
    page.one("#message").send_keys("two", Keys.SHIFT, Keys.ENTER, Keys.NULL, "lines")
    page.wait(f"{LENGTH} > 20")
    page.one("#send").click()
    page.ended()
    assert "stopped" in page.one(".answer .about").text
    stage.server.until(lambda: len(stage.model.cancelled) == before + 1)
    # What was written meanwhile is still there, and Escape stops as the button does.
    stage.goes_on()
    stage.pauses_after(30)
    page.one("#message").send_keys(Keys.ENTER)
    page.wait("document.querySelectorAll('.answer .text')[1]?.textContent.length > 20")
    page.one("#message").send_keys(Keys.ESCAPE)
    page.ended()
    stage.server.until(lambda: len(stage.model.cancelled) == before + 2)
    assert page.texts()[2] == "two\nlines"
    stage.goes_on()
    stage.says("Another.")
    page.press("Regenerate this answer")
    page.wait("document.querySelectorAll('.answer .text')[1].textContent === 'Another.'")
    page.ended()
    assert len(page.texts()) == 4


def test_an_edited_question_replaces_what_follows(page: Page) -> None:
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    page.open(turns, key=KEY, settings=SHORT)
    edits = page.all('[aria-label^="Edit"]')
    edits[0].send_keys(Keys.ENTER)
    assert "replaced" in page.one("#hint").text
    page.one("#message").send_keys(Keys.ESCAPE)
    assert page.texts() == ["user", "assistant"] * 2
    edits[1].send_keys(Keys.ENTER)
    assert page.one("#message").get_property("value") == "user"
    page.one("#message").clear()
    page.ask("edited")
    assert page.texts() == ["user", "assistant", "edited", "edited"]


def test_several_conversations_are_kept(page: Page, stage: Stage) -> None:
    assert page.ask("first") == "firstf"
    page.one("#new").click()
    assert page.texts() == []
    assert page.run("return document.activeElement.id") == "message"
    page.ask("second")
    assert page.titles() == ["second", "first"]
    page.press("Rename first")
    page.one("#rename input").send_keys("<b>Named</b>", Keys.ENTER)
    page.wait("!document.getElementById('rename').open")
    assert page.titles() == ["second", "<b>Named</b>"]
    page.chrome.refresh()
    assert page.texts() == ["second", "second"]
    page.all("#list .title")[1].send_keys(Keys.ENTER)
    assert page.texts() == ["first", "firstf"]
    # The other tab deletes the one that is open here.
    page.press("Delete second")
    page.one("#delete .cancel").send_keys(Keys.ENTER)
    assert len(page.titles()) == 2
    page.press("Delete <b>Named</b>")
    page.one("#delete .main").send_keys(Keys.ENTER)
    page.wait("!document.getElementById('delete').open")
    page.chrome.refresh()
    assert (page.titles(), page.texts()) == (["second"], [])


def test_an_answer_goes_on_while_another_conversation_is_read(page: Page, stage: Stage) -> None:
    page.ask("here")
    page.one("#new").click()
    stage.says("Slow ", "and ", "steady.")
    stage.pauses_after(1)
    page.send("far")
    page.wait(f"{LENGTH} > 3")
    page.all("#list .title")[1].click()
    assert page.texts() == ["here", "herehe"]
    assert page.one("#send").text == "Send"
    assert len(page.all("#list li.running")) == 1
    stage.goes_on()
    page.wait("document.querySelectorAll('#list li.running').length === 0")
    page.one("#list .title").click()
    assert page.texts() == ["far", "Slow and steady."]


def test_a_reload_in_the_middle_of_an_answer_keeps_what_came(page: Page, stage: Stage) -> None:
    stage.says("Tell ", "it", " all")
    stage.pauses_after(2)
    page.send("Tell me")
    page.wait(f"{LENGTH} === 7")
    page.chrome.refresh()
    assert page.texts() == ["Tell me", "Tell it"]
    assert "stopped" in page.one(".answer .about").text


def test_a_full_store_is_said_and_the_conversation_goes_on(page: Page) -> None:
    page.run(
        "for (let size = 1 << 22; size > 0; size >>= 1) {"
        "  try { localStorage.setItem(`fill${size}`, 'x'.repeat(size)); } catch {}"
        "}"
    )
    assert page.ask("Ahoy!") == "Ahoy!A"
    assert "no room left" in page.one("#notice").text
    page.one("#new").click()
    page.ask("Oh no")
    page.all("#list .title")[1].click()
    assert page.texts() == ["Ahoy!", "Ahoy!A"]
    page.run("localStorage.clear()")
    page.ask("Again")
    assert page.one("#notice").text == ""
    page.chrome.refresh()
    assert len(page.texts()) == 4


def test_what_is_damaged_in_the_store_takes_nothing_else_with_it(page: Page) -> None:
    sound = [{"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": "Aye"}]
    page.open(
        [*sound, {"role": "user", "content": {}}, {"role": "assistant", "content": "lost"}],
        key=KEY,
        settings=[7],
        **{
            "conversation.two": None,
            "conversation.three": {"name": 7, "changed": "x", "turns": {"0": sound}},
            "conversation.four": {"turns": [None, 5, sound[1], sound[0]]},
        },
    )
    page.run("localStorage.setItem('shardmlx.conversation.five', '{\"turns\": [')")
    assert page.texts() == ["Ahoy", "Aye"]
    page.ask("So")
    assert page.titles() == ["Ahoy", *["Empty conversation"] * 4]
    page.press("Delete Empty conversation")
    page.one("#delete .main").send_keys(Keys.ENTER)
    page.wait("document.querySelectorAll('#list li').length === 4")


HOSTILE = [
    EVIL,
    f"- {EVIL}\n  - **{EVIL}**\n\n> {EVIL}",
    f"`{EVIL}` [{EVIL}]({EVIL}) ![{EVIL}](http://127.0.0.1:9/x.png)",
    f"| {EVIL} | b |\n|---|---|\n| {EVIL} | <svg onload=alert(1)> |",
    f"```{EVIL}\n{EVIL}\n```",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,<script>1</script>)",
    "[d](vbscript:x) <a href='javascript:alert(1)'>e</a> <iframe srcdoc='<script>1</script>'>",
    "| a | b\n|---\n| | | |\n|:-:|--|\n||||\n|-|-|-|-|",
    "half a character: \ud83d, \udc00, \u202e turned, \x00\x1b[31m",
    "</div></article></main><style>*{display:none}</style><base href=//evil.org>",
    "*" * 300 + "_" * 300 + "[" * 300 + "`" * 301,
    "\n".join("> " * depth + "- " * depth + "deep" for depth in (1, 9, 199)),
    "\n".join(f"{'  ' * depth}- deep" for depth in range(60)),
    "long" * 50_000,
    "a `b` " * 100_000,
    "| a" * 20_000 + "\n" + "|-" * 20_000 + "\n" + "| c" * 20_000,
]
EVIL_TIMES = sum(text.count(EVIL) for text in HOSTILE)

TAGS = (
    "ARTICLE H2 DIV SPAN BUTTON DETAILS SUMMARY P UL OL LI BLOCKQUOTE STRONG EM CODE PRE TABLE "
    "THEAD TBODY TR TH TD A SMALL HR"
)
ATTRIBUTES = "class type role tabindex aria-label href target title rel"


def test_what_a_model_says_stays_text(page: Page, stage: Stage) -> None:
    # Whole first, then in pieces that end in the middle of marks.
    whole = "\n\n".join(HOSTILE)
    cut = "\n\n".join(HOSTILE[:12])
    pieces = [cut[at : at + 37] for at in range(0, len(cut), 37)]
    for says in ([whole], pieces):
        stage.says(*says)
        page.one("#new").click()
        answer = page.ask(EVIL)
        assert answer.count("onerror=") == EVIL_TIMES
        made = page.run("return [...document.querySelectorAll('#log *')].map((e) => e.tagName)")
        assert set(made) <= set(TAGS.split())
        attributes = page.run(
            "return [...document.querySelectorAll('#log .text *')]"
            ".flatMap((e) => e.getAttributeNames())"
        )
        assert set(attributes) <= set(ATTRIBUTES.split())
        links = page.run("return [...document.querySelectorAll('#log a')].map((e) => e.protocol)")
        assert set(links) <= {"http:", "https:"}
        assert page.chrome.title == "parrot · shardmlx"
        assert page.one("#send").is_displayed()
    # What was said, half characters too, goes back to the server with the next question.
    stage.says("Aye.")
    assert page.ask("Is all well?") == "Aye."
    assert stage.encoder.messages[0]["content"] == EVIL
    assert "half a character: �" in stage.encoder.messages[1]["content"]
    asked = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert all(name.startswith(page.address) for name in asked)


def test_the_page_could_make_no_markup_of_a_text_and_load_nothing(page: Page) -> None:
    script = "try { document.body.innerHTML = '<b>'; } catch (e) { return e.name; }"
    assert page.run(script) == "TypeError"
    for tag, link in (("img", "src"), ("link", "href"), ("iframe", "src")):
        page.run(
            "const [tag, link] = arguments, node = document.createElement(tag);"
            "node.rel = 'stylesheet'; node[link] = 'http://127.0.0.1:9/';"
            "document.body.append(node);",
            tag,
            link,
        )
    found: list[str] = []

    def has_complained(chrome: webdriver.Chrome) -> bool:
        found.extend(page.faults())
        return len(found) >= 4

    WebDriverWait(page.chrome, PATIENCE, poll_frequency=0.02).until(has_complained)
    assert all("Security Policy" in each or "TrustedHTML" in each for each in found), found


def test_thoughts_are_shown_apart_and_folded(page: Page, stage: Stage) -> None:
    stage.says("<think>", EVIL, " Hm.", "</think>", "Aye", "!")
    stage.pauses_after(3)
    page.send("Ahoy")
    page.wait("document.querySelector('.thought summary')?.textContent === 'Thinking …'")
    fold = page.one(".answer .thought")
    assert fold.get_property("open") is False
    stage.goes_on()
    page.ended()
    assert page.texts()[1] == "Aye!"
    assert fold.text.startswith("Thought for ")
    fold.find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    assert fold.find_element(By.TAG_NAME, "div").text == f"{EVIL} Hm."
    page.ask("And then?")
    assert [message["content"] for message in stage.encoder.messages] == [
        "Ahoy",
        "Aye!",
        "And then?",
    ]


def test_a_failure_is_one_line_with_a_way_to_try_again(page: Page, stage: Stage) -> None:
    answered = "async () => new Response(given[0], { status: given[1], headers: given[2] })"
    cut = "async () => new Response(new ReadableStream({ pull(c) { c.error(new TypeError()); } }))"
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": "So far"}}]})
    cases: list[tuple[str, tuple[Any, ...], str]] = [
        (answered, ("{}", 429, {"Retry-After": "3"}), "The server is busy. Try again in 3 s."),
        (answered, ('{"error": {"message": "too long"}}', 400, {}), "too long"),
        (answered, ("<html>", 502, {}), "The server answered with status 502."),
        (answered, ('data: {"error": {"message": "a rank died"}}\n\n', 200, {}), "A rank died."),
        (answered, (": nothing\n\n", 200, {}), "The connection ended before the answer did."),
        (answered, (f"data: {event}\n\n", 200, {}), "The connection ended before the answer did."),
        (answered, ("data: <html>\n\n", 200, {}), "What came is not an answer: is there a proxy"),
        (cut, (), "The connection was lost."),
        ("async () => { throw new TypeError(); }", (), "The server cannot be reached."),
    ]
    page.send("Ahoy!")
    page.ended()
    for script, arguments, line in cases:
        fetch_is(page, script, *arguments)
        page.press("Regenerate this answer")
        page.wait("document.querySelector('.answer .error')")
        page.ended()
        assert page.one(".answer .error").text.startswith(line), line
        assert page.texts()[1] == ("So far" if event in str(arguments) else "")
        fetch_is_real(page)
        page.press("Try again")
        page.wait("document.querySelector('.answer .text').textContent === 'Ahoy!A'")
        page.ended()
        assert page.all(".error") == []
    stage.troubles.append("rank 1 on vm gives no sign of life")
    try:
        page.press("Regenerate this answer")
        page.wait("document.querySelector('.answer .error')")
        error = page.one(".answer .error").text.removesuffix("Try again").strip()
        assert error == (
            "No text is generated: rank 1 on vm gives no sign of life. Try again in 2 s."
        )
    finally:
        stage.troubles.clear()
    page.press("Try again")
    page.wait("document.querySelector('.answer .text').textContent === 'Ahoy!A'")


def test_a_wrong_key_is_asked_for_again(page: Page) -> None:
    page.open(key="wrong")
    page.wait("document.getElementById('key').open")
    page.one("#key input").send_keys("wrong-too", Keys.ENTER)
    page.wait("document.getElementById('key').open && !document.querySelector('#key input').value")
    page.one("#key input").send_keys(Keys.ESCAPE)
    page.send("Ahoy")
    page.wait("document.getElementById('key').open")
    page.one("#key input").send_keys(KEY, Keys.ENTER)
    page.wait("document.title.startsWith('parrot')")
    page.ended()
    assert page.texts()[1].startswith("Ahoy")


def test_settings_are_kept_and_used(page: Page, stage: Stage) -> None:
    page.one("#open-settings").send_keys(Keys.ENTER)
    for name, value in (("system", "Speak like a pirate"), ("temperature", "0.5"), ("top_k", "7")):
        page.one(f"[name={name}]").clear()
        page.one(f"[name={name}]").send_keys(value)
    page.one("[name=reasoning_effort]").send_keys("low")
    assert "at most 1000 tokens" in page.one("#settings").text
    page.one("[name=max_tokens]").clear()
    page.one("[name=max_tokens]").send_keys("5", Keys.ENTER)
    # Settings are kept in the event that follows the closing of the dialog.
    page.wait("localStorage.getItem('shardmlx.settings').includes('pirate')")
    assert not page.run("return document.getElementById('settings').open")
    page.one("#open-settings").click()
    page.one("[name=top_p]").send_keys("7", Keys.ENTER)
    assert page.run("return document.getElementById('settings').open"), "7 is not a probability"
    page.one("#settings .cancel").click()
    page.chrome.refresh()
    assert page.ask("Ahoy!") == "Ahoy!"
    asked = stage.model.added[-1]
    sampling = asked.sampling
    assert (asked.max_tokens, sampling.temp, sampling.top_k, sampling.top_p) == (5, 0.5, 7, 1.0)
    assert stage.encoder.messages[0] == {"role": "system", "content": "Speak like a pirate"}


def test_all_can_be_reached_by_keyboard_and_has_a_name(page: Page) -> None:
    answer = "A [link](https://a.org)\n\n```\ncode\n```\n\n|a|b|\n|-|-|\n|1|2|"
    turns = [{"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": answer}]
    page.open(turns, key=KEY, settings=SHORT)
    visible = (
        "return [...document.querySelectorAll('button, input, textarea, select, a, [tabindex]')]"
        ".filter((e) => e.checkVisibility())"
    )
    for node in page.run(visible):
        assert node.accessible_name, node.get_attribute("outerHTML")
    assert page.run("return document.activeElement.id") == "message"
    page.run("document.activeElement.blur(); document.querySelector('.skip').focus()")
    seen = []
    for _ in range(40):
        seen.append(
            page.run("const e = document.activeElement; return e.ariaLabel || e.textContent")
        )
        if page.run("return document.activeElement.id") == "send":
            break
        page.chrome.switch_to.active_element.send_keys(Keys.TAB)
    assert seen == [
        "To the message",
        *("New chat", "Ahoy", "Rename Ahoy", "Delete Ahoy", "Settings"),
        *("Conversation", "Edit this message and send it again", "Copy this message"),
        *("link", "Copy the code", "Code", "Table", "Copy this answer", "Regenerate this answer"),
        *("", "Send"),
    ]


def test_a_screen_reader_is_told_sentences_while_they_come(page: Page, stage: Stage) -> None:
    said = "document.getElementById('announcer').textContent"
    assert page.one("#announcer").get_attribute("aria-live") == "polite"
    stage.says("It is ", "so. And", " more", " comes")
    stage.pauses_after(3)
    page.send("Ahoy")
    page.wait(f"{said} === 'AnsweringIt is so.'")
    assert page.one(".answer").get_attribute("aria-busy") == "true"
    stage.goes_on()
    page.ended()
    assert page.run(f"return {said}") == "AnsweringIt is so.And more comes"
    assert page.one(".answer").get_attribute("aria-busy") == "false"


def test_a_phone_needs_no_sideways_scrolling(page: Page) -> None:
    answer = (
        f"{'long' * 99}\n\n```\n{'code ' * 99}\n```\n\n- {'item' * 99}\n\n"
        f"{'|wide' * 30}\n{'|-' * 30}\n\n> {'quote' * 99}"
    )
    turns = [{"role": "user", "content": "word" * 99}, {"role": "assistant", "content": answer}]
    size = {"width": 320, "height": 560, "deviceScaleFactor": 1, "mobile": True}
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.open(turns, key=KEY, settings=SHORT)
        for node in ("document.documentElement", "document.getElementById('scroller')"):
            assert page.run(f"return {node}.scrollWidth - {node}.clientWidth") == 0
        for name in ("send", "open-settings"):
            right = f"return document.getElementById('{name}').getBoundingClientRect().right"
            assert page.run(right) < 320
        assert page.run("return document.documentElement.scrollHeight") == 560
        assert not page.one("#list").is_displayed()
        page.one("#open-chats").click()
        assert page.one("#list").is_displayed()
        page.chrome.switch_to.active_element.send_keys(Keys.ESCAPE)
        assert not page.one("#list").is_displayed()
        page.one("#open-chats").click()
        page.one("#new").click()
        assert not page.one("#list").is_displayed()
        assert page.texts() == []
        page.one("#open-settings").click()
        dialog = "document.getElementById('settings')"
        assert page.run(f"return {dialog}.scrollWidth - {dialog}.clientWidth") == 0
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_says_which_model_answers_and_with_which_adapter(
    chrome: webdriver.Chrome,
) -> None:
    with serving(adapter="pirate") as served:
        page = Page(chrome, served.address)
        page.open()
        page.wait("document.title === 'parrot · shardmlx'")
        assert page.one("#model").text == "parrot with adapter pirate"
        assert page.one("#model").get_attribute("title") == "parrot with adapter pirate"
        assert page.faults() == []
