"""Tokens of a text or a chat, and the text of tokens, in vLLM's form."""

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
    ab = {"count": 2, "max_model_len": MOST_TOKENS, "tokens": [97, 98], "token_strs": None}
    assert post(served, "tokenize", prompt="ab", model=MODEL).json() == ab
    assert post(served, "tokenize", prompt="ab", add_special_tokens=False).json() == ab
    chat = [{"role": "user", "content": "ab"}]
    assert post(served, "tokenize", messages=chat, add_generation_prompt=True).json() == ab
    assert post(served, "tokenize", messages=chat, add_special_tokens=False).json() == ab
    named = post(served, "tokenize", prompt="ab", return_token_strs=True).json()
    assert named == {**ab, "token_strs": ["a", "b"]}
    assert served.parrot.added == []  # nothing is generated


def test_tokens(served: Serving) -> None:
    assert post(served, "detokenize", tokens=[97, 98], model=MODEL).json() == {"prompt": "ab"}
    assert post(served, "detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": ""}, "prompt"),
        ("tokenize", {"prompt": ["ab"]}, "prompt"),
        ("tokenize", {"prompt": "a", "pad": 1}, "pad"),
        ("tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "user"}], "pad": 1}, "pad"),
        (
            "tokenize",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("detokenize", {"tokens": [97, 128]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens.0"),
        ("detokenize", {"tokens": "a"}, "tokens"),
        ("detokenize", {}, "tokens"),
    ],
)
def test_what_is_refused(served: Serving, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(served, path, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "body"), [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [97]})]
)
def test_another_model_and_a_body_that_is_no_json_are_refused(
    served: Serving, path: str, body: dict[str, Any]
) -> None:
    assert post(served, path, **body, model="other").status_code == 404
    kind = {"content-type": "application/json"}
    answer = httpx.post(f"{served.address}/{path}", content=b"{", headers=kind)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is not JSON")
