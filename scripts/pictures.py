#!/usr/bin/env python3
"""Take the pictures of pages in docs/pictures, by day and by night, in a real browser.

    python scripts/pictures.py                     # the chat page
    python scripts/pictures.py --metrics RUN.jsonl # the page of a run

needs chromium and chromedriver, and for the chat page the model of the demo
(scripts/prepare_smollm2.py): it starts the server on two ranks, and asks what stands below, at
temperature 0. docs/report.md says of which run its picture is.
"""

from __future__ import annotations

from _root import ROOT

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from shardmlx.main import main as shardmlx

PICTURES = ROOT / "docs" / "pictures"
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
CHAT_SIZE = (1000, 760)
RUN_SIZE = (1280, 1665)
TOP_SIZE = (1280, 860)
"""Of the page of a run with all that is on it, and with its curves alone, for README.md."""
PATIENCE = 300.0

EARLIER = "What are three things that a sailor needs? Answer as a short list."
QUESTION = "Write a Python function that adds two numbers, with one example."


def browser() -> webdriver.Chrome:
    """Return a browser without a window."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or sys.exit("needs chromium")
    flags = ("headless=new", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars")
    for flag in (*flags, *(["no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(f"--{flag}")
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def ask(chrome: webdriver.Chrome, text: str) -> None:
    """Send a message, and wait for the end of its answer."""
    chrome.find_element(By.ID, "message").send_keys(text, Keys.ENTER)
    ended = "return document.getElementById('send').textContent === 'Send'"
    WebDriverWait(chrome, PATIENCE).until(lambda _: chrome.execute_script(ended))


def open_page(chrome: webdriver.Chrome, address: str, size: tuple[int, int]) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    chrome.get(address)


def save(chrome: webdriver.Chrome, name: str) -> None:
    """Save the page as NAME-light.png and NAME-dark.png."""
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chrome.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 500))")
        path = PICTURES / f"{name}-{scheme}.png"
        chrome.save_screenshot(str(path))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


def take_chat(chrome: webdriver.Chrome, address: str) -> None:
    """Take the pictures of the chat page at an address."""
    open_page(chrome, address, CHAT_SIZE)
    settings = json.dumps({"temperature": "0", "max_tokens": "200"})
    chrome.execute_script("localStorage.setItem('shardmlx.settings', arguments[0])", settings)
    chrome.refresh()
    for text in (EARLIER, QUESTION):
        chrome.find_element(By.ID, "new").click()
        ask(chrome, text)
    chrome.execute_script("document.getElementById('scroller').scrollTop = 0")
    save(chrome, "chat")


def take_run(metrics: Path) -> None:
    """Take the pictures of the page of a run."""
    with tempfile.TemporaryDirectory() as directory, browser() as chrome:
        page = Path(directory, "run.html")
        if shardmlx(["report", str(metrics), "-o", str(page)]):
            sys.exit(f"{metrics} gives no page")
        for name, size in (("report", RUN_SIZE), ("report-top", TOP_SIZE)):
            open_page(chrome, page.as_uri(), size)
            save(chrome, name)


def serve_and_take(model: Path) -> None:
    """Start a server on two ranks, take the pictures of its page, and end it."""
    command = ["-m", "shardmlx.launch", "-n", "2", "serve", "--model", str(model), "--port", "0"]
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen([sys.executable, *command], stdout=said, stderr=said, cwd=ROOT)
        try:
            while server.poll() is None:
                said.seek(0)
                if found := re.search(r" at (http://\S+)", said.read()):
                    with browser() as chrome:
                        take_chat(chrome, found[1])
                    return
                time.sleep(0.1)
            said.seek(0)
            sys.exit(f"the server did not start\n{said.read()}")
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--metrics", type=Path, help="of the run whose page is taken instead")
    parser.add_argument("--address", help="of a server that runs already, like http://127.0.0.1:80")
    given = parser.parse_args()
    if given.metrics:
        take_run(given.metrics)
    elif given.address:
        with browser() as chrome:
            take_chat(chrome, given.address)
    else:
        serve_and_take(given.model)


if __name__ == "__main__":
    main()
