"""Tokens of a text, and the text of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.http_serving import MODEL, MOST_TOKENS, Serving, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as one:
        yield one


def post(served: Serving, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.address}/{path}", json=body)


def test_a_prompt_and_a_chat(served: Serving) -> None:
    ab = {"count": 2, "max_model_len": MOST_TOKENS, "tokens": [97, 98]}
    assert post(served, "tokenize", prompt="ab", model=MODEL).json() == ab
    chat = [{"role": "user", "content": "ab"}]
    assert post(served, "tokenize", messages=chat, add_generation_prompt=True).json() == ab
    assert served.parrot.added == []


def test_tokens(served: Serving) -> None:
    assert post(served, "detokenize", tokens=[97, 98]).json() == {"prompt": "ab"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": ""}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "pad": 1}, "pad"),
        ("detokenize", {"tokens": [97, 128]}, "tokens"),
        ("detokenize", {"tokens": "a"}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_what_is_refused(served: Serving, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(served, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
