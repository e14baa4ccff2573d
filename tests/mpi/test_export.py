"""``shardmlx.export`` on two ranks."""

from __future__ import annotations

from pathlib import Path

from shardmlx.modelfiles.model_files import open_model
from tests.helpers.rank_pool import run_in_pool


def tensors(directory: Path) -> dict[str, bytes]:
    return {
        name: (directory / place.file).read_bytes()[place.start : place.end]
        for name, place in open_model(str(directory)).tensors.items()
    }


def test_two_ranks_export_what_one_does_and_refuse_the_same(small: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        words = "-m", "shardmlx.export", small, "-o", tmp_path / str(number), "--quantize", "4:32"
        job = run_in_pool(number, *words, "--verify", timeout=60.0)
        assert job.returncode == 0, job.output
        assert "tensors against the family llama: names, shapes, packing" in job.stdout
    assert tensors(tmp_path / "1") == tensors(tmp_path / "2")
    again = run_in_pool(2, *words, timeout=60.0)
    assert again.returncode == 2
    assert again.error_lines == [
        f"shardmlx: error: -o {tmp_path / '2'} holds a model: name a new directory"
    ]
