"""The first line of a docstring says what is meant: a verb and its object, or a noun."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.helpers.sources import ROOT, nodes

FILES = sorted(
    path for name in ("shardmlx", "models", "partitioners") for path in (ROOT / name).rglob("*.py")
)

_WORDS = """
    about above across after all alone along also among and another any anything apart as at before
    below beside between both but by either enough everything few for from given how if in instead
    into is it its like many more most much neither no none not nothing of off on one only or other
    others out over per since so some such than that their then there these they this those through
    to together until up what whatever when where whether which while who whom whose why with within
    without
"""

NO_SUBJECT = frozenset(_WORDS.split())
"""Words with which a sentence leaves open what it speaks of."""

NO_VERB = NO_SUBJECT | frozenset({"a", "an", "each", "every", "the"})
"""Words with which a sentence says what something is, where it should say what is done."""

SUBJECTLESS = frozenset({"as", "by", "else", "nor", "of", "those", "what", "whoever"})
"""Words with which no sentence of a comment or docstring begins."""


def documented(path: Path) -> Iterator[tuple[int, str, frozenset[str]]]:
    """Yield (line, docstring, words that may not begin it) of what a file defines."""
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text, _forbidden(node)
        body = getattr(node, "body", [])
        for before, after in pairwise(body) if isinstance(body, list) else ():
            if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                value = after.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield after.lineno, value.value, NO_SUBJECT


def _forbidden(node: ast.AST) -> frozenset[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return NO_SUBJECT
    decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
    is_value = decorators & {"property", "cached_property", "fixture"}
    return NO_SUBJECT if is_value else NO_VERB


def first_word(text: str) -> str:
    """Return the first word in lower case; empty if the text begins with a sign or a number."""
    match = re.match(r"[A-Za-z]+(?:[-'][A-Za-z]+)*", text.strip())
    return match[0].lower() if match else ""


def test_a_docstring_begins_with_a_verb_or_with_what_it_describes() -> None:
    found = [
        f"{path}:{line}: {text.strip().splitlines()[0]}"
        for path in FILES
        for line, text, forbidden in documented(path)
        if first_word(text) in forbidden | {""} and not text.strip().startswith("``mpirun")
    ]
    assert len(FILES) > 100
    assert found == []


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of the comments and docstrings of a file."""
    with path.open("rb") as file:
        tokens = [
            each for each in tokenize.tokenize(file.readline) if each.type == tokenize.COMMENT
        ]
    texts: list[tuple[int, str]] = [(line, text) for line, text, _ in documented(path)]
    last, column = 0, -1
    for token in tokens:
        is_alone = not token.line[: token.start[1]].strip()
        text = token.string.lstrip("# ")
        if is_alone and (last, column) == (token.start[0] - 1, token.start[1]):
            texts[-1] = (texts[-1][0], f"{texts[-1][1]} {text}")
        else:
            texts.append((token.start[0], text))
        last, column = token.start[0], token.start[1] if is_alone else -1
    for line, text in texts:
        for sentence in re.split(r"(?<=[.!?])[\s)\"]+(?=[A-Z(`])|\n\s*\n", text.strip()):
            yield line, sentence.lstrip("(`\"'")


def test_sentences_name_their_subject() -> None:
    found = [
        f"{path}:{line}: {sentence}"
        for path in FILES
        for line, sentence in sentences(path)
        if first_word(sentence) in SUBJECTLESS
    ]
    assert found == []
