#!/usr/bin/env python3
"""Take the pictures of the chat page in docs/pictures: a real browser, on a real server.

    python scripts/chat_pictures.py

needs chromium, chromedriver and the model of the demo (scripts/prepare_smollm2.py). It starts the
server on two ranks, asks what stands below, at temperature 0, and takes the page by day and night.
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

PICTURES = ROOT / "docs" / "pictures"
MODEL = ROOT / ".cache" / "smollm2-135m-instruct"
SIZE = (1000, 760)
PATIENCE = 300.0

EARLIER = "What is the capital of France? Answer in one sentence."
QUESTION = (
    "Show the planets Mercury, Venus and Earth as a Markdown table with the columns planet and "
    "moons. Then show a Python function that adds two numbers."
)


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


def take(chrome: webdriver.Chrome, address: str) -> None:
    """Take the pictures of the page at an address."""
    width, height = SIZE
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    chrome.get(address)
    settings = json.dumps({"temperature": "0", "max_tokens": "100"})
    chrome.execute_script("localStorage.setItem('shardmlx.settings', arguments[0])", settings)
    chrome.refresh()
    for text in (EARLIER, QUESTION):
        chrome.find_element(By.ID, "new").click()
        ask(chrome, text)
    chrome.execute_script("document.getElementById('scroller').scrollTop = 0")
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chrome.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 200))")
        path = PICTURES / f"chat-{scheme}.png"
        chrome.save_screenshot(str(path))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")


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
                        take(chrome, found[1])
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
    parser.add_argument("--address", help="of a server that runs already, like http://127.0.0.1:80")
    given = parser.parse_args()
    if given.address:
        with browser() as chrome:
            take(chrome, given.address)
    else:
        serve_and_take(given.model)


if __name__ == "__main__":
    main()
