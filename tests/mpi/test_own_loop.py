"""Loops of a program's own under mpirun: the example of the page, and shares of each layer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from testbed.jobs import ROOT
from tests.helpers.loops import EVERYTHING, oracle
from tests.helpers.markdown import blocks
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool


def test_the_example_of_the_page_runs(small: Path, tmp_path: Path) -> None:
    (block,) = [each for each in blocks(ROOT / "docs/own-loop.md") if each.info == ("python",)]
    (tmp_path / "model").symlink_to(small)
    program = tmp_path / "own_loop.py"
    program.write_text(block.text)
    printed = run_in_pool(2, program, cwd=tmp_path).well().stdout
    assert re.findall(r"^step (\d): reward \d\.\d\d, \{'loss:sum'", printed, re.MULTILINE) == [
        *"012"
    ]
    # The sampled log-probabilities are those that training computes.
    differences = re.findall(r"'logprob_difference:mean': ([\d.e-]+)", printed)
    assert max(map(float, differences), default=0.0) < 1e-4
    (state,) = (tmp_path / "states").glob("*.safetensors")
    assert f"saved {state.stat().st_size} bytes" in printed


@pytest.mark.parametrize(
    ("ranks", "model", "how"),
    [(2, "small", {}), (2, "small_tied", {}), (4, "small", {"schedule": "zb-v"})],
    ids=["2 ranks", "tied", "zb-v on 4"],
)
def test_ranks_that_share_each_layer_have_the_losses_of_one_process(
    ranks: int, model: str, how: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path: Path = request.getfixturevalue(model)
    options = json.dumps({"tensor_parallel": 2, "device": "cpu", **how})
    job = run_in_pool(ranks, PROGRAMS / "loop_steps.py", path, options, cwd=tmp_path)
    found = json.loads(job.well().stdout.splitlines()[-1])
    head = "lm_head" if model == "small" else "model.embed_tokens"
    expected = oracle(path, (*EVERYTHING, head), steps=4, eps=1e-5)
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert found["difference"] < 1e-4
