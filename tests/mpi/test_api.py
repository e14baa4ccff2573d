"""The Python API: the examples of docs/api.md as they stand there, and what it promises beside."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import shardmlx
from testbed.jobs import ROOT
from tests.helpers.markdown import Block, blocks
from tests.helpers.mpirun import mlx_lm, mpirun
from tests.helpers.rank_pool import run_in_pool

EXAMPLES = [block for block in blocks(ROOT / "docs/api.md") if block.info == ("python",)]
ON_TWO_RANKS = "# mpirun -n 2 "


@pytest.fixture(scope="module")
def workplace(small: Path, pirate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the page describes: a model, data, a hostfile."""
    directory = tmp_path_factory.mktemp("api")
    (directory / "model").symlink_to(small)
    (directory / "data").symlink_to(pirate)
    shutil.copy(ROOT / "hostfiles/two-macs", directory / "hosts")
    return directory


@cache
def run(example: str, directory: Path) -> str:
    """Run a program as its first line says; return what it prints."""
    program = directory / "example.py"
    program.write_text(example)
    ranks = 2 if example.startswith(ON_TWO_RANKS) else None
    return run_in_pool(ranks, program, cwd=directory).well().stdout


def example_of(name: str) -> str:
    (block,) = [block for block in EXAMPLES if f"shardmlx.{name}(" in block.text]
    return block.text


def test_every_name_is_on_the_page() -> None:
    page = (ROOT / "docs/api.md").read_text()
    assert [name for name in shardmlx.__all__ if f"`{name}`" not in page] == []
    assert len(EXAMPLES) == page.count("```python")


@pytest.mark.parametrize("block", EXAMPLES, ids=lambda block: block.where)
def test_an_example_runs(block: Block, workplace: Path) -> None:
    assert run(block.text, workplace)


def test_the_notebook_runs(small: Path, pirate: Path, tmp_path: Path) -> None:
    """Cell after cell, in one process, in a copy of the directory that it lies in."""
    notebook = json.loads((ROOT / "examples/first-run.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/smollm2-135m-instruct").symlink_to(small)
    (tmp_path / ".cache/pirate").symlink_to(pirate)
    (tmp_path / "hostfiles").symlink_to(ROOT / "hostfiles")
    (tmp_path / "examples").mkdir()
    assert len(cells) == 4
    work, drawing = cells[:-1], cells[-1]
    losses = run("\n".join([*work, "print(losses)"]), tmp_path / "examples").splitlines()[-1]
    # Ranks of tests start without what matplotlib imports.
    program = f"losses = {losses}\n{drawing}\nfigure.savefig('curve.png')"
    drawn = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=True,
    )
    steps = [str(step) for step in range(4, 41, 4)]
    assert re.findall(r"^ +(\d+) [\d.]+$", drawn.stdout, re.MULTILINE) == steps
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_the_notebook_has_the_outputs_of_a_run_in_which_the_loss_falls() -> None:
    notebook = json.loads((ROOT / "examples/first-run.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [1, 2, 3, 4]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    printed = "".join("".join(output.get("text", [])) for output in cells[-1]["outputs"])
    losses = [float(loss) for loss in re.findall(r"^ +\d+ ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]
    (curve,) = [each["data"] for each in outputs if "image/png" in each.get("data", {})]
    assert base64.b64decode(curve["image/png"]).startswith(b"\x89PNG")
    assert str(ROOT) not in json.dumps(notebook)


def test_the_text_is_that_of_mlx_lm(workplace: Path, small: Path) -> None:
    first, _ = run(example_of("load_pipeline"), workplace).splitlines()
    how = ("--model", small, "--prompt", "What is the sea?", "--max-tokens", "16")
    assert first == mlx_lm(*how).rstrip("\n")


def test_what_all_refuse_is_raised_on_all_and_what_one_fails_in_ends_the_job(
    workplace: Path,
) -> None:
    program = """
import shardmlx
with shardmlx.connect() as transport:
    try:
        shardmlx.load_pipeline("nowhere/at all", transport)
    except shardmlx.UserError as error:
        print(f"rank {transport.rank}: {error.problem}")
    pipeline = shardmlx.load_pipeline("model", transport, context_tokens=256, max_tokens=4)
    for piece in pipeline.stream_generate("Hello", max_tokens=50):
        break  # the caller may leave early
    try:
        pipeline.generate("long " * 300)
    except shardmlx.UserError as error:
        print(f"rank {transport.rank}: {error.remedy}")
    print(f"rank {transport.rank}: {len(pipeline.generate('Hello')) > 0}", flush=True)
    transport.barrier("all that was said")
    if transport.rank == 1:
        raise RuntimeError("no more")
    transport.barrier("what never comes")
"""
    (workplace / "refused.py").write_text(program)
    job = mpirun(2, workplace / "refused.py", cwd=workplace)
    assert job.stdout.count("nowhere/at all") == 2
    assert job.stdout.count("context_tokens") == 2
    assert "rank 0: True" in job.stdout
    assert "rank 1: False" in job.stdout
    assert job.returncode == 1
    assert "shardmlx: failed: rank 1 on " in job.output
    assert "RuntimeError: no more" in job.output


def test_importing_shardmlx_loads_neither_mlx_nor_mpi() -> None:
    program = (
        "import sys, shardmlx; dir(shardmlx); "
        "shardmlx.TrainConfig, shardmlx.plan_training, shardmlx.simulate, shardmlx.connect; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'mlx', 'mlx_lm', 'mpi4py'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_name_that_there_is_not_is_an_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        shardmlx.__getattr__("nonsense")
