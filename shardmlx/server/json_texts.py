"""JSON whose texts have no half of a character. No MLX, no MPI.

JavaScript counts in UTF-16: a text that is cut may end in the first half of a character beyond
U+FFFF, which JSON writes as an escape, for example ``\\ud83d``. A small model writes such too. No
text in UTF-8 can have it: to refuse it would end a conversation, for clients send it each time.
"""

from __future__ import annotations

import re

ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u(?P<half>[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""An escape of JSON: of both halves of a character, of one ``half`` alone, or any other."""


def with_whole_characters(text: str) -> str:
    """Return JSON in which U+FFFD stands for each half of a character, written out or escaped."""
    escaped = ESCAPE.sub(lambda found: r"\ufffd" if found["half"] else found[0], text)
    return escaped.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def bytes_with_whole_characters(body: bytes) -> bytes:
    """Return the bytes of JSON in which U+FFFD stands for each escape of half a character."""
    # Escapes are ASCII: other bytes stay as they are, UTF-8 or not.
    return with_whole_characters(body.decode("latin-1")).encode("latin-1")
