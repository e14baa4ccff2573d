"""``mpirun -n N python -m shardmlx.chat``: a conversation on rank 0's stdin."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from testbed.jobs import Job
from tests.helpers.mpirun import mlx_lm, mpirun
from tests.helpers.shown import lacking


def chat(ranks: int, lines: list[str], *args: str | Path) -> Job:
    """What is said after these lines were typed, and nothing more."""
    program = shlex.join(
        [
            str(Path(sys.executable).with_name("mpirun")),
            *("-n", str(ranks), "--oversubscribe", "--bind-to", "none", sys.executable),
            *("-m", "shardmlx.chat", "--timeout", "20", *map(str, args)),
        ]
    )
    typed = shlex.quote("".join(f"{line}\n" for line in lines))
    return mpirun(ranks, command=["sh", "-c", f"printf %s {typed} | {program}"])


def test_a_conversation(small: Path) -> None:
    """The first answer is mlx-lm's; the second computes only what is new; a new conversation
    answers as the first did. An empty line of a pipe stops no answer. The end of stdin, or silence
    on a pipe, ends it."""
    said = "What is the colour of the sea?"
    job = chat(
        2,
        [said, "", "And why?", "", "h", "r", said, ""],
        *("--model", small, "--max-tokens", "12"),
    ).well()
    first = mlx_lm("--model", small, "--prompt", said, "--max-tokens", "12").strip()
    said_text = job.stdout.replace("\r", "")
    assert said_text.count(first) == 2
    counts = [
        tuple(map(int, found))
        for found in re.findall(r"\[(\d+) of (\d+) prompt tokens computed, 12 gen", said_text)
    ]
    assert len(counts) == 3
    assert counts[0][0] == counts[0][1]
    # All of the first turn but what its answer reads as, tokenised again, and its last token.
    assert counts[1][1] - counts[1][0] > counts[0][1] - 4
    assert "Peak memory" in said_text
    assert lacking("generate.md", "chat", said_text) == set()
