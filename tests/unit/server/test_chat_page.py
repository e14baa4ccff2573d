"""The chat page is one file that needs nothing else, and the browser runs only what is in it."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "shardmlx" / "server" / "pages" / "chat.html"
HTML = PAGE.read_text()


def inner(tag: str) -> str:
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    return str(text)


@pytest.mark.parametrize("tag", ["script", "style"])
def test_the_policy_lets_only_the_pages_own_code_run(tag: str) -> None:
    """After a change of the page put the hash in that this wants."""
    digest = base64.b64encode(hashlib.sha256(inner(tag).encode()).digest()).decode()
    (policy,) = re.findall(r'"Content-Security-Policy" content="(.*?)"', HTML)
    assert f"{tag}-src 'sha256-{digest}'" in policy.split("; ")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert set(re.findall(r"https?://[^'\"\s>]*", HTML)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"<(?:script|img|iframe|object|embed)\s[^>]*>", HTML) == []
    assert re.findall(r'(?:src|href)="(?!data:)[^"]*"', HTML) == []


def test_text_becomes_no_markup_and_no_code() -> None:
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\("
    assert re.findall(makers, inner("script")) == []
