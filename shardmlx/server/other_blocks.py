"""Texts in the place of what a model of texts cannot be given: images, documents and others in the
results of tools, and what other servers have written. No MLX, no MPI.

To refuse them would end a conversation: a client sends its history each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MOST = 200
"""Characters of a name that is told."""

DEEPEST = 8
"""Blocks within each other that are looked at."""

DETAILS = ("title", "name", "filename", "source", "url", "uri", "file_url", "file_id", "error_code")
"""Fields of a block, or of what it holds, that say which one it is."""

HOLDING = ("source", "resource", "file", "action")
"""Fields that may hold what a block is, as an object."""

TEXTS = (
    "text",
    "content",
    "context",
    "output",
    "outputs",
    "logs",
    "stdout",
    "stderr",
    "transcript",
)
"""Fields of a block that may have texts, or further blocks."""

LEFT_OUT = "left out: the model reads texts alone"


def as_text(block: Mapping[str, Any], depth: int = 0) -> str:
    """Return the text in the place of a block: what it is, with the texts that it has, or with the
    word that it was left out."""
    kind = _named(block.get("type")) or "block"
    if kind == "tool_reference":
        return f"[tool_reference: the tool {_named(block.get('tool_name'))} is available]"
    about = ", ".join([kind, *dict.fromkeys(_details(block))])
    texts = list(_texts(block, depth))
    if not texts:
        return f"[{about} {LEFT_OUT}]"
    return "\n".join([f"[{about}]", *texts])


def joined(pieces: Iterable[tuple[str, bool]]) -> str:
    """Return the text of pieces of an answer or a result; one that ``as_text`` wrote, as the second
    of each pair says, has lines of its own."""
    text = ""
    was_line = False
    for piece, is_line in pieces:
        if text and piece and (is_line or was_line) and not text.endswith("\n"):
            text += "\n"
        text += piece
        was_line = is_line
    return text


def _named(value: Any) -> str:
    """Return a name in one line; "" for what is none."""
    text = " ".join(value.split()) if isinstance(value, str) else ""
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."


def _details(block: Mapping[str, Any]) -> Iterator[str]:
    """Yield what tells which image, document or other thing a block is."""
    held = (block.get(name) for name in HOLDING)
    for each in (block, *held):
        if isinstance(each, Mapping):
            kind = each.get("media_type") or each.get("mimeType")
            yield from filter(None, map(_named, (*map(each.get, DETAILS), kind)))


def _texts(block: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the texts that a block has, and those in the place of blocks within it."""
    for name in TEXTS:
        value = block.get(name)
        if isinstance(value, str) and value:
            yield value
        elif depth < DEEPEST:
            inner = value if isinstance(value, list) else [value]
            for each in inner:
                if isinstance(each, Mapping):
                    is_text = each.get("type") == "text" and isinstance(each.get("text"), str)
                    yield each["text"] if is_text else as_text(each, depth + 1)
    for name in HOLDING:
        held = block.get(name)
        if isinstance(held, Mapping) and depth < DEEPEST:
            if held.get("type") == "text" and isinstance(held.get("data"), str):
                yield held["data"]
            yield from _texts(held, depth + 1)
