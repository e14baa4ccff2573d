"""``shardmlx.evaluate`` on ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.rank_pool import run_in_pool
from tests.helpers.shown import lacking


def test_two_ranks_find_the_perplexity_of_one(small: Path, pirate: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 2):
        output = tmp_path / f"{ranks}.json"
        words = "-m", "shardmlx.evaluate", "--model", small, "--data", pirate, "--output", output
        job = run_in_pool(ranks, *words, timeout=60.0).well()
        found.append(json.loads(output.read_text()))
        assert f"perplexity {found[-1]['perplexity']:.4f} +/-" in job.stdout
        here = {".cache/pirate": str(pirate)}
        assert lacking("export.md", "perplexity", job.stdout, here) == set()
    printed = run_in_pool(2, *words, "--json", "-", timeout=60.0).well()
    whole = json.loads(printed.stdout)
    assert (whole["version"], whole["command"]) == (1, "evaluate")
    assert whole["results"] == found[1] == json.loads(output.read_text())
    assert [rank["layers"] for rank in whole["ranks"]] == [[0, 3], [3, 5]]
    assert sum(rank["weights_bytes"] for rank in whole["ranks"]) > 0
    assert f"perplexity {found[1]['perplexity']:.4f} +/-" in printed.stderr
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["texts"] == 14
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=1e-5)
    line = run_in_pool(2, *words, "--data", tmp_path, timeout=60.0).failure(2)
    assert line.startswith(f"shardmlx: error: {tmp_path}/test.jsonl is missing or empty")
