"""Two hosts, of which the first alone has the model, over a real link."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import mlx_lm

from tests.helpers.hosts import Lab
from tests.helpers.mpirun import mpirun
from tests.helpers.shown import lacking

PROMPT = "Who sails on the sea?"
TOKENS = 8


def said_by_mlx_lm(model: Path) -> str:
    loaded, tokenizer, *_ = mlx_lm.load(str(model))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    return str(mlx_lm.generate(loaded, tokenizer, prompt, max_tokens=TOKENS))


def test_the_second_host_is_sent_its_part_of_the_model(lab: Lab, small: Path) -> None:
    shutil.copytree(small, lab.home("mac1") / "model")
    command = lab.mpirun(
        2,
        *("-m", "shardmlx.generate", "--model", "model", "--weight-cache", "kept"),
        *("--prompt", PROMPT, "--max-tokens", str(TOKENS)),
    )
    job = mpirun(2, command=command)
    assert lacking("weights.md", "weights", job.stdout) == set()
    assert job.answer.strip("\n") == said_by_mlx_lm(small)
    assert not (lab.home("mac1") / "kept").exists()
    assert (lab.home("mac2") / "kept").exists()
    again = mpirun(2, command=command)
    assert again.answer == job.answer
    assert re.search(r"^weights: [\d.]+ [GMK]iB from caches in", again.stdout, re.M)
