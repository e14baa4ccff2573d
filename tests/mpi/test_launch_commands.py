"""launch with a real mpirun: the commands that are not restarted, and what they read and print."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from tests.helpers.mpirun import mlx_lm, mpirun

LAUNCH = [sys.executable, "-m", "shardmlx", "launch"]


def test_a_prompt_is_piped_through(small: Path) -> None:
    """The line of mpirun is printed, and the answer is mlx_lm's; more ranks than cores may be."""
    words = ["--model", str(small), "--max-tokens", "8"]
    command = shlex.join([*LAUNCH, "-n", "2", "generate", *words, "--no-verbose", "-p", "-"])
    job = mpirun(2, command=["sh", "-c", f"printf %s 'Tell me of ships' | {command}"])
    assert job.returncode == 0, job.output
    printed, _, answer = job.stdout.partition("\n")
    assert printed.startswith("$ ")
    assert "-m shardmlx.generate --model" in printed
    assert answer.strip() == mlx_lm(*words, "--prompt", "Tell me of ships").strip()


def test_doctor_is_launched(tmp_path: Path) -> None:
    words = ["-n", "1", "doctor", "--seconds", "0.1", "--json", str(tmp_path / "found.json")]
    job = mpirun(1, command=[*LAUNCH, *words])
    assert job.returncode == 0, job.output
    assert json.loads((tmp_path / "found.json").read_text())["hosts"]
