"""An island's part of secure sums, on a thread of its rank 0."""

from __future__ import annotations

import math
from functools import partial
from tempfile import NamedTemporaryFile
from typing import IO, Any

from shardmlx.errors import refusing
from shardmlx.islands.client import Hub
from shardmlx.islands.protocol import Refusal
from shardmlx.islands.secure_sums import Member, on_grid, write_masked

SECONDS_TO_LOOK = 0.2
"""Seconds between two looks at what the others have sent."""


def report_secretly(hub: Hub, path: str, body: IO[bytes], rows: int) -> None:
    """Take part in secure sums, with the float32 difference in a file, until one has counted it:
    the hub then refuses it, and names the ``version``. Raises ``Refusal``, and ``UserError`` for a
    hub that asks for what would show the difference."""
    weight = max(1, rows)
    try:
        for _ in on_grid(body, weight):
            pass
    except ValueError as error:
        hub.persist(partial(hub.post, path, {"declined": True}), math.inf)
        raise Refusal(422, f"the difference is not reported: {error}", "train anew") from None
    while not hub.closed.is_set():
        with refusing(
            f"--island {hub.url}: the hub asked for what is not a secure sum", "leave it"
        ):
            problem = _take_part(hub, path, body, weight)
        if problem:
            hub.say(f"--island {hub.url}: no secure sum: {problem}; trying again")
        hub.closed.wait(SECONDS_TO_LOOK)


def _take_part(hub: Hub, path: str, body: IO[bytes], weight: int) -> str:
    """Take part in one sum; return why it was none, or nothing."""
    member = Member()
    message: dict[str, Any] = {"keys": member.public_keys}
    done = "keys"
    while True:
        answer = hub.persist(partial(hub.post, path, message), math.inf)
        attempt = answer["attempt"]
        message = {"attempt": attempt}
        phase = answer["phase"]
        if phase == "over" or hub.closed.is_set():
            return str(answer["problem"])
        if phase == done:
            hub.closed.wait(SECONDS_TO_LOOK)
        elif phase == "shares":
            message[phase] = member.seal(answer["name"], attempt, answer["keys"])
        elif phase == "numbers":
            with NamedTemporaryFile() as masked:
                write_masked(body, masked, weight, member.masks(answer["sealed"]))
                try:
                    put = partial(hub.put, f"{path}&attempt={attempt}", masked)
                    hub.persist(put, math.inf)
                except Refusal as refused:
                    if "is_over" not in refused.more:
                        raise
                    return refused.problem
        else:
            message[phase] = member.reveal(answer["survivors"])
        done = phase
