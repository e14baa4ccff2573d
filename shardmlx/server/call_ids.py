"""Ids of calls for chat templates that take those of one form alone. No MLX, no MPI.

Mistral's take nine letters and digits, while other servers write ``call_...`` and ``toolu_...``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardmlx.server.answer_parts import ID_LENGTH

SHORT = re.compile(rf"[A-Za-z0-9]{{{ID_LENGTH}}}")


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat whose ids of calls are short, in calls and in their results alike.

    An id gets the same one in each turn, or else no kept prefix would be found again. A result
    without an id is that of the first call before it that has none yet.
    """
    told = []
    open_calls: list[str] = []
    for number, message in enumerate(messages):
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "id": _short(call.get("id") or f"{number}.{place}")}
                for place, call in enumerate(calls)
            ]
            open_calls = [call["id"] for call in message["tool_calls"]]
        elif message.get("role") == "tool":
            given = message.get("tool_call_id") or next(iter(open_calls), str(number))
            message["tool_call_id"] = _short(given)
            open_calls = [each for each in open_calls if each != message["tool_call_id"]]
        told.append(message)
    return told


def _short(call_id: str) -> str:
    if SHORT.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:ID_LENGTH]
